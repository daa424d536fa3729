"""``linear``: x times a transposed weight (Lin8, Lin4, LinB and LinF of ARCHITECTURE 0.1)."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import row_count, takes
from pallas_kernels.dispatch import choose
from pallas_kernels.linear import ref
from pallas_kernels.linear.product import bf16_linears
from pallas_kernels.norm import rms_norm
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Packed


def build(kernels: str) -> Callable:
    """linear(x [..., K], weight [N, K], *, numerics, out_dtype=None) -> [..., N].

    weight: ``Fp8Blocks``, ``Fp4Rows`` or a plain array. Under ``round_activations`` the input of a
    packed weight is rounded to FP8 per 32 (AQ32). Products accumulate in float32; the result is
    cast once to ``out_dtype``, by default ``numerics.dtype``.

    ``mosaic`` takes bf16 x, ``Fp8Blocks`` and results in bfloat16 or float32, and raises
    ``ValueError`` for others; ``auto`` on an sm_90 GPU takes it for the rows of ``chosen``, else
    XLA with bf16 operands. A row has the same bits whatever the other rows, within a bucket of
    rows.
    """
    many = build_many(kernels)

    def linear(
        x: Array,
        weight: Array | Packed,
        *,
        numerics: Numerics,
        out_dtype: jnp.dtype | None = None,
    ) -> Array:
        (y,) = many(x, (weight,), numerics=numerics, out_dtype=out_dtype)
        return y

    return linear


def build_many(kernels: str) -> Callable:
    """linears(x [..., K], weights, *, numerics, out_dtype=None) -> one result [..., N] a weight.

    Several ``linear`` of one input, such as wq_a and wkv; ``mosaic`` needs one launch for up to 128
    rows.
    """
    kinds = {"reference": ref.linears, "mosaic": _many_where_faster if kernels == "auto" else _many}
    return choose("linear", kernels, kinds)


def build_normed(kernels: str) -> Callable:
    """normed_linears(x [..., K], norm [K], weights, *, eps, numerics) -> one result [..., N] a
    weight.

    ``linears`` of x's RMSNorm by the weight ``norm``. ``mosaic``: bf16 norm; up to 128 rows one
    launch, which rounds x * norm to bf16 and divides the sums by x's size. Under
    ``round_activations`` and for more rows the norm is a step of its own.
    """
    kinds = {
        "reference": ref.normed_linears,
        "mosaic": _normed_where_faster if kernels == "auto" else _normed,
    }
    return choose("normed_linears", kernels, kinds)


def _many(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    from pallas_kernels.linear import kernel_sm90

    return kernel_sm90.linears(x, weights, numerics=numerics, out_dtype=out_dtype)


def _many_where_faster(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> tuple[Array, ...]:
    from pallas_kernels.linear import kernel_sm90

    fits = not kernel_sm90.unfit(x, weights, numerics, out_dtype)
    if not fits or not _faster("linear", x, weights):
        return bf16_linears(x, weights, numerics=numerics, out_dtype=out_dtype)
    return kernel_sm90.linears(x, weights, numerics=numerics, out_dtype=out_dtype)


def _normed(
    x: Array, norm: Array, weights: Sequence[Array | Packed], *, eps: float, numerics: Numerics
) -> tuple[Array, ...]:
    from pallas_kernels.linear import kernel_sm90

    return kernel_sm90.normed_linears(x, norm, weights, eps=eps, numerics=numerics)


def _normed_where_faster(
    x: Array, norm: Array, weights: Sequence[Array | Packed], *, eps: float, numerics: Numerics
) -> tuple[Array, ...]:
    from pallas_kernels.linear import kernel_sm90

    fits = not kernel_sm90.normed_unfit(x, norm, weights, numerics)
    if fits and _faster("normed_linear", x, weights):
        return kernel_sm90.normed_linears(x, norm, weights, eps=eps, numerics=numerics)
    return _many_where_faster(rms_norm(x, norm, eps), weights, numerics=numerics)


def _faster(op: str, x: Array, weights: Sequence[Array | Packed]) -> bool:
    return takes(op, row_count(x), tuple(w.shape[0] for w in weights), x.shape[-1])
