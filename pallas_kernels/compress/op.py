"""``pool_pairs``: gated pooling of two tokens into one latent (ARCHITECTURE section 5, ratio 2)."""

from collections.abc import Callable

from pallas_kernels.compress import ref
from pallas_kernels.dispatch import choose


def build(kernels: str) -> Callable:
    """pool_pairs(u f32 [..., 2, K], g f32 [..., 2, K]) -> f32 [..., K].

    Per channel: softmax of g over the two tokens of a group, weighted sum of u.
    """
    return choose("pool_pairs", kernels, {"reference": ref.pool_pairs})
