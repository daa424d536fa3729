"""The PTX of ``linear`` for up to 32 rows on a host machine, against float64 and itself."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import kernel_sm90, skinny_shape, stream_ptx
from pallas_kernels.linear.box_ptx import COLUMNS, STRIP
from pallas_kernels.linear.cases import CASES, CHECKED
from pallas_kernels.linear.skinny_shape import MAX_K, Skinny
from pallas_kernels.linear.stream_shape import AT_ONCE, SETTINGS, Stream, tuned
from pallas_kernels.quant import Fp8Blocks
from tests.pallas_kernels.ptx_machine import COLLECTIVE
from tests.pallas_kernels.ptx_operations import OPERATIONS
from tests.pallas_kernels.ptx_strict import Guarded
from tests.pallas_kernels.ptx_tensor import FIRST, Map, Mapped
from tests.pallas_kernels.test_linear_kernel import (
    BF16,
    CANARY,
    close,
    close_normed,
    inputs,
    norm_weight,
    weights,
)
from tests.pallas_kernels.test_mhc_kernel import approximate, fused_multiply_add
from tests.tolerances import F32_REL


@pytest.fixture(autouse=True)
def orders(monkeypatch):
    monkeypatch.setitem(COLLECTIVE, "bar", lambda *_: None)
    monkeypatch.setitem(OPERATIONS, "rsqrt", approximate(lambda x: x**-0.5))
    monkeypatch.setitem(OPERATIONS, "fma", fused_multiply_add)


def run(s: Stream, x: np.ndarray, matrices: list[Fp8Blocks], norm=None, seed: int = 1):
    """Results of all launches' blocks, in any order of warps."""
    memory, box = Guarded(1 << 21), (STRIP, COLUMNS)
    at, maps = [memory.place(x)], []
    for w in matrices:
        at += [memory.place(np.asarray(w.codes)), memory.place(np.asarray(w.scales))]
        maps.append(Map(at[-2], w.shape, box, COLUMNS))
    outs, dtype = [], np.float32 if s.wide else BF16
    for n in s.outputs:
        whole = np.full((s.rows + 2, n), CANARY, dtype)
        outs.append((memory.place(whole), whole))
    at += [place + whole.strides[0] for place, whole in outs]
    at += [] if norm is None else [memory.place(norm)]
    addresses = [FIRST + m for m in range(len(maps))]
    for cluster in range(s.grid):
        machine = Mapped(
            stream_ptx.program(s),
            memory,
            threads=s.threads,
            shared=4 * s.words,
            operands=lambda _, cluster=cluster: [*at, 0, cluster, *addresses],
            blocks=s.blocks,
            seed=seed,
            maps=maps,
        )
        for block in machine.blocks:
            block.special["%cluster_ctarank"] = np.full(block.n, block.rank, np.uint32)
        machine.run()
    results = [memory.read(*out) for out in outs]
    for got in results:
        assert (got[[0, -1]] == CANARY).all()
    return [got[1:-1] for got in results]


SHAPES = (
    Stream(1, 32, (32,), strips=1, splits=1, slots=1),
    Stream(7, 640, (64, 96), strips=3, splits=1, slots=2),  # slots that are used again
    Stream(19, 800, (160,), strips=2, splits=2, slots=2, wide=True),  # an idle warp at the end
    Stream(32, 1376, (32, 32), strips=5, splits=4, slots=2),  # a part without columns
    Stream(9, 1024, (64,), strips=2, splits=8, slots=1),
    Stream(17, 640, (160,), strips=3, splits=1, slots=2, sharers=2),
    Stream(17, 1312, (32,), strips=1, splits=1, slots=1),  # more loads of x than at once, of scales
    Stream(5, 800, (64,), strips=1, splits=2, slots=2, sharers=2),
)


@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_rows_equal_float64(s, rng):
    x, matrices = inputs(rng, s.rows, s.k), [weights(rng, n, s.k) for n in s.outputs]
    for got, w in zip(run(s, x, matrices), matrices, strict=True):
        close(got, x, w)


NORMED = (
    Stream(1, 160, (64, 32), strips=3, splits=1, slots=1, norm=1e-2),
    Stream(3, 160, (64,), strips=1, splits=1, slots=2, norm=1e-6),
    Stream(6, 288, (64,), strips=2, splits=2, slots=1, norm=1e-6),
    Stream(20, 640, (96,), strips=5, splits=4, slots=2, norm=1e-6),
    Stream(3, 640, (96,), strips=1, splits=2, slots=2, sharers=4, norm=1e-6),
)


@pytest.mark.parametrize("s", NORMED, ids=str)
def test_normed_rows_equal_float64(s, rng):
    """The norm's weight is rounded in, its size divides the sums; a row of NaN stays alone."""
    x, matrices = inputs(rng, s.rows, s.k), [weights(rng, n, s.k) for n in s.outputs]
    norm = norm_weight(rng, s.k)
    whole = run(s, x, matrices, norm)
    for got, w in zip(whole, matrices, strict=True):
        close_normed(got, x, norm, s.norm, w)
    if s.rows == 1:
        return
    x[1] = np.nan
    keep = np.arange(s.rows) != 1
    for got, want in zip(run(s, x, matrices, norm, seed=2), whole, strict=True):
        assert got[keep].tobytes() == want[keep].tobytes()
        assert np.isnan(got[1].astype(float)).all()


@pytest.mark.parametrize(("rows", "fewer", "splits"), [(13, 5, 2), (29, 1, 4)])
def test_a_row_has_the_same_bits_in_any_batch(rows, fewer, splits, rng):
    """Whatever the order of warps, the strips of a block, the other matrices and rows, which are
    NaN or infinite.
    """
    s = Stream(rows, 672, (64, 96), strips=5, splits=splits, slots=2)
    x, (one, two) = inputs(rng, rows, 672), [weights(rng, n, 672) for n in s.outputs]
    x[0], x[1, 40] = np.nan, -np.inf
    mixed = run(s, x, [one, two])
    for got in mixed:
        assert np.isnan(got[0].astype(float)).all() and not np.isfinite(got[1].astype(float)).any()
    own = Stream(fewer, 672, (96,), strips=1, splits=splits, slots=1)
    assert run(own, x[-fewer:], [two], seed=3)[0].tobytes() == mixed[1][-fewer:].tobytes()


@pytest.mark.parametrize("power", [-120, 0, 60])
def test_scales_and_inputs_of_any_size(power, rng):
    """Of weights, down to 2^-126, and of inputs, whose sizes may differ by column group."""
    s = Stream(4, 128, (64,), strips=1, splits=1, slots=1, wide=True)
    scales = (rng.integers(1, 60, (2, 4)) + 60 - power).astype(np.uint8)
    w = Fp8Blocks(weights(rng, 64, 128).codes, jnp.asarray(scales))
    x = inputs(rng, 4, 128).astype(np.float64) * 2.0 ** rng.integers(-30, 30, (4, 4)).repeat(32, 1)
    x = (x * 2.0**power).astype(BF16)
    x[2, 32:64] = 0
    (got,) = run(s, x, [w])
    close(got, x, w)


@pytest.mark.parametrize(("power", "off"), [(-31, 0), (-38, 2.0**-40)])
def test_inputs_far_below_their_neighbours(power, off, rng):
    """From 2^-32 of a large input on they are exact, others are off as documented."""
    s = Stream(1, 32, (32,), strips=1, splits=1, slots=1, wide=True)
    codes = np.asarray(weights(rng, 32, 32).codes).copy()
    codes[:, 7] = 0
    w = Fp8Blocks(jnp.asarray(codes), jnp.full((1, 1), 127, jnp.uint8))
    x = (rng.uniform(0.5, 1, (1, 32)) * 2.0**power).astype(BF16)
    x[0, 7] = 1.99
    (got,) = run(s, x, [w])
    x[0, 7] = 0
    a, b = x.astype(np.float64), np.asarray(w.dequantize(), np.float64)
    bound = F32_REL * np.linalg.norm(a) * np.linalg.norm(b, axis=1)
    wrong = np.abs(got[0] - (a @ b.T)[0])
    assert (wrong <= bound + 1.99 * off * np.abs(b).sum(axis=1)).all()
    assert not off or (wrong > bound).any()


def test_launches():
    for case in (*CASES, *CHECKED):
        s = tuned(case.rows, case.k, case.outputs, norm=1e-6 if case.norm else None)
        assert (s is not None) is (0 < case.rows <= 32)
    for entry in json.loads(skinny_shape.TUNED.read_text())["linear_streamed"]:
        s = tuned(entry["rows"], entry["k"], tuple(entry["outputs"]))
        assert {name: getattr(s, name) for name in SETTINGS}.items() <= entry.items()
    assert tuned(32, MAX_K, (32,)) is not None
    few = [kernel_sm90.few(n, 1280, (32768,), early=early) for n, early in ((33, False), (1, True))]
    assert all(isinstance(s, Skinny) for s in few)
    with pytest.raises(ValueError, match=r"self.rows=33 must be 1 to 32"):
        Stream(33, 32, (32,), strips=1, splits=1, slots=2)
    with pytest.raises(ValueError, match=r"self.blocks=3 of \[1, 2, 4, 8\]"):
        Stream(1, 32, (32,), strips=1, splits=3, slots=1)
    with pytest.raises(ValueError, match=r"self.slots=1 must hold the sums of 29 rows"):
        Stream(29, 32, (32,), strips=1, splits=1, slots=1)
    assert all(blocks * clusters <= 132 for blocks, clusters in AT_ONCE.items())
