"""Sizes of the caches and the rings tagged by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax.cache import CacheShape, Ring, kv_bytes_per_token, new_cache, window_ring_size
from dsv41_jax.config import Config
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING

FLASH, TINY = Config.preset("flash"), Config.preset("tiny")
SLOTS, SIZE = 3, 8


def abstract(cfg, numerics, shape, **options):
    return jax.eval_shape(lambda: new_cache(cfg, numerics, shape, **options))


@pytest.mark.parametrize("numerics", [REFERENCE, SERVING], ids=lambda n: n.name)
@pytest.mark.parametrize("page", [2, 16, 64])
def test_a_token_costs_890_bytes(numerics, page):
    shape = CacheShape(slots=4, pages=100, page_size=page)
    cache = abstract(FLASH, numerics, shape)
    assert kv_bytes_per_token(cache, shape) == 890
    leaves = jax.tree.leaves(cache.pools)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == 890 * 100 * page
    assert sorted(cache.pools) == [2, 8, 14, 20]


def test_what_the_kernels_need_of_the_layout():
    """int32 words, rows of at most 256 elements, keys and their scales in planes of their own."""
    cache = abstract(FLASH, SERVING, CacheShape(1, 2))
    for owner, pool in cache.pools.items():
        entries = 64 // (2 if owner < 20 else 1)
        assert pool.latents.words.shape == (2, entries, 72)
        assert pool.keys.codes.shape == (2, entries, 16) and pool.keys.scales.shape[-1] == 1
        assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(pool))


def test_a_window_row_costs_528_bytes():
    cache = abstract(FLASH, SERVING, CacheShape(5, 1), drafts=True)
    rings = (*cache.windows, *cache.drafts)
    assert len(cache.windows) == 40 and len(cache.drafts) == 3
    for ring in rings:
        assert ring.tags.shape == (5, 256) and ring.rows.nbytes == 5 * 256 * 528
    # One sequence's visible rows, as ARCHITECTURE 4.8 counts them.
    assert sum(ring.rows.nbytes for ring in rings) // 5 // 256 * 128 == 2_906_112


def test_rings_hold_what_rejected_drafts_overwrite():
    assert window_ring_size(FLASH) == 256 and window_ring_size(TINY) == 32
    for cfg in (FLASH, TINY):
        assert window_ring_size(cfg) >= cfg.sliding_window + cfg.dspark_block_size + 1
    pairs = abstract(FLASH, FLOAT32, CacheShape(1, 1)).pairs
    assert sorted(pairs) == [2, 8, 14]
    assert all(ring.tags.shape[1] >= FLASH.dspark_block_size + 2 for ring in pairs.values())


def test_a_new_cache_holds_nothing():
    cache = new_cache(TINY, REFERENCE, CacheShape(2, 3, 16), drafts=True)
    for ring in (*cache.windows, *cache.drafts, *cache.pairs.values(), cache.carry):
        assert np.array_equal(ring.tags, np.full_like(ring.tags, -1))
        assert not np.asarray(ring.at(jnp.arange(2), jnp.zeros((2, 5), int))[1]).any()
    assert (np.asarray(cache.history) == -1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, 3), "page_size=3"),
        ((1, 1, 0), "page_size=0"),
        ((0, 1), "slots=0"),
        ((1, 0), "pages=0"),
    ],
)
def test_impossible_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        CacheShape(*arguments)


write = jax.jit(lambda ring, *a: ring.write(*a))
read = jax.jit(lambda ring, *a: ring.at(*a))
tail = jax.jit(lambda ring, *a: ring.tail(*a, 5))
STEPS = st.lists(
    st.tuples(
        st.permutations(range(SLOTS)),
        st.lists(st.integers(0, 11), min_size=2, max_size=2),
        st.lists(st.integers(0, 30), min_size=2, max_size=2),
    ),
    max_size=5,
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, probe=st.integers(0, 30))
def test_a_ring_remembers_the_newest_row_of_each_place(steps, probe):
    """Against a dictionary: chunks of 11 rows, more than the ring holds, live or not, rewound."""
    ring = Ring(jnp.full((SLOTS, SIZE, 1), jnp.nan), jnp.full((SLOTS, SIZE), -1, jnp.int32))
    model: dict[tuple[int, int], tuple[int, float]] = {}
    for number, (slots, lengths, starts) in enumerate(steps):
        position = np.array(starts)[:, None] + np.arange(11)
        live = np.arange(11) < np.array(lengths)[:, None]
        rows = 1000.0 * number + position
        slot = np.array(slots[:2])
        arrays = (jnp.asarray(a) for a in (rows[..., None], slot, position, live))
        ring = write(ring, *arrays)
        for b, t in np.ndindex(live.shape):
            if live[b, t]:
                model[slot[b], position[b, t] % SIZE] = (position[b, t], rows[b, t])
    position = np.arange(probe - 9, probe + 3) + np.zeros((SLOTS, 1), int)
    values, exists = read(ring, jnp.arange(SLOTS), jnp.asarray(position))
    for b, i in np.ndindex(position.shape):
        held = model.get((b, position[b, i] % SIZE), (-1, 0.0))
        assert exists[b, i] == (held[0] == position[b, i] and position[b, i] >= 0)
        if exists[b, i]:
            assert values[b, i, 0] == held[1]


def test_tail_is_what_lies_before_the_start():
    ring = Ring(jnp.zeros((SLOTS, SIZE, 1)), jnp.full((SLOTS, SIZE), -1, jnp.int32))
    position = jnp.arange(3, 10)[None]
    ring = write(ring, position[..., None] * 1.0, jnp.asarray([1]), position, position > 3)
    rows, exists = tail(ring, jnp.asarray([1, 0]), jnp.asarray([7, 7]))
    assert np.array_equal(exists, [[False, False, True, True, True], [False] * 5])
    assert np.array_equal(rows[0, 2:, 0], [4, 5, 6])
    _, exists = tail(ring, jnp.asarray([1]), jnp.asarray([2]))
    assert not np.asarray(exists).any()  # nothing has a negative position
