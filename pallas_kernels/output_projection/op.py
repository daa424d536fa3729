"""``output_projection``: grouped low-rank projection of the attention output (ARCHITECTURE 4.6)."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.addends import Addends
from pallas_kernels.chosen import row_count, takes
from pallas_kernels.dispatch import choose
from pallas_kernels.linear import op as linear
from pallas_kernels.numerics import Numerics
from pallas_kernels.output_projection import ref
from pallas_kernels.quant import Packed


def build(kernels: str) -> Callable:
    """output_projection(o [..., H, K], wo_a [G*N, H*K/G], wo_b [D, G*N], *, groups, numerics,
    out_dtype=None, parts=False) -> [..., D] of ``out_dtype``, by default ``numerics.dtype``.

    o already carries the inverse RoPE. ``grouped_projection``, then ``linear`` by wo_b, of these
    kernels. With ``parts`` and no ``out_dtype`` it may be the ``Addends`` of ``build_addends``.
    """
    return partial(_project, build_grouped(kernels), linear.build(kernels), build_addends(kernels))


def build_addends(kernels: str) -> Callable:
    """addends(o [..., H, K], wo_a [G*N, H*K/G], wo_b [D, G*N], *, groups, numerics) -> ``Addends``
    f32 [P, ..., D] of ``output_projection``, or None where it has no launch of both halves.

    Outputs of the grouped half are rounded as ``grouped_projection`` does it. ``mosaic``: bf16
    numerics, FP8 weights, up to eight rows; ``auto`` on an sm_90 GPU takes the rows of ``chosen``.
    """
    kinds = {"reference": _none, "mosaic": _addends_where_faster if kernels == "auto" else _addends}
    return choose("output_projection", kernels, kinds)


def build_grouped(kernels: str) -> Callable:
    """grouped_projection(o [..., H, K], wo_a [G*N, H*K/G], *, groups, numerics) -> [..., G*N].

    wo_a multiplies unrounded activations (the reference dequantises it); products accumulate in
    float32 and are rounded to ``numerics.dtype``, then, under ``round_activations``, to FP8 in
    groups of 32 (AQ32), which the rounding of a ``linear`` behind it leaves as they are.
    ``mosaic``: bf16 activations and FP8 weights; one launch of up to 256 rows, above that weights
    are dequantised to bf16 and XLA multiplies: the copy of 67 MB is then a small part and the
    product runs at the rate of the matrix units. ``auto`` on an sm_90 GPU takes the launch for the
    rows of ``chosen``, and the reference for other types.
    """
    chosen = _grouped_where_faster if kernels == "auto" else _grouped
    kinds = {"reference": ref.grouped_projection, "mosaic": chosen}
    return choose("grouped_projection", kernels, kinds)


def _grouped(o: Array, wo_a: Array | Packed, *, groups: int, numerics: Numerics) -> Array:
    from pallas_kernels.output_projection import kernel_sm90

    return kernel_sm90.grouped_projection(o, wo_a, groups=groups, numerics=numerics)


def _grouped_where_faster(
    o: Array, wo_a: Array | Packed, *, groups: int, numerics: Numerics
) -> Array:
    from pallas_kernels.output_projection import kernel_sm90

    outputs, k = wo_a.shape
    run = ref.grouped_projection
    if not kernel_sm90.unfit(o, wo_a, groups, numerics):
        run = kernel_sm90.bf16_product
        if takes("grouped_projection", row_count(o, 2), (outputs,), k):
            run = kernel_sm90.grouped_projection
    return run(o, wo_a, groups=groups, numerics=numerics)


def _none(
    o: Array, wo_a: Array | Packed, wo_b: Array | Packed, *, groups: int, numerics: Numerics
) -> None:
    return None


def _addends(
    o: Array, wo_a: Array | Packed, wo_b: Array | Packed, *, groups: int, numerics: Numerics
) -> Addends | None:
    from pallas_kernels.output_projection import kernel_sm90

    if kernel_sm90.joint_unfit(o, wo_a, wo_b, groups, numerics):
        return None
    return kernel_sm90.addends(o, wo_a, wo_b, groups=groups, numerics=numerics)


def _addends_where_faster(
    o: Array, wo_a: Array | Packed, wo_b: Array | Packed, *, groups: int, numerics: Numerics
) -> Addends | None:
    if not takes("output_projection", row_count(o, 2)):
        return None
    return _addends(o, wo_a, wo_b, groups=groups, numerics=numerics)


def _project(
    grouped: Callable,
    linear: Callable,
    addends: Callable,
    o: Array,
    wo_a: Array | Packed,
    wo_b: Array | Packed,
    *,
    groups: int,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
    parts: bool = False,
) -> Array | Addends:
    if parts and out_dtype is None:
        sums = addends(o, wo_a, wo_b, groups=groups, numerics=numerics)
        if sums is not None:
            return sums
    z = grouped(o, wo_a, groups=groups, numerics=numerics)
    return linear(z, wo_b, numerics=numerics, out_dtype=out_dtype)
