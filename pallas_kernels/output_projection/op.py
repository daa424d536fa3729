"""``output_projection``: grouped low-rank projection of the attention output (ARCHITECTURE 4.6)."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.linear import op as linear
from pallas_kernels.numerics import Numerics
from pallas_kernels.output_projection import ref
from pallas_kernels.quant import Packed


def build(kernels: str) -> Callable:
    """output_projection(o [..., H, K], wo_a [G*N, H*K/G], wo_b [D, G*N], *, groups, numerics,
    out_dtype=None) -> [..., D] of ``out_dtype``, by default ``numerics.dtype``.

    o already carries the inverse RoPE. ``grouped_projection``, then ``linear`` by wo_b; ``mosaic``:
    the kernels of both. ``auto`` does not take it.
    """
    kernels = _named(kernels)
    if kernels == "mosaic":
        return partial(_project, build_grouped(kernels), linear.build(kernels))
    return choose("output_projection", kernels, {"reference": ref.output_projection})


def build_grouped(kernels: str) -> Callable:
    """grouped_projection(o [..., H, K], wo_a [G*N, H*K/G], *, groups, numerics) -> [..., G*N].

    wo_a multiplies unrounded activations (the reference dequantises it); products accumulate in
    float32 and are rounded to ``numerics.dtype``, then, under ``round_activations``, to FP8 in
    groups of 32 (AQ32), which the rounding of a ``linear`` behind it leaves as they are.
    ``mosaic``: bf16 activations and FP8 weights; one launch of up to 256 rows, above that weights
    are dequantised to bf16 and XLA multiplies: the copy of 67 MB is then a small part and the
    product runs at the rate of the matrix units. ``auto`` does not take it.
    """
    kinds = {"reference": ref.grouped_projection, "mosaic": _grouped}
    return choose("grouped_projection", _named(kernels), kinds)


def _named(kernels: str) -> str:
    return "reference" if kernels == "auto" else kernels  # until the kernel has run on a GPU


def _grouped(o: Array, wo_a: Array | Packed, *, groups: int, numerics: Numerics) -> Array:
    from pallas_kernels.output_projection import kernel_sm90

    return kernel_sm90.grouped_projection(o, wo_a, groups=groups, numerics=numerics)


def _project(
    grouped: Callable,
    linear: Callable,
    o: Array,
    wo_a: Array | Packed,
    wo_b: Array | Packed,
    *,
    groups: int,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    z = grouped(o, wo_a, groups=groups, numerics=numerics)
    return linear(z, wo_b, numerics=numerics, out_dtype=out_dtype)
