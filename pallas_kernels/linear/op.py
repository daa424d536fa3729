"""``linear``: x times a transposed weight (Lin8, Lin4, LinB and LinF of ARCHITECTURE 0.1)."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.linear import ref
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Packed


def build(kernels: str) -> Callable:
    """linear(x [..., K], weight [N, K], *, numerics, out_dtype=None) -> [..., N].

    weight: ``Fp8Blocks``, ``Fp4Rows`` or a plain array. Under ``round_activations`` the input of a
    packed weight is rounded to FP8 per 32 (AQ32). Products accumulate in float32; the result is
    cast once to ``out_dtype``, by default ``numerics.dtype``.

    ``mosaic`` takes bf16 x, ``Fp8Blocks`` and results in bfloat16 or float32, and raises
    ``ValueError`` for others; ``auto`` does not take it. A row has the same bits whatever the other
    rows, within a bucket of rows.
    """
    return choose("linear", _named(kernels), {"reference": ref.linear, "mosaic": _mosaic})


def build_many(kernels: str) -> Callable:
    """linears(x [..., K], weights, *, numerics, out_dtype=None) -> one result [..., N] a weight.

    Several ``linear`` of one input, such as wq_a and wkv or w1 and w3; ``mosaic`` needs one launch
    for up to 128 rows.
    """
    return choose("linears", _named(kernels), {"reference": _each, "mosaic": _mosaic_many})


def _named(kernels: str) -> str:
    return "reference" if kernels == "auto" else kernels  # until the kernel has run on a GPU


def _each(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    return tuple(ref.linear(x, w, numerics=numerics, out_dtype=out_dtype) for w in weights)


def _mosaic_many(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    from pallas_kernels.linear import kernel_sm90

    return kernel_sm90.linears(x, weights, numerics=numerics, out_dtype=out_dtype)


def _mosaic(
    x: Array, weight: Array | Packed, *, numerics: Numerics, out_dtype: jnp.dtype | None = None
) -> Array:
    (y,) = _mosaic_many(x, (weight,), numerics=numerics, out_dtype=out_dtype)
    return y
