"""Parameters under the released names: a module per tensor pair, a packed dataclass per quantised
weight.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from pallas_kernels.norm import rms_norm
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Blocks, Packed


class Weight(nnx.Module):
    """One weight [..., N, K], drawn with standard deviation K^-0.5, at ``weight``.

    encoding: the packed dataclass of the released format, or None for bfloat16. Numerics
    ``float32`` hold plain float32 instead, which is also what gradients flow to.
    """

    def __init__(
        self, *shape: int, encoding: type[Packed] | None, numerics: Numerics, rngs: nnx.Rngs
    ):
        values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5
        if not numerics.packed_weights:
            self.weight = nnx.Param(values)
        elif encoding is None:
            self.weight = nnx.Param(values.astype(jnp.bfloat16))
        else:
            self.weight = nnx.Param(encoding.quantize(values))

    def __call__(self) -> Any:
        """The value: a plain array or the packed dataclass."""
        return self.weight.get_value()


def fp8_codes(*weights: Weight) -> tuple[Array, ...]:
    """The codes of those that are held as released in FP8, for a launch to ask for ahead."""
    return tuple(w.codes for weight in weights if isinstance(w := weight(), Fp8Blocks))


class Norm(nnx.Module):
    """RMSNorm with a bfloat16 weight [D] (float32 in numerics ``float32``)."""

    def __init__(self, width: int, eps: float, *, numerics: Numerics):
        dtype = jnp.bfloat16 if numerics.packed_weights else jnp.float32
        self.weight = nnx.Param(jnp.ones(width, dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight.get_value(), self.eps)


def fp32_param(rngs: nnx.Rngs, *shape: int, scale: float | None = None) -> nnx.Param:
    """A float32 parameter that keeps its precision in every mode: normal times ``scale``, zeros if
    None.
    """
    if scale is None:
        return nnx.Param(jnp.zeros(shape, jnp.float32))
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * scale)
