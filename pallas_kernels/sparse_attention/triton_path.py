"""Sparse attention as a plain Triton kernel: what the benchmark compares with, no part of the op.

A program takes one query row with all its heads. Even and odd dims are kept apart: an FP4 byte
holds one of each, and so does a pair that rotates.
"""

# Its packages come with the extra cuda13 alone; kernels' arguments have no types.
# pyright: reportMissingImports=false, reportMissingParameterType=false

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from jax import Array

from pallas_kernels.quant.storage import LatentRows, WindowRows

SLOTS = 32  # of a step
WARPS = 8
HALF = tl.constexpr(256)  # of a row's dims
HALF_ROPE = tl.constexpr(32)
WINDOW_BYTES, LATENT_BYTES = tl.constexpr(528), tl.constexpr(288)
LOG2E = 1.4426950408889634


@triton.jit
def _fp4(code, scale):
    """E2M1 codes are bf16 numbers of 2^-126 of their size."""
    bits = ((code & 8) << 12) | ((code & 7) << 6)
    value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True).to(tl.float32) * 8.507059173023462e37
    return (value * scale).to(tl.bfloat16)


@triton.jit
def _fp8(code):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _step(q_even, q_odd, k_even, k_odd, seen, m, total, even, odd, scale):
    """One more tile of rows into the running softmax, in powers of two."""
    scores = tl.dot(q_even, tl.trans(k_even)) + tl.dot(q_odd, tl.trans(k_odd))
    scores = tl.where(seen[None, :], scores * scale, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    weights = tl.exp2(scores - top[:, None])
    decay = tl.exp2(m - top)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(tl.bfloat16)
    even = tl.dot(weights, k_even, even * decay[:, None])
    odd = tl.dot(weights, k_odd, odd * decay[:, None])
    return top, total, even, odd


@triton.jit
def _attend(
    queries, cosines, sines, window, written, position, floors, pool, table, selected, sinks, out,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr,
    PAGES: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr,
    TO_LOG2: tl.constexpr,
):  # fmt: skip
    window, pool = window.to(tl.pointer_type(tl.uint8)), pool.to(tl.pointer_type(tl.uint8))
    row = tl.program_id(0)
    request = row // ROWS
    heads, half, slots = tl.arange(0, HEADS), tl.arange(0, HALF), tl.arange(0, STEP)
    turns = half >= HALF - HALF_ROPE
    angle = row * HALF_ROPE + half - (HALF - HALF_ROPE)
    cos = tl.load(cosines + angle, mask=turns, other=1.0)[None, :]
    sin = tl.load(sines + angle, mask=turns, other=0.0)[None, :]
    at = row * HEADS * 2 * HALF + heads[:, None] * 2 * HALF + 2 * half[None, :]
    even, odd = tl.load(queries + at).to(tl.float32), tl.load(queries + at + 1).to(tl.float32)
    q_even = (even * cos - odd * sin).to(tl.bfloat16)
    q_odd = (even * sin + odd * cos).to(tl.bfloat16)
    m = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    even, odd = tl.zeros((HEADS, HALF), tl.float32), tl.zeros((HEADS, HALF), tl.float32)
    last, first = tl.load(position + row), tl.load(position + request * ROWS)
    low = tl.maximum(last - (SIZE - 1), tl.load(floors + request))
    for start in range(0, SIZE, STEP):
        column = low + start + slots
        index = column - first + SIZE - 1
        seen = (column <= last) & (index >= 0) & (index < SIZE - 1 + ROWS)
        index = request * (SIZE - 1 + ROWS) + tl.where(seen, index, 0)
        seen = seen & (tl.load(written + index) != 0)
        base = window + index.to(tl.int64)[:, None] * WINDOW_BYTES
        there = seen[:, None]
        byte = tl.load(base + 512 + half[None, :] // 16, mask=there, other=0).to(tl.int32)
        scale = (byte << 23).to(tl.float32, bitcast=True)
        k_even = _fp8(tl.load(base + 2 * half[None, :], mask=there, other=0)) * scale
        k_odd = _fp8(tl.load(base + 2 * half[None, :] + 1, mask=there, other=0)) * scale
        m, total, even, odd = _step(
            q_even, q_odd, k_even.to(tl.bfloat16), k_odd.to(tl.bfloat16), seen, m, total, even,
            odd, SCALE,
        )  # fmt: skip
    for start in range(0, CHOSEN, STEP):
        inside = start + slots < CHOSEN
        entry = tl.load(selected + row * CHOSEN + start + slots, mask=inside, other=-1)
        seen = (entry >= 0) & (entry < PAGES * PAGE)
        entry = tl.where(seen, entry, 0)
        page = tl.load(table + request * PAGES + entry // PAGE)
        base = pool + (page.to(tl.int64) * PAGE + entry % PAGE)[:, None] * LATENT_BYTES
        there = seen[:, None]
        code = tl.load(base + half[None, :], mask=there, other=0).to(tl.int32)
        scale = _fp8(tl.load(base + 256 + half[None, :] // 8, mask=there, other=0))
        m, total, even, odd = _step(
            q_even, q_odd, _fp4(code & 15, scale), _fp4(code >> 4, scale), seen, m, total, even,
            odd, SCALE,
        )  # fmt: skip
    sink = tl.load(sinks + heads) * TO_LOG2
    top = tl.maximum(m, sink)
    share = (tl.exp2(m - top) / (total * tl.exp2(m - top) + tl.exp2(sink - top)))[:, None]
    even, odd = even * share, odd * share
    even, odd = even.to(tl.bfloat16).to(tl.float32), odd.to(tl.bfloat16).to(tl.float32)
    tl.store(out + at, (even * cos + odd * sin).to(tl.bfloat16))
    tl.store(out + at + 1, (odd * cos - even * sin).to(tl.bfloat16))


def sparse_attention(
    q: Array, cos: Array, sin: Array, window: WindowRows, written: Array, position: Array,
    floor: Array, pool: LatentRows | None, table: Array, selected: Array | None, sink: Array,
    *, window_size: int,
) -> Array:  # fmt: skip
    """``op.build``'s contract for packed rows of 512 dims in bf16, on a GPU."""
    b, t, heads, width = q.shape
    if pool is None or selected is None:
        pool, selected, page, chosen = LatentRows(window.words), position, 1, 0
    else:
        page, chosen = pool.words.shape[1], selected.shape[-1]
    return jax_triton.triton_call(
        q, cos, sin, window.words, written.astype(jnp.int32), position, floor,
        pool.words, table, selected, sink,
        kernel=_attend, out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), grid=(b * t,),
        num_warps=WARPS, num_stages=2, ROWS=t, HEADS=heads, SIZE=window_size, CHOSEN=chosen,
        PAGES=table.shape[-1], PAGE=page, STEP=SLOTS, SCALE=LOG2E * width**-0.5, TO_LOG2=LOG2E,
    )  # fmt: skip
