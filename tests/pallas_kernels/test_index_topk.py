"""Selection of entries and of candidate blocks: ties, edges and widths."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax import compiling
from pallas_kernels.index_topk.cases import CORNERS
from pallas_kernels.index_topk.op import build, build_blocks

_topk = compiling.jit(lambda s, v, k: build("reference")(s, v, k=k), static=(2,))
_blocks = compiling.jit(
    lambda s, v, size, k: build_blocks("reference")(s, v, block_size=size, k=k), static=(2, 3)
)


def index_topk(scores, visible, *, k):
    return np.asarray(_topk(jnp.asarray(scores, jnp.float32), jnp.asarray(visible, jnp.int32), k))


def top_blocks(scores, visible, *, block_size, k):
    scores, visible = jnp.asarray(scores, jnp.float32), jnp.asarray(visible, jnp.int32)
    return np.asarray(_blocks(scores, visible, block_size, k))


def oracle_topk(scores, visible, k):
    order = np.argsort(-scores, kind="stable")[:k]
    ids = sorted(int(i) for i in order if i < visible)
    return ids + [-1] * (k - len(ids))


def oracle_blocks(scores, visible, size, k):
    blocks = [scores[i : i + size].max() for i in range(0, len(scores), size)]
    if visible > 0:
        blocks[(visible - 1) // size] = np.inf
    order = np.argsort(-np.array(blocks), kind="stable")[:k]
    ids = sorted(int(i) for i in order if blocks[i] > -np.inf)
    return ids + [-1] * (k - len(ids))


def scores_of(case, seed=0, levels=None):
    """Scores as ``index_scores`` gives them: -inf from ``visible`` on; ``levels`` makes ties."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((case.rows, case.entries)).astype(np.float32)
    if levels:
        scores = np.round(scores * levels) / levels
    visible = np.maximum(case.visible - np.arange(case.rows)[::-1], 0)
    return np.where(np.arange(case.entries) < visible[:, None], scores, -np.inf), visible


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "ties"])
def test_equals_a_stable_sort(case, levels):
    scores, visible = scores_of(case, levels=levels)
    got = index_topk(scores, visible, k=case.k)
    blocks = top_blocks(scores, visible, block_size=case.block_size, k=case.blocks)
    assert got.dtype == blocks.dtype == np.int32
    for row in range(case.rows):
        assert got[row].tolist() == oracle_topk(scores[row], visible[row], case.k)
        want = oracle_blocks(scores[row], visible[row], case.block_size, case.blocks)
        assert blocks[row].tolist() == want


def test_up_to_k_visible_entries_are_all_selected():
    scores = np.where(np.arange(600) < 512, -np.arange(600.0), -np.inf)[None]
    assert np.array_equal(index_topk(scores, [512], k=512)[0], np.arange(512))
    scores = np.where(np.arange(600) < 513, -np.arange(600.0), -np.inf)[None]
    assert np.array_equal(index_topk(scores, [513], k=512)[0], np.arange(512))
    assert np.array_equal(index_topk(np.ones((1, 600)), [513], k=512)[0], np.arange(512))


def test_equal_scores_go_to_the_lowest_entry():
    assert index_topk(np.zeros((1, 40)), [40], k=3).tolist() == [[0, 1, 2]]
    assert index_topk([[1.0, 2, 1, 2, 1]], [5], k=3).tolist() == [[0, 1, 3]]


def test_negative_zero_equals_zero():
    assert index_topk([[-0.0, 0.0, -0.0, 0.0]], [4], k=2).tolist() == [[0, 1]]
    assert top_blocks([[-0.0, 0.0, -1, -1]], [4], block_size=1, k=2).tolist() == [[0, 3]]


def test_equal_blocks_go_to_the_lowest():
    got = top_blocks(np.zeros((1, 24)), [24], block_size=4, k=3)
    assert got.tolist() == [[0, 1, 5]]  # the newest block has its place, the others tie


def test_the_newest_block_always_has_a_place():
    scores = np.array([[5.0, 4, 3, 2, 1, -100]])
    assert top_blocks(scores, [6], block_size=1, k=2).tolist() == [[0, 5]]
    assert top_blocks(scores, [5], block_size=2, k=1).tolist() == [[2]]


def test_masked_blocks_are_dropped():
    scores = np.full((1, 12), -np.inf)
    scores[0, 5] = 1
    assert top_blocks(scores, [12], block_size=4, k=3).tolist() == [[1, 2, -1]]
    assert top_blocks(np.full((1, 12), -np.inf), [0], block_size=4, k=3).tolist() == [[-1] * 3]


def test_a_visible_entry_of_no_score_can_be_picked():
    """Only the index is tested, as in the reference: a masked but visible position keeps it."""
    scores = np.full((1, 10), -np.inf)
    scores[0, 7] = 1
    assert index_topk(scores, [9], k=3).tolist() == [[0, 1, 7]]


@pytest.mark.parametrize("width", [1000, 1024, 4095, 4096, 4097])
def test_padding_the_width_changes_nothing(width, rng):
    scores = np.round(rng.standard_normal((2, 1000)), 1)
    wide = np.full((2, width), -np.inf)
    wide[:, :1000] = scores
    visible = [1000, 999]
    wide[1, 999] = scores[1, 999] = -np.inf
    assert np.array_equal(index_topk(wide, visible, k=512), index_topk(scores, visible, k=512))
    blocks = [top_blocks(s, visible, block_size=8, k=64) for s in (wide, scores)]
    assert np.array_equal(*blocks)


@settings(deadline=None, max_examples=40)
@given(data=st.lists(st.integers(-2, 2), min_size=13, max_size=13), visible=st.integers(0, 13))
def test_any_scores(data, visible):
    scores = np.where(np.arange(13) < visible, np.array(data, float), -np.inf)
    got = index_topk(scores[None], [visible], k=8)[0]
    assert got.tolist() == oracle_topk(scores, visible, 8)
    blocks = top_blocks(scores[None], [visible], block_size=4, k=3)[0]
    assert blocks.tolist() == oracle_blocks(scores, visible, 4, 3)
