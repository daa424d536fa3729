"""``linear`` through XLA at the rate of the tensor cores, for what the kernels do not take."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.linear import ref
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Rows, Packed, dequantized

BF16 = jnp.dtype(jnp.bfloat16)


def bf16_linears(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    """``op.build_many``'s contract. Bfloat16 inputs and weights that bfloat16 holds, which are all
    of the release, are multiplied as such, with float32 sums; others as the reference does it.
    """
    return tuple(_linear(x, w, numerics, out_dtype) for w in weights)


def _linear(
    x: Array, weight: Array | Packed, numerics: Numerics, out_dtype: jnp.dtype | None
) -> Array:
    packed = isinstance(weight, Packed)
    if x.dtype != BF16 or (not packed and weight.dtype != BF16):
        return ref.linear(x, weight, numerics=numerics, out_dtype=out_dtype)
    if packed and numerics.round_activations:
        x = Fp8Rows.quantize(x).dequantize(BF16)
    weight = dequantized(weight, BF16)
    y = jnp.einsum("...k,nk->...n", x, weight, preferred_element_type=jnp.float32)
    return y.astype(out_dtype or numerics.dtype)
