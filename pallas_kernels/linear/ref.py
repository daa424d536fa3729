"""Reference of ``linear``."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Rows, Packed, dequantized

F32 = jnp.float32


def linear(
    x: Array, weight: Array | Packed, *, numerics: Numerics, out_dtype: jnp.dtype | None = None
) -> Array:
    if isinstance(weight, Packed) and numerics.round_activations:
        x = Fp8Rows.quantize(x).dequantize(F32)
    y = jnp.einsum("...k,nk->...n", x.astype(F32), dequantized(weight, F32), precision="highest")
    return y.astype(out_dtype or numerics.dtype)
