"""Reference of ``linear``."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.norm import rms_norm
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


def linears(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    return tuple(linear(x, w, numerics=numerics, out_dtype=out_dtype) for w in weights)


def normed_linears(
    x: Array, norm: Array, weights: Sequence[Array | Packed], *, eps: float, numerics: Numerics
) -> tuple[Array, ...]:
    return linears(rms_norm(x, norm, eps), weights, numerics=numerics)
