"""Engram lookup, gate and addition."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.engram.cases import CORNERS
from pallas_kernels.engram.op import build_rows
from pallas_kernels.engram.ref import engram_add as add
from pallas_kernels.engram.ref import engram_gate
from pallas_kernels.quant import Fp8Rows
from tests.tolerances import F32_REL

rows = compiling.jit(
    lambda table, ids, dtype: build_rows("reference")(table, ids, dtype=dtype), static=(2,)
)
gate = compiling.jit(lambda *a: engram_gate(*a, eps=1e-20))


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_come_in_column_order(case, packed, rng):
    values = jnp.asarray(rng.standard_normal((case.table, case.width)), jnp.float32)
    table = Fp8Rows.quantize(values)
    ids = rng.integers(0, case.table, (2, case.rows, case.columns)).astype(np.int32)
    got = rows(table if packed else table.dequantize(), jnp.asarray(ids), jnp.bfloat16)
    want = np.asarray(table.dequantize(jnp.bfloat16))[ids]
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(got, want.reshape(2, case.rows, case.columns * case.width))


def oracle_gate(h, keys, qw, kw, live):
    a, b, qw, kw = (np.asarray(x, np.float64) for x in (h, keys, qw, kw))
    norms = np.sqrt(((a**2).mean(-1) + 1e-20) * ((b**2).mean(-1) + 1e-20))
    dot = (a * qw * kw * b).sum(-1) / norms / np.sqrt(a.shape[-1])
    root = np.sqrt(np.maximum(np.abs(dot), 1e-6))
    return np.where(live[:, None], 1 / (1 + np.exp(-np.copysign(root, dot))), 0)


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gate(case, dtype, rng):
    shape = (case.rows, case.streams, case.hidden)
    h, keys = (jnp.asarray(rng.standard_normal(shape) * scale, dtype) for scale in (5, 0.01))
    weights = [jnp.asarray(rng.standard_normal(shape[1:]), dtype) for _ in "qk"]
    live = rng.random(case.rows) < 0.7
    got = gate(h, keys, *weights, jnp.asarray(live))
    assert got.dtype == jnp.float32
    want = oracle_gate(h, keys, *weights, live)
    # The root has a slope of 1 / (2 |dot|^0.5), so an error of 1e-7 in dot may become 5e-5 there.
    assert np.abs(np.asarray(got) - want).max(initial=0) < 5e-5
    assert not np.asarray(got)[~live].any()


def test_the_root_never_falls_below_a_thousandth():
    """Orthogonal and nearly orthogonal rows: sigmoid(+-1e-3), with the dot's own sign."""
    h = jnp.zeros((4, 1, 4)).at[:, 0, 0].set(1)
    keys = jnp.asarray([[0, 1.0], [1e-9, 1], [-1e-9, 1], [-0.0, 1]])
    keys = jnp.zeros((4, 1, 4)).at[:, 0, :2].set(keys)
    got = np.asarray(gate(h, keys, jnp.ones((1, 4)), jnp.ones((1, 4)), jnp.ones(4, bool)))[:, 0]
    high, low = 1 / (1 + np.exp(-1e-3)), 1 / (1 + np.exp(1e-3))
    assert np.allclose(got[:3], [high, high, low], atol=1e-7)
    assert np.isclose(got[3], low, atol=1e-7) or np.isclose(got[3], high, atol=1e-7)
    assert abs(got[1] - 0.5) > 2e-4


def test_norm_eps_keeps_tiny_rows_at_full_size(rng):
    h, keys = (jnp.asarray(rng.standard_normal((3, 2, 64)), jnp.float32) for _ in "hk")
    one, live = jnp.ones((2, 64)), jnp.ones(3, bool)
    small = gate(1e-6 * h, 1e-6 * keys, one, one, live)
    assert np.allclose(gate(h, keys, one, one, live), small, atol=1e-5)


def test_only_the_product_of_the_two_weights_counts(rng):
    h, keys = (jnp.asarray(rng.standard_normal((3, 2, 64)), jnp.float32) for _ in "hk")
    q, k = (jnp.asarray(rng.standard_normal((2, 64)), jnp.float32) for _ in "qk")
    live = jnp.ones(3, bool)
    assert np.array_equal(gate(h, keys, q, k, live), gate(h, keys, k, q, live))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_add_shares_the_value_and_rounds_once(dtype, rng):
    h = jnp.asarray(rng.standard_normal((3, 4, 32)), dtype)
    value = jnp.asarray(rng.standard_normal((3, 32)), dtype)
    g = jnp.asarray(rng.random((3, 4)), jnp.float32).at[1].set(0)
    got = add(h, g, value)
    h64, g64, v64 = (np.asarray(a, np.float64) for a in (h, g, value))
    want = h64 + g64[..., None] * v64[:, None]
    ulp = 2.0**-8 if dtype == jnp.bfloat16 else F32_REL
    assert got.dtype == dtype
    assert np.abs(np.asarray(got, np.float64) - want).max() <= ulp * np.abs(want).max()
    assert np.array_equal(got[1], h[1])
