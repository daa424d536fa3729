"""The decode kernel on the host: the same words, addresses and registers in NumPy, float64 sums.

The Pallas interpreter refuses inline PTX, so this stands in for it: what each thread loads, how it
decodes, which row and column its registers are for wgmma, and where SwiGLU puts its outputs,
written from the PTX of ``decode_ptx``.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts.repack import (
    FP4,
    FP8,
    SCALE_MASK,
    TILE_BLOCKS,
    Chunk,
    PackedExperts,
    chunk_columns,
)

THREAD = np.arange(128)
WARP, G, Q = THREAD // 32, THREAD % 32 // 4, THREAD % 4


def _bf16(lanes: np.ndarray) -> np.ndarray:
    return (lanes.astype(np.uint32) << 16).view(np.float32)


def _rotl(word: np.ndarray, distance: int) -> np.ndarray:
    return (word << np.uint32(distance)) | (word >> np.uint32(32 - distance)) if distance else word


def _move(word: np.ndarray, kind: str, distance: int) -> np.ndarray:
    if kind == "rotl":
        return _rotl(word, distance)
    return word << np.uint32(distance) if kind == "shl" else word >> np.uint32(distance)


def _registers(word: np.ndarray, chunk: Chunk) -> list[np.ndarray]:
    out = []
    for moves in chunk.encoding.moves:
        value = np.zeros_like(word)
        for kind, distance in moves:
            value ^= _move(word, kind, distance)
        out.append(value & np.uint32(chunk.encoding.mask))
    return out


def fragment_matrix(block: np.ndarray, chunk: Chunk) -> np.ndarray:
    """A chunk's block, uint32 [rows * 64], to the bf16 matrix [64, bk] wgmma multiplies, columns in
    fragment order.
    """
    a = np.zeros((64, chunk.bk), np.float32)
    per_step = 8 // chunk.encoding.codes_per_word
    scales = block[chunk.code_words :].reshape(32, 2, chunk.scale_words)[THREAD // 4]
    for u in range(chunk.units + chunk.tail):
        steps = 4 if u < chunk.units else 2
        count = steps * per_step
        base = u * 512 * per_step
        words = np.zeros((count, 128), np.uint32)
        for i in range(0, count, 4):
            width = min(4, count - i)
            address = base + 128 * i + THREAD * width
            words[i : i + width] = [block[address + w] for w in range(width)]
        for step in range(steps):
            regs = [
                r
                for w in words[step * per_step : (step + 1) * per_step]
                for r in _registers(w, chunk)
            ]
            for r, register in enumerate(regs):
                h, half = r % 2, r // 2
                scale = scales[:, h, u // 2]
                scale = (_rotl(scale, 8) if u % 2 else scale) & np.uint32(SCALE_MASK)
                for lane in range(2):
                    shift = np.uint32(16 * lane)
                    value = _bf16(register >> shift & 0xFFFF) * _bf16(scale >> shift & 0xFFFF)
                    column = 64 * u + 16 * step + 2 * Q + 8 * half + lane
                    a[16 * WARP + G + 8 * h, column] = value
    return a


def tokens_of(words: np.ndarray, tokens: int) -> np.ndarray:
    """A chunk of a token image, int32 [rows, 64], to [T, bk] as the B descriptor addresses it."""
    x = words.reshape(-1).view(ml_dtypes.bfloat16).reshape(-1, tokens // 8, 8, 8)
    return x.transpose(1, 2, 0, 3).reshape(tokens, -1).astype(np.float64)


def _product(
    packed: np.ndarray,
    image: np.ndarray,
    chunk: Chunk,
    tokens: int,
    base: int,
    tile: int,
    depth: int,
) -> np.ndarray:
    """[TILE_BLOCKS * 64, T] sums of one tile over K; ``base`` is the first chunk of the image."""
    acc = np.zeros((TILE_BLOCKS * 64, tokens))
    for k in range(depth):
        blocks = packed[tile * depth + k].reshape(TILE_BLOCKS, -1)
        a = np.concatenate([fragment_matrix(b, chunk) for b in blocks])
        acc += a.astype(np.float64) @ tokens_of(image[base + k], tokens).T
    return acc


def _swiglu(
    acc: np.ndarray, row_block: int, weights: np.ndarray, limit: float, t: np.ndarray
) -> None:
    """The SwiGLU epilogue of one block [64, T] into the flat bf16 image ``t`` of its item."""
    tokens = acc.shape[1]
    for w in range(4):
        for g in range(8):
            gate = np.minimum(acc[16 * w + g], limit)
            up = np.clip(acc[16 * w + g + 8], -limit, limit)
            at = (4 * row_block + w) * 8 * tokens + 8 * np.arange(tokens) + g
            t[at] = (gate / (1 + np.exp(-gate)) * up * weights).astype(ml_dtypes.bfloat16)


def _half(
    up: np.ndarray, down: np.ndarray, image: np.ndarray, weights: np.ndarray, one_tile: bool,
    chunks: tuple[Chunk, Chunk], d: int, f: int, limit: float, experts: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Sums [items, T, D] of the items of one kind."""
    items, tokens = weights.shape
    (cu, cd), up_depth, down_depth = chunks, d // chunks[0].bk, f // chunks[1].bk
    up_tiles, down_tiles = -(-f // 32 // TILE_BLOCKS), -(-d // 64 // TILE_BLOCKS)
    out = np.zeros((items, tokens, d))
    for item in range(items):
        t = np.zeros(f * tokens, ml_dtypes.bfloat16)
        base = 0 if one_tile else item * up_depth
        for tile in range(up_tiles):
            acc = _product(up, image, cu, tokens, base, experts[item] * up_tiles + tile, up_depth)
            for m in range(TILE_BLOCKS):
                block = tile * TILE_BLOCKS + m
                if block < f // 32:
                    rows = acc[64 * m : 64 * m + 64]
                    _swiglu(rows, block, weights[item], limit, t)
        image_t = t.view(np.int32).reshape(down_depth, -1)
        for tile in range(down_tiles):
            acc = _product(
                down, image_t, cd, tokens, 0, experts[item] * down_tiles + tile, down_depth
            )
            first = tile * TILE_BLOCKS * 64
            last = min(d, first + TILE_BLOCKS * 64)
            out[item, :, first:last] = acc[: last - first].T
    return out


def token_tiles(x: Array, plan: dp.Plan, k: int) -> Array:
    """Tokens of the routed items: [1, 8, D] for all of them up to eight rows, else [I, 8, D]."""
    rows = x.shape[0]
    if rows <= dp.TILE:
        return jnp.pad(x, ((0, dp.TILE - rows), (0, 0)))[None]
    pairs = plan.pairs.reshape(-1, dp.TILE)
    return jnp.where((pairs >= 0)[..., None], x[jnp.maximum(pairs, 0) // k], 0)


def shared_tiles(x: Array, tokens: int) -> Array:
    rows = x.shape[0]
    return jnp.pad(x, ((0, -rows % tokens), (0, 0))).reshape(-1, tokens, x.shape[1])


def moe_experts_decode(
    x: Array,
    ids: Array,
    weights: Array,
    packed: PackedExperts,
    *,
    experts: int,
    width: int,
    limit: float,
) -> Array:
    """``kernel_sm90.moe_experts_decode`` in serving numerics, for small shapes."""
    rows, d = x.shape
    k = ids.shape[1]
    (d4, d8), (f4, f8) = chunk_columns(d), chunk_columns(width)
    plan = dp.make_plan(ids, weights, experts)
    n, pairs = int(plan.items[0]), np.asarray(plan.pairs).reshape(-1, dp.TILE)
    words = [
        np.asarray(w).view(np.uint32)
        for w in (packed.up, packed.down, packed.shared_up, packed.shared_down)
    ]
    image = np.asarray(dp.image(token_tiles(x, plan, k), d4))
    picked = np.asarray(plan.weights).reshape(-1, dp.TILE)
    routed = _half(
        words[0], words[1], image, picked[:n], rows <= dp.TILE,
        (Chunk(FP4, d4), Chunk(FP4, f4)), d, width, limit, np.asarray(plan.expert),
    )  # fmt: skip
    y = np.full((rows * k, 1, d), np.nan, np.float32)
    for item in range(n):
        for lane, pair in enumerate(pairs[item]):
            if pair >= 0:
                y[pair, 0] = routed[item, lane]
    tokens = min(32, -(-rows // 8) * 8)
    image = np.asarray(dp.image(shared_tiles(x, tokens), d8))
    tiles = -(-rows // tokens)
    shared = _half(
        words[2], words[3], image, np.ones((tiles, tokens)), False,
        (Chunk(FP8, d8), Chunk(FP8, f8)), d, width, limit, np.zeros(tiles, int),
    )  # fmt: skip
    y8 = shared.reshape(-1, 1, d)[:rows].astype(np.float32)
    total = dp.combine(jnp.asarray(y), jnp.asarray(y8), ids, experts, False)
    return total.astype(jnp.bfloat16)
