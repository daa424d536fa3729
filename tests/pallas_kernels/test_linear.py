"""``linear`` against float64 products of the rounded operands."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.linear.cases import CORNERS
from pallas_kernels.linear.op import build
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, Fp8Rows, dequantized
from tests.tolerances import F32_REL

linear = build("reference")
ENCODINGS = {"fp8": Fp8Blocks, "fp4": Fp4Rows}


def operands(case, numerics, seed=0):
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal((case.rows, 1)))
    x = jnp.asarray(rng.standard_normal((case.rows, case.k)) * spread, numerics.dtype)
    w = jnp.asarray(rng.standard_normal((case.n, case.k)), jnp.float32)
    return x, ENCODINGS[case.weight].quantize(w) if case.weight in ENCODINGS else w


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_golden_products(goldens, name):
    g = goldens("quant_vectors.npz")
    w = {"fp8": Fp8Blocks, "fp4": Fp4Rows}[name].quantize(jnp.asarray(g[f"w_{name}.w"]))
    run = compiling.jit(lambda x, w: linear(x, w, numerics=REFERENCE))
    got = run(jnp.asarray(g["gemm.x"]).astype(jnp.bfloat16), w)
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(got, np.float32), g[f"gemm.{name}_y"])


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE, SERVING], ids=lambda n: n.name)
def test_products_in_every_numerics(case, numerics):
    x, w = operands(case, numerics)
    got = linear(x, w, numerics=numerics, out_dtype=jnp.float32)
    plain = case.weight not in ENCODINGS
    rounded = Fp8Rows.quantize(x).dequantize() if numerics.round_activations and not plain else x
    a = np.asarray(rounded, np.float64)
    b = np.asarray(dequantized(w, jnp.float32), np.float64)
    norm = np.linalg.norm(a, axis=-1)[:, None] * np.linalg.norm(b, axis=-1) + 1e-30
    assert got.shape == (case.rows, case.n) and got.dtype == jnp.float32
    assert (np.abs(np.asarray(got, np.float64) - a @ b.T) / norm < F32_REL).all()
    assert linear(x, w, numerics=numerics).dtype == numerics.dtype


def test_leading_axes_are_kept():
    x, w = operands(CORNERS[2], FLOAT32)
    wide = jnp.stack([x, 2 * x])
    got = linear(wide, w, numerics=FLOAT32)
    assert got.shape == (2, CORNERS[2].rows, CORNERS[2].n)
    assert np.array_equal(got[1], 2 * got[0])
