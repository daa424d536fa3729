"""The gate's launch for few rows on host machines: its sums in ``ptx_machine``, its selection in
``emulate``, which gets the shared memory that the former leaves.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_gate import emulate, kernel_sm90, ref, select_ptx
from pallas_kernels.moe_gate.kernel_sm90 import Tuning
from pallas_kernels.moe_gate.spread_ptx import BLOCKS, THREADS, Spread, collect, logits
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.tolerances import F32_REL

F32, I32, U32 = np.float32, np.int32, np.uint32


class Host:
    """Operands of a launch in a machine's memory; blocks run one at a time."""

    def __init__(self, s: Spread, x, weight, bias, *more):
        self.s, self.memory = s, Guarded(1 << 23)
        self.logits, self.counter = np.full((s.rows, s.experts), np.nan, F32), np.zeros(1, I32)
        arrays = {"bias": bias, "x": x, "weight": weight, **dict(zip(s.extra, more, strict=True))}
        arrays |= {"logits": self.logits, "counter": self.counter}
        self.at = {name: self.memory.place(np.asarray(a)) for name, a in arrays.items()}

    def run(self, block: int) -> np.ndarray:
        """Words of shared memory that the block leaves."""
        at = {**self.at, "block": block, "smem": 16}
        operands = [16, at["bias"], 0, 0, 0, 0, *[at[name] for name in self.s.operands]]
        options = {"threads": THREADS, "shared": 16 + 4 * self.s.words}
        options["operands"] = lambda _: operands
        lines = [*logits(self.s), *collect(self.s), "END:"]
        machine = Strict(lines, self.memory, seed=block, **options)
        machine.run()
        return machine.blocks[0].shared.data[16:].view(U32)

    def write(self, name: str, value: np.ndarray) -> None:
        at = self.at[name]
        self.memory.data[at : at + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)

    def last(self, want: np.ndarray) -> np.ndarray:
        """The same of the block that finds all others done and their logits ``want``."""
        self.write("logits", want)
        self.write("counter", np.array([BLOCKS - 1], I32))
        words = self.run(5)
        assert self.memory.read(self.at["counter"], self.counter)[0] == 0
        return words


def selected(s: Spread, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the warps of the last block make of its shared memory."""
    out = emulate.Result.unwritten(s.select)
    memory = [m.view(U32) for m in (np.zeros(1, F32), out.ids, out.weights, out.passed)]
    shared, warps = words.copy(), []
    for warp in range(s.select.warps):
        constants = {f"${i + 1}": np.full(32, (i + 1) << 32, np.int64) for i in range(4)}
        constants |= {"$0": np.zeros(32, U32), "$5": np.zeros(32, U32)}
        constants |= {"%tid.x": emulate.LANES + U32(32 * warp)}
        constants |= {"%lanemask_lt": (U32(1) << emulate.LANES) - U32(1)}
        warps.append(emulate.Warp(shared, memory, constants))
    emulate.run(warps, select_ptx.select(s.select))
    return out.ids.reshape(s.rows, -1), out.weights.reshape(s.rows, -1)


def operands(rng, rows: int, experts: int, d: int):
    x = jnp.asarray(rng.standard_normal((rows, d)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((experts, d)) / d**0.5, jnp.bfloat16)
    return x, weight


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "bias", "flags", "d"),
    [
        (1, 384, 6, "two", True, 2112),
        (8, 384, 6, "two", True, 64),
        (5, 128, 3, "one", False, 320),
        (2, 256, 8, "rows", True, 64),
    ],
)
def test_the_launch_equals_the_reference(rows, experts, top_k, bias, flags, d, rng):
    s = Spread(rows, d, experts, top_k, 1.5, bias, flags)
    x, weight = operands(rng, rows, experts, d)
    own = 0.5 * rng.standard_normal((rows, experts) if bias == "rows" else experts).astype(F32)
    options, more = {}, []
    if bias == "two":
        other = 0.5 * rng.standard_normal(experts).astype(F32)
        options, more = {"bias_vl": other, "image": rng.random(rows) < 0.5}, [other]
    if flags:
        options["live"] = np.arange(rows) != 1
        more.append(options.get("image", False) + 2 * options["live"].astype(I32))
    host = Host(s, x, weight, own, *more)
    want = (np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T).astype(F32)
    for block in (0, 77):
        host.run(block)
        got = host.memory.read(host.at["logits"], host.logits)
        here = slice(block * s.each, (block + 1) * s.each)
        np.testing.assert_allclose(got[:, here], want[:, here], rtol=0, atol=4 * F32_REL)
    assert np.isnan(got).sum() == got.size - 2 * s.sums
    assert host.memory.read(host.at["counter"], host.counter)[0] == 2
    ids, weights = selected(s, host.last(want))
    expected = ref.moe_gate(x, weight, own, **options, top_k=top_k, scale=1.5)
    np.testing.assert_array_equal(ids, expected[0])
    alive = options.get("live", slice(None))
    np.testing.assert_allclose(weights[alive], expected[1][alive], rtol=20 * F32_REL)


def test_rows_of_nan_and_neighbours_change_no_other_row(rng):
    d, sums = 192, []
    x, weight = operands(rng, 8, 128, d)
    spoiled = x.at[3].set(jnp.nan).at[6].set(1e30)
    for rows, source in ((8, x), (8, spoiled), (3, x)):
        s = Spread(rows, d, 128, 3, 1.5, "one", False)
        host = Host(s, source[:rows], weight, np.zeros(128, F32))
        host.run(9)
        sums.append(host.memory.read(host.at["logits"], host.logits)[:, 9])
    assert np.isfinite(sums[0]).all() and np.isnan(sums[1][3])
    kept = [0, 1, 2, 4, 5, 7]
    np.testing.assert_array_equal(sums[1][kept], sums[0][kept])
    np.testing.assert_array_equal(sums[2], sums[0][:3])


def test_spread_is_for_few_rows_and_biases_come_in_pairs():
    x, weight, bias = jnp.zeros((9, 64), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16), 128
    zeros, options = jnp.zeros(bias), {"top_k": 3, "scale": 1.0}
    with pytest.raises(ValueError, match="rows=9 must be at most 8 for a spread tuning"):
        kernel_sm90.moe_gate(x, weight, zeros, **options, tuning=Tuning(8, spread=True))
    with pytest.raises(ValueError, match="bias_vl and image must come together"):
        kernel_sm90.moe_gate(x, weight, zeros, zeros, **options)
    with pytest.raises(ValueError, match=r"bias_vl.shape=\(64,\) must be \(128,\)"):
        kernel_sm90.moe_gate(x, weight, zeros, jnp.zeros(64), jnp.zeros(9, bool), **options)
