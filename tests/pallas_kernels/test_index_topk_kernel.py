"""The selection kernel's own PTX on a host machine (``ptx_machine``), against a stable sort."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk import kernel_sm90, op, ref
from pallas_kernels.index_topk.select_ptx import program
from pallas_kernels.index_topk.stream_ptx import Selection
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_index_topk import oracle_blocks, oracle_topk

CANARY = -7
SHAPES = [
    Selection(1000, 64, cluster=1, warpgroups=1, kept=64),
    Selection(4097, 512, cluster=2, warpgroups=2),
    Selection(9000, 512, cluster=1, warpgroups=1, kept=1024),
    Selection(1024, 2048, cluster=8, warpgroups=1, kept=16),
    Selection(6000, 70, block=8, cluster=1, warpgroups=1, kept=64),
    Selection(999, 20, block=8, cluster=2, warpgroups=1),
    Selection(37, 5, block=4, cluster=2, warpgroups=1, kept=16),
    Selection(37, 9, block=2, cluster=1, warpgroups=1, kept=16),
]


def select(
    s: Selection, scores: np.ndarray, visible: list[int], machine: Callable = Cluster
) -> np.ndarray:
    """The kernel's picks; the output lies between two canaries."""
    memory = Guarded(1 << 20)
    out = np.full((len(scores) + 2, s.k), CANARY, np.int32)
    at = memory.place(scores.astype(np.float32)), memory.place(np.array(visible, np.int32))
    out_at = memory.place(out)
    lines = program(s)
    for row in range(len(scores)):
        operands = [*at, out_at + 4 * s.k, 0, row]
        machine(
            lines,
            memory,
            threads=s.threads,
            shared=4 * s.words,
            operands=lambda rank, operands=operands: [*operands, rank],
            blocks=s.cluster,
        ).run()
    out = memory.read(out_at, out)
    assert (out[[0, -1]] == CANARY).all()
    return out[1:-1]


def expected(s: Selection, scores: np.ndarray, visible: int) -> list[int]:
    seen = np.where(np.arange(s.n) < visible, scores, -np.inf)
    if s.block == 1:
        return oracle_topk(seen, visible, s.k)
    return oracle_blocks(seen, visible, s.block, s.k)


@pytest.mark.parametrize("s", SHAPES, ids=str)
@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "ties"])
def test_equals_a_stable_sort_whatever_lies_behind(s, levels, rng):
    visible = sorted({0, 1, s.k + 1, s.n - 1, s.n} & set(range(s.n + 1)))
    scores = rng.standard_normal((len(visible), s.n)).astype(np.float32)
    if levels:
        scores = np.round(scores * levels) / levels * rng.choice([-1, 1], scores.shape)
    scores[rng.random(scores.shape) < 0.02] = -np.inf
    poisoned = scores.copy()
    for row, count in enumerate(visible):
        poisoned[row, count:] = rng.choice([np.nan, 1e30], s.n - count)
    got = select(s, poisoned, visible)
    for row, count in enumerate(visible):
        assert got[row].tolist() == expected(s, scores[row], count), count


@pytest.mark.parametrize("s", [SHAPES[0], SHAPES[2], SHAPES[4]], ids=str)
@pytest.mark.parametrize("score", [0.0, -np.inf])
def test_equal_scores(s, score):
    """More equal keys than a block keeps in shared memory."""
    scores = np.full((1, s.n), score)
    assert select(s, scores, [s.n])[0].tolist() == expected(s, scores[0], s.n)


@pytest.mark.parametrize("seed", [0, 1])
def test_warps_in_any_order(seed, rng):
    s = Selection(3000, 64, cluster=2, warpgroups=2)
    scores = np.round(rng.standard_normal((2, s.n)) * 20) / 20
    got = select(s, scores, [s.n, 2000], partial(Strict, seed=seed))
    for row, visible in enumerate((s.n, 2000)):
        assert got[row].tolist() == expected(s, scores[row], visible)


def test_zeros_of_both_signs_are_equal():
    s = Selection(300, 2, cluster=1, warpgroups=1)
    scores = np.where(np.arange(300) % 3 == 0, -0.0, 0.0)[None]
    assert select(s, scores, [300]).tolist() == [[0, 1]]


def test_a_length_beyond_the_row_is_the_row():
    s = Selection(8, 4, cluster=1, warpgroups=1)
    assert select(s, np.arange(8.0)[None], [100]).tolist() == [[4, 5, 6, 7]]
    assert select(s, np.arange(8.0)[None], [-3]).tolist() == [[-1] * 4]


def test_bad_arguments_name_the_value():
    scores, visible = jnp.zeros((2, 64)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"self.k=4096 must be between 1 and 4095"):
        kernel_sm90.index_topk(scores, visible, k=4096)
    with pytest.raises(ValueError, match=r"self.block=3 must be 1, 2, 4, 8 or 16"):
        kernel_sm90.top_blocks(scores, visible, block_size=3, k=4)
    with pytest.raises(ValueError, match=r"visible.shape=\(1,\) must be \(2,\)"):
        kernel_sm90.index_topk(scores, visible[:1], k=4)
    with pytest.raises(ValueError, match=r"bfloat16.* must be float32"):
        kernel_sm90.index_topk(scores.astype(jnp.bfloat16), visible, k=4)


def test_the_kernels_are_taken_by_name(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "index_topk", lambda *_, k: k)
    monkeypatch.setattr(kernel_sm90, "top_blocks", lambda *_, block_size, k: (block_size, k))
    assert op.build("mosaic")(None, None, k=3) == 3
    assert op.build_blocks("mosaic")(None, None, block_size=8, k=3) == (8, 3)


def test_auto_on_hopper_takes_the_reference_for_other_shapes(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    for name in ("index_topk", "top_blocks"):
        monkeypatch.setattr(ref, name, lambda *_, **__: "ref")
        monkeypatch.setattr(kernel_sm90, name, lambda *_, **__: "kernel")
    select, blocks, scores = op.build("auto"), op.build_blocks("auto"), jnp.zeros((1, 9))
    assert select(scores, None, k=4095) == blocks(scores, None, k=3, block_size=8) == "kernel"
    for bad, k in ((scores, 4096), (scores[:, :0], 3), (scores.astype(jnp.bfloat16), 3)):
        assert select(bad, None, k=k) == blocks(bad, None, k=k, block_size=8) == "ref"
    assert blocks(scores, None, k=3, block_size=3) == "ref"
