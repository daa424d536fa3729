"""Grouped output projection against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.output_projection.cases import CORNERS
from pallas_kernels.output_projection.op import build
from pallas_kernels.quant import Fp8Blocks, Fp8Rows
from tests.tolerances import F32_REL

project = compiling.jit(
    lambda o, a, b, groups, numerics: build("reference")(o, a, b, groups=groups, numerics=numerics),
    static=(3, 4),
)


def problem(case, numerics, seed=0):
    rng = np.random.default_rng(seed)
    inputs = case.heads * case.width // case.groups
    o = jnp.asarray(rng.standard_normal((case.rows, case.heads, case.width)), numerics.dtype)
    shapes = (case.groups * case.rank, inputs), (case.hidden, case.groups * case.rank)
    packed = (Fp8Blocks.quantize(jnp.asarray(rng.standard_normal(s), jnp.float32)) for s in shapes)
    return o, *(w if numerics.packed_weights else w.dequantize() for w in packed)


def oracle(o, wo_a, wo_b, case, numerics, round_input=False):
    """Every group on its own, in float64."""

    def values(w):
        return np.asarray(w.dequantize() if isinstance(w, Fp8Blocks) else w, np.float64)

    a, b = values(wo_a), values(wo_b)
    flat = np.asarray(o, np.float64).reshape(case.rows, case.heads * case.width)
    if round_input:
        flat = np.asarray(Fp8Rows.quantize(jnp.asarray(flat)).dequantize(), np.float64)
    size = case.heads * case.width // case.groups
    parts = [
        flat[:, g * size : (g + 1) * size] @ a[g * case.rank : (g + 1) * case.rank].T
        for g in range(case.groups)
    ]
    z = jnp.asarray(np.concatenate(parts, -1), jnp.float32).astype(numerics.dtype)
    if numerics.round_activations:
        z = Fp8Rows.quantize(z).dequantize()
    return np.asarray(z, np.float64) @ b.T


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE, SERVING], ids=lambda n: n.name)
def test_equals_the_oracle(case, numerics):
    o, wo_a, wo_b = problem(case, numerics)
    got = project(o, wo_a, wo_b, case.groups, numerics)
    assert got.dtype == numerics.dtype and got.shape == (case.rows, case.hidden)
    if case.rows:
        want = oracle(o, wo_a, wo_b, case, numerics)
        size = np.abs(want).max()
        bound = 10 * F32_REL if numerics is FLOAT32 else 2.0**-7
        assert np.abs(np.asarray(got, np.float64) - want).max() <= bound * size


def test_the_first_product_takes_unrounded_activations():
    case = CORNERS[0]
    o, wo_a, wo_b = problem(case, REFERENCE)
    got = np.asarray(project(o, wo_a, wo_b, case.groups, REFERENCE), np.float64)
    plain, rounded = (oracle(o, wo_a, wo_b, case, REFERENCE, round_input=r) for r in (False, True))
    assert np.abs(got - plain).mean() < 0.1 * np.abs(got - rounded).mean()


def test_a_group_reads_its_own_heads_alone():
    case = CORNERS[3]
    o, wo_a, _ = problem(case, FLOAT32)
    eye = jnp.eye(case.groups * case.rank)
    base = project(o, wo_a, eye, case.groups, FLOAT32).reshape(case.rows, case.groups, case.rank)
    for head in range(case.heads):
        moved = project(o.at[:, head].add(1), wo_a, eye, case.groups, FLOAT32)
        changed = np.asarray(moved.reshape(base.shape) != base).any((0, 2))
        assert np.flatnonzero(changed).tolist() == [head * case.groups // case.heads]
