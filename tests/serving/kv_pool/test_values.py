"""Names of pages, and what stands before their bytes."""

from dataclasses import replace

import numpy as np
import pytest

from serving.kv_pool import values
from serving.kv_pool.keys import Chain, Namespace
from serving.kv_pool.values import HEADER_BYTES, Codec, Verdict

SPACE = Namespace("model", "float32", 4, ((".a", "float32", (4, 2)), (".b", "uint8", (2, 3))))
TOKENS = np.arange(20, dtype=np.int32)


def keys(tokens, count: int, space: Namespace = SPACE) -> list[bytes]:
    return Chain(space.digest, space.page_size).keys(np.asarray(tokens, np.int32), count)


def test_a_key_says_all_tokens_up_to_its_end_and_none_behind():
    whole = keys(TOKENS, 5)
    assert len(set(whole)) == 5 and all(len(key) == 32 for key in whole)
    assert keys([*TOKENS[:8], *range(90, 99)], 3)[:2] == whole[:2]
    for changed in range(12):
        other = TOKENS.copy()
        other[changed] += 1
        first = changed // 4
        assert [a == b for a, b in zip(keys(other, 3), whole, strict=False)] == [
            index < first for index in range(3)
        ]


def test_a_growing_chain_is_that_of_the_whole():
    chain, whole = Chain(SPACE.digest, 4), keys(TOKENS, 5)
    assert chain.keys(TOKENS[:9], 2) == whole[:2]
    assert chain.keys(TOKENS, 5) == whole and chain.keys(TOKENS, 1) == whole[:1]
    with pytest.raises(ValueError, match="count=6"):
        chain.keys(TOKENS, 6)


def test_pages_of_another_model_or_layout_have_other_names():
    others = [
        replace(SPACE, model="other"),
        replace(SPACE, numerics="serving"),
        replace(SPACE, page_size=2),
        replace(SPACE, version=2),
        replace(SPACE, planes=SPACE.planes[:1]),
        replace(SPACE, planes=SPACE.planes[::-1]),
    ]
    named = [keys(TOKENS, 2, space) for space in (SPACE, *others)]
    assert len({key for pair in named for key in pair}) == 2 * len(named)
    assert SPACE.page_bytes == 32 + 6


@pytest.fixture
def codec() -> Codec:
    return Codec(SPACE.digest, SPACE.page_bytes)


@pytest.fixture
def sealed(codec) -> tuple[bytes, np.ndarray]:
    row = np.zeros(codec.value_bytes, np.uint8)
    row[HEADER_BYTES:] = np.arange(SPACE.page_bytes)
    [key] = keys(TOKENS, 1)
    codec.seal(key, row)
    return key, row


def test_what_was_sealed_is_good(codec, sealed):
    key, row = sealed
    assert codec.verdict(key, row) is Verdict.GOOD
    assert row[HEADER_BYTES:].tolist() == list(range(SPACE.page_bytes))


def test_no_changed_byte_is_taken(codec, sealed):
    key, row = sealed
    used = HEADER_BYTES - 16
    for index in [*range(used), *range(HEADER_BYTES, len(row))]:
        bad = row.copy()
        bad[index] ^= 1
        assert codec.verdict(key, bad) is not Verdict.GOOD


def test_another_page_is_corrupt_and_another_format_foreign(codec, sealed, monkeypatch):
    key, row = sealed
    assert codec.verdict(keys(TOKENS, 2)[1], row) is Verdict.CORRUPT
    assert codec.verdict(key, np.zeros_like(row)) is Verdict.CORRUPT
    other = Codec(replace(SPACE, model="other").digest, SPACE.page_bytes)
    assert other.verdict(key, row) is Verdict.FOREIGN
    monkeypatch.setattr(values, "FORMAT_VERSION", 2)
    assert codec.verdict(key, row) is Verdict.FOREIGN
