"""A byte-level BPE with V4.1's special tokens (ARCHITECTURE section 13)."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# V4.1's own spellings; drafts open with the id of the system role, as in the release.
NOISE, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"
SPECIAL = (
    *(BOS, EOS, PAD, NOISE, "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"),
    *("<think>", "</think>", "｜DSML｜", IMAGE),
    *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")),
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> tokenizers.Tokenizer:
    """Special tokens first, in the order of ``SPECIAL``, then 256 bytes and the merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
