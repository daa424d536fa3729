"""Text to token ids and back, and the compressed token map of Engram (ARCHITECTURE 9.1)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, normalizers

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError, shorten

_REPLACEMENT = "\ufffd"
# Stands for a lone space while both ends are stripped; a private-use character no text holds.
_LONE_SPACE = "\ue000"


class Tokenizer:
    """The released tokenizer.json of one checkpoint directory.

    Special tokens spelled out in a text are parsed as such; nothing is added but the BOS asked for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_token_id: int) -> None:
        self._backend = backend
        self._bos_token_id = bos_token_id

    @classmethod
    def from_dir(cls, directory: Path | str, cfg: Config) -> "Tokenizer":
        """Read `directory`/tokenizer.json; UserError if absent, damaged or too large for cfg."""
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: is missing")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the backend raises plain Exception for whatever is wrong
            raise UserError(f"{path}: is not a tokenizer file: {error}") from error
        size = backend.get_vocab_size()
        if size > cfg.vocab_size:
            raise UserError(
                f"{path}: has {size} tokens, the model only vocab_size={cfg.vocab_size}"
            )
        return cls(backend, bos_token_id=cfg.bos_token_id)

    def __len__(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of `text`, behind a BOS if `bos`; UserError for lone surrogates."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"text {shorten(text)} is not valid Unicode: {error.reason}") from error
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [self._bos_token_id, *ids] if bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that form no UTF-8 become U+FFFD; UserError for a foreign id."""
        self._check(ids)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """The raw vocabulary string of one id; UserError for a foreign id."""
        self._check((token_id,))
        text = self._backend.id_to_token(token_id)
        assert text is not None
        return text

    def knows(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id; a model's vocabulary may be larger."""
        word = range(2**32)  # what the backend takes without an OverflowError
        return token_id in word and self._backend.id_to_token(token_id) is not None

    def _check(self, ids: Sequence[int]) -> None:
        foreign = [i for i in ids if not self.knows(i)]
        if foreign:
            raise UserError(f"token id {foreign[0]} must be one of the tokenizer's {len(self)} ids")


class Detokenizer:
    """Text of a growing id sequence, piece by piece.

    The pieces joined are exactly `Tokenizer.decode` of all ids. No piece shows a character whose
    bytes are still arriving: only the last U+FFFD of a text can be one, so that one is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending ids' text that are out already

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often empty inside a multi-byte character."""
        text = self._text([*self._pending, token_id])
        self._pending.append(token_id)
        stable = text.removesuffix(_REPLACEMENT)
        piece = stable[self._shown :]
        self._shown = len(stable)
        if stable == text:
            self._pending, self._shown = [], 0
        return piece

    def finish(self) -> str:
        """What was held back: empty, or one U+FFFD for an unfinished character."""
        piece = self._text(self._pending)[self._shown :]
        self._pending, self._shown = [], 0
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


def token_map(tokenizer: Tokenizer, cfg: Config) -> tuple[np.ndarray, int]:
    """Engram's compressed ids (ARCHITECTURE 9.1): (int32 [len(tokenizer)], compressed padding id).

    Tokens that differ only in case, accents, compatibility forms or blanks share one id; ids count
    up in first-seen order. UserError if their number is not cfg.engram_compressed_vocab_size (this
    is another tokenizer then, every hash would be wrong) or if an id below the length is unused.
    """
    normalizer = _normalizer()
    first_seen: dict[str, int] = {}
    mapped = np.empty(len(tokenizer), np.int32)
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id])
        if _REPLACEMENT in text:
            key = tokenizer.token(token_id)
        else:
            key = normalizer.normalize_str(text) or text
        mapped[token_id] = first_seen.setdefault(key, len(first_seen))
    if len(first_seen) != cfg.engram_compressed_vocab_size:
        raise UserError(
            f"the tokenizer has {len(first_seen)} distinct Engram keys, the config says "
            f"engram_compressed_vocab_size={cfg.engram_compressed_vocab_size}"
        )
    if not cfg.engram_pad_token_id < len(mapped):
        raise UserError(
            f"engram_pad_token_id={cfg.engram_pad_token_id} must be one of the tokenizer's "
            f"{len(mapped)} ids"
        )
    return mapped, int(mapped[cfg.engram_pad_token_id])


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
