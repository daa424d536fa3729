"""Cache rows as words, and pages of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.paging import entries_per_page, put_entries, take_entries
from pallas_kernels.quant import Fp4KvRows, Fp4Rows, Fp8Rows
from pallas_kernels.quant.storage import (
    Bf16Rows,
    KeyRows,
    LatentRows,
    PlainRows,
    RowTypes,
    WindowRows,
    bytes_of,
    row_types,
    words_of,
)

TYPES = {LatentRows: Fp4KvRows, WindowRows: Fp8Rows, KeyRows: Fp4Rows}
WIDTHS = {LatentRows: (64, 512), WindowRows: (64, 512), KeyRows: (64, 128)}
CASES = [(kind, width) for kind, widths in WIDTHS.items() for width in widths]
PAGES, ENTRIES, WIDTH = 4, 6, 64
ENCODE = {kind: jax.jit(kind.encode) for kind in (*TYPES, PlainRows)}
decode = jax.jit(lambda rows, dtype: rows.decode(dtype), static_argnums=1)
put = jax.jit(put_entries)
take = jax.jit(take_entries)


def planes(rows) -> list[np.ndarray]:
    return [np.asarray(plane) for plane in jax.tree.leaves(rows)]


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(("kind", "width"), CASES)
def test_rows_hold_what_the_encoding_holds(kind, width):
    x = values(3, 5, width)
    rows = ENCODE[kind](x)
    packed = jax.jit(TYPES[kind].quantize)(x)
    for dtype in (jnp.float32, jnp.bfloat16):
        assert np.array_equal(decode(rows, dtype), packed.dequantize(dtype))
    assert rows.nbytes == packed.nbytes


@pytest.mark.parametrize(
    ("kind", "width", "size"),
    [(LatentRows, 512, 288), (KeyRows, 128, 68), (WindowRows, 512, 528), (PlainRows, 512, 2048)],
)
def test_bytes_of_a_release_row(kind, width, size):
    rows = kind.zeros((2, 3), width)
    assert rows.nbytes == 2 * 3 * size
    assert kind is PlainRows or all(plane.dtype == jnp.int32 for plane in jax.tree.leaves(rows))


def test_row_types_follow_the_numerics():
    assert row_types(FLOAT32).latent is row_types(FLOAT32).key is PlainRows
    for numerics in (REFERENCE, SERVING):
        kinds = row_types(numerics)
        assert (kinds.latent, kinds.window, kinds.key) == (LatentRows, WindowRows, KeyRows)
        assert kinds.query is Fp4Rows


@pytest.mark.parametrize(
    ("cache", "kind", "query"), [("fp8", WindowRows, Fp8Rows), ("bf16", Bf16Rows, None)]
)
def test_a_cache_for_comparison_is_one_encoding_throughout(cache, kind, query):
    assert row_types(replace(REFERENCE, cache=cache)) == RowTypes(kind, kind, kind, query)


def test_an_unknown_cache_is_refused():
    with pytest.raises(ValueError, match="cache 'fp5' must be one of fp4, fp8, bf16"):
        row_types(replace(SERVING, cache="fp5"))


def test_bf16_rows_keep_bf16_values():
    x = values(3, 40).astype(jnp.bfloat16)
    rows = Bf16Rows.encode(x)
    assert np.array_equal(rows.decode(jnp.float32), x.astype(jnp.float32))
    assert rows.nbytes == 2 * x.size


@pytest.mark.parametrize("n", [4, 8, 72])
def test_words_are_little_endian_and_reversible(n):
    data = jnp.arange(2 * n, dtype=jnp.uint8).reshape(2, n)
    words = words_of(data)
    assert words.dtype == jnp.int32 and words.shape == (2, n // 4)
    assert np.array_equal(np.asarray(words), np.asarray(data).view("<i4"))
    assert np.array_equal(bytes_of(words), data)


def test_odd_byte_counts_stay_bytes():
    data = jnp.arange(6, dtype=jnp.uint8)
    assert words_of(data) is data and bytes_of(data) is data


def test_zeros_read_as_zeros():
    for kind, width in CASES:
        assert not np.asarray(decode(kind.zeros((2,), width), jnp.float32)).any()


def test_take_and_put_are_inverse():
    for kind in (LatentRows, KeyRows, PlainRows):
        pool = ENCODE[kind](values(PAGES, ENTRIES, WIDTH))
        rows = ENCODE[kind](values(2, WIDTH, seed=1))
        page, entry = jnp.asarray([3, 0]), jnp.asarray([5, 2])
        changed = pool.put(rows, page, entry)
        for got, want in zip(planes(changed.take(page, entry)), planes(rows), strict=True):
            assert np.array_equal(got, want)


@settings(deadline=None, max_examples=30)
@given(
    table=st.lists(st.integers(-1, PAGES), min_size=3, max_size=3, unique=True),
    start=st.integers(-2, 3 * ENTRIES + 2),
    write=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_put_entries_touches_the_written_rows_alone(table, start, write):
    """A page of -1 or beyond the pool, an entry outside the table, a row that is not written: every
    other row of every plane keeps its bits.
    """
    pool = ENCODE[KeyRows](values(PAGES, ENTRIES, WIDTH))
    rows = ENCODE[KeyRows](values(1, 5, WIDTH, seed=2))
    entries = start + np.arange(5)
    changed = put(
        pool, jnp.asarray([table]), jnp.asarray(entries[None]), rows, jnp.asarray([write])
    )
    want = [plane.copy() for plane in planes(pool)]
    for i, entry in enumerate(entries):
        if write[i] and 0 <= entry < 3 * ENTRIES and 0 <= table[entry // ENTRIES] < PAGES:
            for plane, new in zip(want, planes(rows), strict=True):
                plane[table[entry // ENTRIES], entry % ENTRIES] = new[0, i]
    for got, expected in zip(planes(changed), want, strict=True):
        assert np.array_equal(got, expected)


def test_take_entries_follows_each_request_s_table():
    pool = PlainRows(values(PAGES, ENTRIES, WIDTH))
    table = jnp.asarray([[2, 0, -1], [1, 3, 2]])
    entries = jnp.asarray([[0, 5, 6], [17, 6, 1]])
    got = np.asarray(take(pool, table, entries).values)
    data = np.asarray(pool.values)
    for b in range(2):
        for i, entry in enumerate(np.asarray(entries[b])):
            page = int(table[b, entry // ENTRIES])
            assert np.array_equal(got[b, i], data[page, entry % ENTRIES])
    assert entries_per_page(pool) == ENTRIES


def test_every_reader_sees_what_was_written():
    """Rows of token 0 and of later tokens of a page come back alike from both kinds of read."""
    x = values(1, 2 * ENTRIES, WIDTH, seed=3)
    rows = ENCODE[LatentRows](x)
    table = jnp.asarray([[3, 1]])
    every = jnp.arange(2 * ENTRIES)[None]
    empty = LatentRows.zeros((PAGES, ENTRIES), WIDTH)
    pool = put(empty, table, every, rows, jnp.ones_like(every, bool))
    want = decode(rows, jnp.float32)
    assert np.array_equal(decode(take(pool, table, every), jnp.float32), want)
    listed = decode(pool, jnp.float32)[table[0]].reshape(1, -1, WIDTH)
    assert np.array_equal(listed, want)
