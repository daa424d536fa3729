"""``sparse_attention``: window rows and selected global rows in one softmax with a sink
(ARCHITECTURE 4.5).
"""

from collections.abc import Callable

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.sparse_attention import ref


def build(kernels: str) -> Callable:
    """sparse_attention(q, cos, sin, window, written, position, floor, pool, page_table, selected,
    sink, *, window_size, numerics) -> [B, T, H, K] in ``numerics.dtype``, after the inverse RoPE.

    q [B, T, H, K] before RoPE; cos, sin f32 [B, T, Rd/2] of the query positions. window:
    ``StoredRows`` [B, W-1+T] of positions position[:, 0]-W+1 onwards, ``written`` bool [B, W-1+T]
    which of them exist. Rows of one request are consecutive: position int32 [B, T]. Query p sees
    window rows max(p-W+1, floor[b]) .. p, left-aligned in its list, then pool rows ``selected``
    int32 [B, T, N] (entry numbers through page_table [B, P], -1 = none; a repeated entry counts
    twice). pool None: no global rows. sink f32 [H] joins the denominator only. A row that sees
    nothing is 0. Bytes of rows that are not seen never matter, NaN included.

    ``mosaic``: serving numerics, 8, 16, 32 or 64 heads of 512 dims, packed rows, else
    ``ValueError``; ``auto`` takes the reference for others.
    """
    chosen = _where_fit if kernels == "auto" else _mosaic
    kinds = {"reference": ref.sparse_attention, "mosaic": chosen}
    return choose("sparse_attention", kernels, kinds)


def build_ring(kernels: str) -> Callable:
    """ring_attention(q, cos, sin, ring, tags, slot, position, floor, pool, page_table, selected,
    sink, *, window_size, numerics, ahead=()) -> [B, T, H, K] in ``numerics.dtype``.

    ``sparse_attention`` with its window read where it is stored, the query rows' own included.
    ring: ``StoredRows`` [S, size] at position % size, tags int32 [S, size] their positions, slot
    int32 [B] the ring of each request; size >= W - 1 + T. ahead: arrays that the next operation
    reads, of any shapes and dtypes; a kernel may bring some of them into L2, no result depends on
    them. Kernels as above.
    """
    chosen = _ring_where_fit if kernels == "auto" else _ring
    kinds = {"reference": ref.ring_attention, "mosaic": chosen}
    return choose("ring_attention", kernels, kinds)


def build_list(kernels: str) -> Callable:
    """list_attention(q [B, T, H, K] after RoPE, kv [B, T, L, K], valid bool [B, T, L], sink [H], *,
    numerics)

    -> [B, T, H, K], before the inverse RoPE: attention of every query over its own list (the draft
    block's form).
    """
    return choose("list_attention", kernels, {"reference": ref.list_attention})


def _mosaic(*args, **options) -> Array:
    from pallas_kernels.sparse_attention import kernel_sm90

    return kernel_sm90.sparse_attention(*args, **options)


def _ring(*args, **options) -> Array:
    from pallas_kernels.sparse_attention import kernel_sm90

    return kernel_sm90.ring_attention(*args, **options)


def _where_fit(
    q, cos, sin, window, written, position, floor, pool, page_table, selected, sink, **options
) -> Array:
    fit = _fits(q, cos, window, pool, **options)
    run = _mosaic if fit else ref.sparse_attention
    return run(
        q, cos, sin, window, written, position, floor, pool, page_table, selected, sink, **options
    )


def _ring_where_fit(
    q, cos, sin, ring, tags, slot, position, floor, pool, page_table, selected, sink, *, ahead=(),
    **options,
) -> Array:  # fmt: skip
    fit = _fits(q, cos, ring, pool, **options)
    run = _ring if fit else ref.ring_attention
    return run(
        q, cos, sin, ring, tags, slot, position, floor, pool, page_table, selected, sink,
        ahead=ahead, **options,
    )  # fmt: skip


def _fits(q, cos, rows, pool, *, window_size, numerics) -> bool:
    from pallas_kernels.sparse_attention.attend_shape import ROPE
    from pallas_kernels.sparse_attention.kernel_sm90 import supports

    return 2 * cos.shape[-1] == ROPE and not supports(q, rows, pool, window_size, numerics)
