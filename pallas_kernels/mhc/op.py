"""Single-pass manifold-constrained hyper-connections over S residual streams (ARCHITECTURE section
7).
"""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.mhc import ref


def build_coefficients(kernels: str) -> Callable:
    """coefficients(h [..., S, D], fn f32 [(2+S)S, S*D], base f32 [(2+S)S], scale f32 [3], *, iters,
    eps, norm_eps)

    -> pre f32 [..., S], post f32 [..., S], comb f32 [..., S, S]; comb is doubly stochastic after
    ``iters`` Sinkhorn iterations that end on the columns. Always float32, whatever the dtype of h.
    """
    return choose("mhc_coefficients", kernels, {"reference": ref.coefficients})


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
