"""``index_scores``: weighted-ReLU multi-query scores over the index keys (ARCHITECTURE 6.4)."""

from collections.abc import Callable

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.index_scores import ref


def build(kernels: str) -> Callable:
    """index_scores(q, weights, pool, page_table, visible, candidates, *, block_size, numerics) ->
    f32 [B, T, N].

    q [B, T, H, K] after RoPE and rounding, weights [B, T, H], pool: index keys through page_table
    int32 [B, P]; N = P * entries a page. score = sum_h relu(q_h . k) w_h; in bf16 numerics the
    dots, products and sum are each rounded to bf16. -inf at entries >= visible int32 [B, T] and, if
    ``candidates`` int32 [B, T, C] (block ids, -1 = none) is given, outside those blocks of
    ``block_size`` entries. Bytes of entries nobody sees never matter.

    ``mosaic`` has bf16 numerics, 32 heads of 128, pages of a power of two of at least 8 entries and
    candidate blocks of 8 (else ``ValueError``); ``auto`` does not take it.
    """
    if kernels == "auto":
        kernels = "reference"  # until the kernel has run on a GPU
    return choose("index_scores", kernels, {"reference": ref.index_scores, "mosaic": _mosaic})


def _mosaic(*args, **options) -> Array:
    from pallas_kernels.index_scores import kernel_sm90

    return kernel_sm90.index_scores(*args, **options)
