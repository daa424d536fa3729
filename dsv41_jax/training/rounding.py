"""Rounding onto the released encodings that gradients pass straight through."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.parameters import is_engram_table, parameters
from dsv41_jax.config import Config
from pallas_kernels.quant import Fp4KvRows, Fp4Rows, Fp8Rows, Packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """Values [..., N, K] of a weight that is stored in FP8 or FP4, whose linear rounds its
    input.
    """

    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True)
class Rounding:
    """What the release rounds besides weights (ARCHITECTURE 4.7). on: bool [], may be traced; None
    for no rounding at all.
    """

    on: Array | None = None

    def linear_input(self, x: Array) -> Array:
        return self._through(x, Fp8Rows)

    def window(self, x: Array) -> Array:
        return self._through(x, Fp8Rows)

    def latent(self, x: Array) -> Array:
        return self._through(x, Fp4KvRows)

    def index(self, x: Array) -> Array:
        """Index keys and queries."""
        return self._through(x, Fp4Rows)

    def _through(self, x: Array, encoding: type[Packed]) -> Array:
        return x if self.on is None else through(x, encoding, self.on)


def through(x: Array, encoding: type[Packed] | None, on: Array) -> Array:
    """x where not ``on``, else its rounded values (None: to bfloat16); the gradient is that of
    x.
    """
    fixed = jax.lax.stop_gradient(x)
    if encoding is None:
        rounded = fixed.astype(jnp.bfloat16)
    else:
        rounded = encoding.quantize(fixed).dequantize()
    # x - fixed is zero, exactly, and carries the gradient.
    return jnp.where(on, rounded.astype(x.dtype), fixed) + (x - fixed)


def rounded_weights(
    cfg: Config, values: Mapping[str, Array], on: Array
) -> dict[str, Array | Quantised]:
    """The weights as a checkpoint would hold them, where ``on``; parameters in float32 stay."""
    plan = parameters(inventory(cfg))
    made: dict[str, Array | Quantised] = {}
    for path, value in values.items():
        encoding = plan[path].encoding
        if plan[path].spec.dtype == "F32":
            made[path] = value
        elif encoding is None or is_engram_table(path):
            made[path] = through(value, encoding, on)
        else:
            made[path] = Quantised(through(value, encoding, on))
    return made
