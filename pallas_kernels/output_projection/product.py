"""The grouped half of ``output_projection`` for many rows, by XLA."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import Numerics
from pallas_kernels.output_projection import ref
from pallas_kernels.quant import Fp8Blocks

BF16 = jnp.bfloat16


def bf16_product(o: Array, wo_a: Fp8Blocks, *, groups: int, numerics: Numerics) -> Array:
    """``op.build_grouped``'s contract for bf16 numerics: weights dequantised to bf16, which is
    exact, a product with float32 sums, the rounding.
    """
    lead, (outputs, k) = o.shape[:-2], wo_a.shape
    weight = wo_a.dequantize(BF16).reshape(groups, outputs // groups, k)
    rows = o.reshape(*lead, groups, k)
    z = jnp.einsum("...gk,gnk->...gn", rows, weight, preferred_element_type=jnp.float32)
    return ref.rounded(z.astype(BF16).reshape(*lead, outputs), numerics)
