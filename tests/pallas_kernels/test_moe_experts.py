"""Routed and shared experts against a loop over rows in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.moe_experts.op import build
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, Fp8Rows
from tests.tolerances import F32_REL

moe_experts = build("reference")
E, D, F, LIMIT = 5, 64, 32, 2.0
NUMERICS = pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE, SERVING], ids=lambda n: n.name)


def weights(numerics, seed=0, gain=0.5):
    rng = np.random.default_rng(seed)

    def matrix(*shape, encoding):
        w = jnp.asarray(rng.standard_normal(shape) * gain, jnp.float32)
        packed = encoding.quantize(w)
        return packed if numerics.packed_weights else packed.dequantize()

    stack = [matrix(E, n, k, encoding=Fp4Rows) for n, k in ((F, D), (F, D), (D, F))]
    shared = [matrix(n, k, encoding=Fp8Blocks) for n, k in ((F, D), (F, D), (D, F))]
    return ExpertWeights(*stack), ExpertWeights(*shared)


def routing(rows, k=2, seed=1):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(rows)]).astype(np.int32)
    return ids, rng.random((rows, k)).astype(np.float32)


def values(w):
    return np.asarray(w.dequantize() if hasattr(w, "dequantize") else w, np.float64)


def oracle(x, ids, routes, experts, shared, limit=LIMIT, numerics=FLOAT32):
    """Row by row; rounds where ``numerics`` round. Returns the sum and the terms' size."""

    def rounded(a):
        return np.asarray(jnp.asarray(a, jnp.float32).astype(numerics.dtype), np.float64)

    def act(a):
        if not numerics.round_activations:
            return a
        return np.asarray(Fp8Rows.quantize(jnp.asarray(a, jnp.float32)).dequantize(), np.float64)

    def ffn(x, w1, w3, w2, route):
        g, u = rounded(act(x) @ w1.T), rounded(act(x) @ w3.T)
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        return rounded(act(rounded(route * g / (1 + np.exp(-g)) * u)) @ w2.T)

    w1, w3, w2 = (values(w) for w in (experts.w1, experts.w3, experts.w2))
    out = []
    for row, picked, weight in zip(np.asarray(x, np.float64), ids, routes, strict=True):
        total = ffn(row, *(values(w) for w in (shared.w1, shared.w3, shared.w2)), 1.0)
        for e, route in zip(picked, weight, strict=True):
            if e >= 0:
                total = total + ffn(row, w1[e], w3[e], w2[e], float(route))
        out.append(total)
    return np.array(out).reshape(np.asarray(x).shape)


@NUMERICS
@pytest.mark.parametrize("rows", [1, 2, 7, 37])
def test_equals_the_oracle(numerics, rows, rng):
    experts, shared = weights(numerics)
    x = jnp.asarray(rng.standard_normal((rows, D)), numerics.dtype)
    ids, routes = routing(rows)
    run = compiling.jit(lambda *a: moe_experts(*a, limit=LIMIT, numerics=numerics))
    got = run(x, ids, routes, experts, shared)
    want = oracle(x, ids, routes, experts, shared, numerics=numerics)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert got.dtype == numerics.dtype
    bound = 10 * F32_REL if numerics is FLOAT32 else 2.0**-7  # a bf16 ulp and a flipped rounding
    assert (error <= bound * np.maximum(np.abs(want), 1)).all()


@NUMERICS
def test_no_rows(numerics):
    ids, routes = np.zeros((0, 2), np.int32), np.zeros((0, 2), np.float32)
    x = jnp.zeros((0, D), numerics.dtype)
    assert moe_experts(x, ids, routes, *weights(numerics), limit=2.0, numerics=numerics).shape == (
        0,
        D,
    )


@NUMERICS
def test_clamp_is_two_sided_for_up_and_one_sided_for_gate(numerics):
    """Inputs far beyond the limit, with every sign of gate and up, routed and shared."""
    run = compiling.jit(lambda *a: moe_experts(*a, limit=LIMIT, numerics=numerics))
    one = jnp.zeros((F, D)).at[0, 0].set(1)
    down = jnp.zeros((D, F)).at[0, 0].set(1)
    for gate, up in ((100, 100), (100, -100), (-100, 100), (3, 1), (-3, 1), (-1, -1)):
        w1, w3 = gate * one, up * one
        stack = ExpertWeights(*(jnp.stack([m] * E) for m in (w1, w3, down)))
        zero = ExpertWeights(jnp.zeros((F, D)), w3, down)
        g, u = min(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
        want = g / (1 + np.exp(-g)) * u
        x = jnp.zeros((1, D), numerics.dtype).at[0, 0].set(1)
        ids, route = jnp.asarray([[1]]), jnp.ones((1, 1))
        routed = run(x, ids, route, stack, zero)
        shared = run(x, ids - 2, route, stack, ExpertWeights(w1, w3, down))
        for got in (routed, shared):
            assert abs(float(got[0, 0]) - want) <= abs(want) * 2.0**-7 + 1e-6, (gate, up)


@NUMERICS
def test_id_minus_one_leaves_the_shared_expert_alone(numerics, rng):
    experts, shared = weights(numerics)
    x = jnp.asarray(rng.standard_normal((4, D)), numerics.dtype)
    ids, routes = routing(4)
    run = compiling.jit(lambda *a: moe_experts(*a, limit=LIMIT, numerics=numerics))
    got = run(x, np.full_like(ids, -1), routes, experts, shared)
    alone = run(x, ids, np.zeros_like(routes), experts, shared)
    assert np.array_equal(got, alone)
    assert np.asarray(got, np.float32).any()
    # A NaN weight in a slot that reaches no expert must not spread.
    poisoned = run(x, np.full_like(ids, -1), np.full_like(routes, np.nan), experts, shared)
    assert np.array_equal(poisoned, got)


def test_routing_weight_multiplies_before_the_activation_rounding():
    """FP8 per 32 is not linear: the weight has to be inside it."""
    rng = np.random.default_rng(4)
    experts, shared = weights(REFERENCE)
    x = jnp.asarray(rng.standard_normal((16, D)), jnp.bfloat16)
    ids, routes = routing(16, k=1)
    run = compiling.jit(lambda *a: moe_experts(*a, limit=LIMIT, numerics=REFERENCE))
    got = run(x, ids, routes, experts, shared)
    before = oracle(x, ids, routes, experts, shared, numerics=REFERENCE)
    ones, none = np.ones_like(routes), np.full_like(ids, -1)
    rest = oracle(x, none, ones, experts, shared, numerics=REFERENCE)
    whole = oracle(x, ids, ones, experts, shared, numerics=REFERENCE)
    after = rest + routes * (whole - rest)
    error = [np.abs(np.asarray(got, np.float64) - want).mean() for want in (before, after)]
    assert error[0] < 0.25 * error[1]


@NUMERICS
def test_a_row_keeps_its_bits_among_others(numerics, rng):
    experts, shared = weights(numerics)
    x = jnp.asarray(rng.standard_normal((8, D)), numerics.dtype)
    ids, routes = routing(8)
    run = compiling.jit(lambda *a: moe_experts(*a, limit=LIMIT, numerics=numerics))
    every = run(x, ids, routes, experts, shared)
    other = run(x.at[1:].set(jnp.nan), np.roll(ids, 3, 0) * 0 + ids[:1], routes, experts, shared)
    assert np.array_equal(every[0], other[0])
