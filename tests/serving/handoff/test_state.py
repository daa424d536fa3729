"""The private rows that decoding reads, from one slot to another one, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.config import Config
from pallas_kernels.numerics import Numerics
from serving.handoff.state import put_token, put_windows, state_bytes, take_windows
from tests.serving.test_programs_memory import COPY, cache_shapes

SLOTS, PAGES, WINDOW = 3, 2, 16
CFG = Config.preset("tiny")


def tags_of(size: int, length: int) -> np.ndarray:
    """Tags of a ring in which positions 0 .. length-1 were written, the last of them kept."""
    tags = np.full(size, -1, np.int32)
    written = np.arange(max(length - size, 0), length)
    tags[written % size] = written
    return tags


def filled(numerics: str, lengths: list[int], *, drafts: bool = True):
    """A cache of random bytes, in whose slots so many positions were written."""
    shape = CacheShape(SLOTS, PAGES, page_size=4)
    cache = new_cache(CFG, Numerics.named(numerics), shape, drafts=drafts, counts=True)
    rng = np.random.default_rng(0)

    def random(path: tuple, leaf: jax.Array) -> np.ndarray:
        if jax.tree_util.keystr(path).endswith(".tags"):
            return np.stack([tags_of(leaf.shape[1], length) for length in lengths])
        raw = rng.integers(0, 256, (*leaf.shape, leaf.dtype.itemsize), np.uint8)
        return raw.view(leaf.dtype)[..., 0]

    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(random, cache))


@pytest.fixture(scope="module")
def moves():
    """Compiled once for all shapes of a numerics."""
    return jax.jit(take_windows), jax.jit(put_windows)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def bits(leaf: jax.Array) -> np.ndarray:
    host = np.ascontiguousarray(leaf)
    return host.reshape(len(host), -1).view(np.uint8)


def rows_at(ring, slot: int, positions: np.ndarray) -> list[bytes]:
    """The bytes of the rows at positions of a slot, all of which must be there."""
    tags, places = np.asarray(ring.tags)[slot], positions % ring.tags.shape[1]
    np.testing.assert_array_equal(tags[places], positions)
    return [np.asarray(leaf)[slot, places].tobytes() for leaf in jax.tree.leaves(ring.rows)]


def rings_of(cache) -> list:
    return [*cache.windows, *cache.drafts]


@pytest.mark.parametrize("numerics", ["float32", "reference"])
@pytest.mark.parametrize("length", [1, 16, 41])
def test_a_request_goes_on_in_another_slot(moves, numerics, length):
    take, put = moves
    a, b = filled(numerics, [9, 30, length]), filled(numerics, [60, 3, 50])
    values = take(a, ints(2), ints(length))
    assert values.shape == (1, state_bytes(a)[0]) and values.dtype == jnp.uint8
    inputs = ints(1), ints(length), ints(77), ints(5, 6, 7)[None], np.array([True]), values
    after = put(b, *inputs)
    last = np.arange(max(length - WINDOW, 0), length)
    for old, new in zip(rings_of(a), rings_of(after), strict=True):
        assert rows_at(new, 1, last) == rows_at(old, 2, last)
    for owner, ring in a.pairs.items():
        assert rows_at(after.pairs[owner], 1, last[-1:]) == rows_at(ring, 2, last[-1:])
    assert after.last_token[1] == 77 and after.position[1] == length
    np.testing.assert_array_equal(after.history[1], [5, 6, 7])
    for old, new in zip(jax.tree.leaves(b), jax.tree.leaves(after), strict=True):
        others = [0, 2] if len(old) == SLOTS else slice(None)
        np.testing.assert_array_equal(bits(new)[others], bits(old)[others])


def test_positions_before_the_prompt_are_zeros(moves):
    """Whatever another request left there."""
    a = filled("float32", [40, 40, 2])
    short = np.asarray(moves[0](a, ints(2), ints(2)))
    plain, drafts = state_bytes(a)
    ring = a.windows[0]
    row = sum(leaf.dtype.itemsize * leaf[0, 0].size for leaf in jax.tree.leaves(ring.rows))
    assert not short[0, : (WINDOW - 2) * row].any() and short[0, (WINDOW - 2) * row :].any()
    assert 0 < drafts < plain


def test_without_draft_windows_there_is_nothing_to_draft_from(moves):
    a, b = filled("float32", [30, 30, 30], drafts=False), filled("float32", [60, 40, 50])
    values = np.zeros((1, state_bytes(b)[0]), np.uint8)
    taken = np.asarray(jax.jit(take_windows)(a, ints(0), ints(30)))
    assert taken.shape[1] == state_bytes(b)[0] - state_bytes(b)[1]
    values[:, : taken.shape[1]] = taken
    inputs = ints(1), ints(30), ints(7), ints(1, 2, 3)[None], np.array([False]), values
    after = moves[1](b, *inputs)
    for ring in after.drafts:
        assert (np.asarray(ring.tags)[1] == -1).all()
        np.testing.assert_array_equal(
            np.asarray(ring.tags)[[0, 2]], [tags_of(32, 60), tags_of(32, 50)]
        )
    last = np.arange(14, 30)
    for old, new in zip(a.windows, after.windows, strict=True):
        assert rows_at(new, 1, last) == rows_at(old, 0, last)


def test_nobody_is_left_out(moves):
    b = filled("float32", [60, 3, 50])
    values = np.ones((1, state_bytes(b)[0]), np.uint8)
    nobody = ints(-1), ints(9), ints(7), ints(1, 2, 3)[None], np.array([True]), values
    for after in (moves[1](b, *nobody), put_token(b, ints(-1), ints(7))):
        for old, new in zip(jax.tree.leaves(b), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(bits(old), bits(new))
    assert put_token(b, ints(2), ints(7)).last_token[2] == 7


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "reference"])
def test_the_cache_is_written_in_place(numerics):
    cache = jax.eval_shape(lambda: filled_shape(numerics))
    values = np.zeros((1, state_bytes(cache)[0]), np.uint8)
    inputs = ints(1), ints(30), ints(7), ints(1, 2, 3)[None], np.array([True]), values
    for function, given in ((put_windows, inputs), (put_token, (ints(1), ints(7)))):
        compiled = jax.jit(function, donate_argnums=0).lower(cache, *given).compile()
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
        assert compiled.memory_analysis().alias_size_in_bytes == nbytes
        shapes = cache_shapes(cache)
        copied = COPY.findall(compiled.as_text())
        assert [f"{shape} {shapes[shape]}" for shape in copied if shape in shapes] == []


def filled_shape(numerics: str):
    shape = CacheShape(SLOTS, PAGES, page_size=4)
    return new_cache(CFG, Numerics.named(numerics), shape, drafts=True, counts=True)
