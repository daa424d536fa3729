"""``sparse_attention``: window rows and selected global rows in one softmax with a sink
(ARCHITECTURE 4.5).
"""

from collections.abc import Callable

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
    """
    return choose("sparse_attention", kernels, {"reference": ref.sparse_attention})


def build_list(kernels: str) -> Callable:
    """list_attention(q [B, T, H, K] after RoPE, kv [B, T, L, K], valid bool [B, T, L], sink [H], *,
    numerics)

    -> [B, T, H, K], before the inverse RoPE: attention of every query over its own list (the draft
    block's form).
    """
    return choose("list_attention", kernels, {"reference": ref.list_attention})
