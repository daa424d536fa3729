"""Single-pass manifold-constrained hyper-connections over S residual streams (ARCHITECTURE section
7).
"""

from collections.abc import Callable

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.mhc import ref


def build_coefficients(kernels: str) -> Callable:
    """coefficients(h [..., S, D], fn f32 [(2+S)S, S*D], base f32 [(2+S)S], scale f32 [3], *, iters,
    eps, norm_eps)

    -> pre f32 [..., S], post f32 [..., S], comb f32 [..., S, S]; comb is doubly stochastic after
    ``iters`` Sinkhorn iterations that end on the columns. Always float32, whatever the dtype of h.
    ``mosaic``: four bf16 streams, S*D a multiple of 4096; ``auto`` does not take it.
    """
    kinds = {"reference": ref.coefficients, "mosaic": _coefficients}
    return choose("mhc_coefficients", _named(kernels), kinds)


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
    h's dtype. ``mosaic``: four bf16 streams, bf16 weight, D a multiple of 8 up to 6144; ``auto``
    does not take it.
    """
    kinds = {"reference": ref.expand_collapse_norm, "mosaic": _expand_collapse_norm}
    return choose("mhc_expand_collapse_norm", _named(kernels), kinds)


def _named(kernels: str) -> str:
    return "reference" if kernels == "auto" else kernels  # until the kernels have run on a GPU


def _coefficients(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    from pallas_kernels.mhc import kernel_sm90

    return kernel_sm90.coefficients(h, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)


def _expand_collapse_norm(
    h: Array, y: Array, post: Array, comb: Array, pre: Array, weight: Array, *, norm_eps: float
) -> tuple[Array, Array]:
    from pallas_kernels.mhc import kernel_sm90

    return kernel_sm90.expand_collapse_norm(h, y, post, comb, pre, weight, norm_eps=norm_eps)
