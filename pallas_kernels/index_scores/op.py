"""``index_scores``: weighted-ReLU multi-query scores over the index keys (ARCHITECTURE 6.4)."""

from collections.abc import Callable

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.index_scores import ref
from pallas_kernels.numerics import SERVING


def build(kernels: str) -> Callable:
    """index_scores(q, weights, pool, page_table, visible, candidates, *, block_size, numerics) ->
    f32 [B, T, N].

    q [B, T, H, K] after RoPE and rounding, weights [B, T, H], pool: index keys through page_table
    int32 [B, P]; N = P * entries a page. score = sum_h relu(q_h . k) w_h; in bf16 numerics the
    dots, products and sum are each rounded to bf16. -inf at entries >= visible int32 [B, T] and, if
    ``candidates`` int32 [B, T, C] (block ids, -1 = none) is given, outside those blocks of
    ``block_size`` entries. Bytes of entries nobody sees never matter.

    ``mosaic``: bf16 numerics, 32 heads of 128, pages of a power of two of at least 8 entries and
    candidate blocks of 8, else ``ValueError``; ``auto`` takes it for serving numerics alone and the
    reference for other shapes.
    """
    chosen = _where_fit if kernels == "auto" else _mosaic
    return choose("index_scores", kernels, {"reference": ref.index_scores, "mosaic": chosen})


def build_candidates(kernels: str) -> Callable:
    """candidate_scores(q, weights, pool, page_table, visible, candidates, *, block_size, numerics)
    -> f32 [B, T, C * block_size].

    ``index_scores`` of the entries of each row's candidate blocks alone, in the order of
    ``candidates``: -inf for a block of -1 and for entries >= visible. The kernels' cost does not
    grow with the context.
    """
    chosen = _candidates_where_fit if kernels == "auto" else _candidates
    kinds = {"reference": ref.candidate_scores, "mosaic": chosen}
    return choose("candidate_scores", kernels, kinds)


def _mosaic(*args, **options) -> Array:
    from pallas_kernels.index_scores import kernel_sm90

    return kernel_sm90.index_scores(*args, **options)


def _candidates(*args, **options) -> Array:
    from pallas_kernels.index_scores import kernel_sm90

    return kernel_sm90.candidate_scores(*args, **options)


def _where_fit(q, weights, pool, page_table, visible, candidates, **options) -> Array:
    run = _mosaic if _fits(q, pool, candidates, **options) else ref.index_scores
    return run(q, weights, pool, page_table, visible, candidates, **options)


def _candidates_where_fit(q, weights, pool, page_table, visible, candidates, **options) -> Array:
    run = _candidates if _fits(q, pool, candidates, **options) else ref.candidate_scores
    return run(q, weights, pool, page_table, visible, candidates, **options)


def _fits(q, pool, candidates, *, block_size, numerics) -> bool:
    from pallas_kernels.index_scores.kernel_sm90 import supports

    return numerics == SERVING and not supports(q, pool, candidates, block_size, numerics)
