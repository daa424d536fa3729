"""Single-pass manifold-constrained hyper-connections over S residual streams (ARCHITECTURE section
7).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.mhc import ref


def build_coefficients(kernels: str) -> Callable:
    """coefficients(h [..., S, D], fn f32 [(2+S)S, S*D], base f32 [(2+S)S], scale f32 [3], *, iters,
    eps, norm_eps)

    -> pre f32 [..., S], post f32 [..., S], comb f32 [..., S, S]; comb is doubly stochastic after
    ``iters`` Sinkhorn iterations that end on the columns. Always float32, whatever the dtype of h.
    ``mosaic``: four bf16 streams, S*D a multiple of 4096, else ``ValueError``; ``auto`` takes the
    reference for others.
    """
    chosen = _coefficients_where_fit if kernels == "auto" else _coefficients
    kinds = {"reference": ref.coefficients, "mosaic": chosen}
    return choose("mhc_coefficients", kernels, kinds)


def build_collapse(kernels: str) -> Callable:
    """collapse(h [..., S, D], pre f32 [..., S]) -> sum_i pre_i h_i in h's dtype [..., D], one
    rounding.
    """
    return choose("mhc_collapse", kernels, {"reference": ref.collapse})


def build_expand(kernels: str) -> Callable:
    """expand(h [..., S, D], y [..., D], post f32 [..., S], comb f32 [..., S, S]) -> [..., S, D].

    Stream j is post_j y + sum_i comb[i, j] h_i: the first index of comb is the source stream. One
    rounding.
    """
    return choose("mhc_expand", kernels, {"reference": ref.expand})


def build_expand_collapse_norm(kernels: str) -> Callable:
    """expand_collapse_norm(h [..., S, D], y [..., D], post f32 [..., S], comb f32 [..., S, S],
    pre f32 [..., S], weight [D], *, norm_eps) -> streams [..., S, D], normed [..., D]

    The expansion of one sublayer, its collapse by ``pre`` and that one's RMSNorm, each rounded to
    h's dtype. ``mosaic``: four bf16 streams, bf16 weight, D a multiple of 8 up to 6144, else
    ``ValueError``; ``auto`` takes the reference for others.
    """
    chosen = _expand_collapse_norm_where_fit if kernels == "auto" else _expand_collapse_norm
    kinds = {"reference": ref.expand_collapse_norm, "mosaic": chosen}
    return choose("mhc_expand_collapse_norm", kernels, kinds)


def _four_bf16(h: Array) -> bool:
    return h.dtype == jnp.bfloat16 and h.shape[-2] == 4


def _coefficients(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    from pallas_kernels.mhc import kernel_sm90

    return kernel_sm90.coefficients(h, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)


def _coefficients_where_fit(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    fits = _four_bf16(h) and h.shape[-2] * h.shape[-1] % 4096 == 0
    run = _coefficients if fits else ref.coefficients
    return run(h, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)


def _expand_collapse_norm(
    h: Array, y: Array, post: Array, comb: Array, pre: Array, weight: Array, *, norm_eps: float
) -> tuple[Array, Array]:
    from pallas_kernels.mhc import kernel_sm90

    return kernel_sm90.expand_collapse_norm(h, y, post, comb, pre, weight, norm_eps=norm_eps)


def _expand_collapse_norm_where_fit(
    h: Array, y: Array, post: Array, comb: Array, pre: Array, weight: Array, *, norm_eps: float
) -> tuple[Array, Array]:
    from pallas_kernels.columns import COLUMNS, MAX_WIDTH

    width, dtypes = h.shape[-1], {y.dtype, weight.dtype}
    fit = _four_bf16(h) and dtypes == {h.dtype} and width % COLUMNS == 0 and width <= MAX_WIDTH
    run = _expand_collapse_norm if fit else ref.expand_collapse_norm
    return run(h, y, post, comb, pre, weight, norm_eps=norm_eps)
