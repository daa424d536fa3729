"""Reference of ``output_projection``."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Rows, Packed, dequantized

F32 = jnp.float32


def grouped_projection(o: Array, wo_a: Array | Packed, *, groups: int, numerics: Numerics) -> Array:
    heads, width = o.shape[-2:]
    grouped = o.reshape(*o.shape[:-2], groups, heads * width // groups).astype(F32)
    weight = dequantized(wo_a, F32).reshape(groups, -1, grouped.shape[-1])
    z = jnp.einsum("...gk,gnk->...gn", grouped, weight, precision="highest").astype(numerics.dtype)
    return rounded(z.reshape(*z.shape[:-2], groups * z.shape[-1]), numerics)


def rounded(z: Array, numerics: Numerics) -> Array:
    """z on the grid to which a ``linear`` of these numerics rounds its input."""
    return Fp8Rows.quantize(z).dequantize(z.dtype) if numerics.round_activations else z
