"""State that leaves the device and comes back bit for bit, elsewhere, without touching others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.config import Config
from pallas_kernels.numerics import Numerics
from serving.swap import private, put_state, set_counts, take_state

SLOTS, PAGES = 3, 7


@pytest.fixture(scope="module", params=["float32", "reference"])
def filled(request):
    """A cache of random bytes, NaNs among them."""
    numerics = Numerics.named(request.param)
    shape = CacheShape(SLOTS, PAGES, page_size=4)
    cache = new_cache(Config.preset("tiny"), numerics, shape, drafts=True, counts=True)
    rng = np.random.default_rng(0)

    def random(leaf: jax.Array) -> jax.Array:
        raw = rng.integers(0, 256, (*leaf.shape, leaf.dtype.itemsize), np.uint8)
        return jnp.asarray(raw.view(leaf.dtype)[..., 0])

    return jax.tree.map(random, cache)


def bits(tree) -> list[np.ndarray]:
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return [leaf.reshape(leaf.shape[0], -1).view(np.uint8) for leaf in leaves]


def moved(cache, slot, pages, to_slot, to_pages):
    """The cache after a request was taken to the host and put elsewhere."""
    width = 5

    def row(numbers):
        return np.array([[*numbers, *[-1] * (width - len(numbers))]], np.int32)

    saved = jax.tree.map(np.asarray, take_state(cache, np.array([slot]), row(pages)))
    return put_state(cache, np.array([to_slot]), row(to_pages), saved)


def test_state_comes_back_in_another_slot_and_other_pages(filled):
    after = moved(filled, 2, [6, 0, 3], 1, [3, 5, 1])
    for old, new in zip(bits(private(filled)), bits(private(after)), strict=True):
        np.testing.assert_array_equal(new[1], old[2])
        np.testing.assert_array_equal(new[[0, 2]], old[[0, 2]])
    for old, new in zip(bits(filled.pools), bits(after.pools), strict=True):
        np.testing.assert_array_equal(new[[3, 5, 1]], old[[6, 0, 3]])
        np.testing.assert_array_equal(new[[0, 2, 4, 6]], old[[0, 2, 4, 6]])


def test_the_same_place_changes_nothing(filled):
    after = moved(filled, 0, [4, 2], 0, [4, 2])
    for old, new in zip(bits(filled), bits(after), strict=True):
        np.testing.assert_array_equal(new, old)


def test_without_pages_only_private_rows_move(filled):
    after = moved(filled, 0, [], 1, [])
    for old, new in zip(bits(filled.pools), bits(after.pools), strict=True):
        np.testing.assert_array_equal(new, old)


def test_nobody_moves(filled):
    after = moved(filled, -1, [], -1, [])
    for old, new in zip(bits(filled), bits(after), strict=True):
        np.testing.assert_array_equal(new, old)


def test_private_is_everything_but_the_pools(filled):
    whole, pools = len(jax.tree.leaves(filled)), len(jax.tree.leaves(filled.pools))
    assert len(jax.tree.leaves(private(filled))) == whole - pools
    assert all(leaf.shape[0] == SLOTS for leaf in jax.tree.leaves(private(filled)))
    assert all(leaf.shape[0] == PAGES for leaf in jax.tree.leaves(filled.pools))


def test_counts_of_one_slot(filled):
    counts = np.arange(filled.counts.shape[1], dtype=np.int32)
    after = set_counts(filled, np.array([1, -1]), np.stack([counts, counts + 1]))
    np.testing.assert_array_equal(after.counts[1], counts)
    np.testing.assert_array_equal(after.counts[0], filled.counts[0])
    np.testing.assert_array_equal(after.counts[2], filled.counts[2])
