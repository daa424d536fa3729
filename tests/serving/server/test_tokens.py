"""Single tokens as text, bytes and labels."""

import pytest

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.request import TokenLogprobs
from serving.server.tokens import TokenTexts


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return Tokenizer.from_dir(tiny_dir, Config.preset("tiny"))


@pytest.mark.parametrize("text", ["plain", "é漢🙂 \n\t", "<think>x</think>", "a\ufffdb"])
def test_bytes_of_tokens_joined_are_the_text(tokenizer, text):
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text, bos=False)
    assert b"".join(map(texts.bytes, ids)) == text.encode()


def test_labels_tell_all_tokens_apart(tokenizer):
    texts = TokenTexts(tokenizer)
    labels = [texts.label(token) for token in range(512)]
    assert len(set(labels)) == 512
    assert texts.label(tokenizer.encode("漢", bos=False)[0]) == "bytes:\\xe6"


def test_ids_without_a_token_are_empty(tokenizer):
    assert TokenTexts(tokenizer).text(512) == "" and TokenTexts(tokenizer).bytes(600) == b""


def test_the_sampled_token_is_among_the_alternatives(tokenizer):
    token = TokenLogprobs(70, -3.0, ((80, -0.5), (90, -1.0)))
    report = TokenTexts(tokenizer).completion(token, 1, 4)
    texts = [tokenizer.decode([i]) for i in (70, 80)]
    assert report["top_logprobs"] == [{texts[1]: -0.5, texts[0]: -3.0}]
    assert (report["tokens"], report["text_offset"]) == ([texts[0]], [4])
