"""The prefill kernel on the host: the same bytes, addresses and registers in NumPy, float64 sums
(see ``emulate``).
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from pallas_kernels.moe_experts import prefill_plan as pp
from pallas_kernels.moe_experts.emulate import fragment_matrix
from pallas_kernels.moe_experts.prefill_shape import GROUP, UNIT_BYTES, Product, Shape
from pallas_kernels.moe_experts.repack import TILE_BLOCKS, PackedExperts


def gather(x: Array, rows: np.ndarray, s: Shape) -> np.ndarray:
    """The image of the tokens as bytes, thread by thread of ``prefill_ptx.make_gather``."""
    words = np.asarray(x).view(np.uint32)  # [R, D / 2]
    out = np.zeros((s.d // 64, s.groups, 8, GROUP, 4), np.uint32)
    for thread in range(128):
        token, core = thread % 8, thread // 8
        for step in range(s.d // 128):
            unit, i = core // 8 + 2 * step, core % 8
            row = rows.reshape(-1, GROUP)[:, token]
            at = unit * 32 + 2 * i
            low = words[np.maximum(row, 0)][:, at : at + 2]
            high = words[np.maximum(row, 0)][:, at + 16 : at + 18]
            low, high = (np.where(row[:, None] >= 0, v, 0) for v in (low, high))
            pairs = [low & 0xFFFF | high << 16, low >> 16 | high & 0xFFFF0000]
            out[unit, :, i, token] = np.stack(pairs, -1).reshape(-1, 4)
    return out.reshape(-1).view(np.uint8)


def _tokens(image: np.ndarray, p: Product, s: Shape, along: int, group: int, groups: int):
    """[8 * groups, bk] as copies bring them to shared memory and descriptors address them."""
    base, columns = along * s.groups * p.chunk.bk * 16, []
    for u in range(p.units):
        unit = UNIT_BYTES >> (u == p.chunk.units)
        at = base + u * s.groups * UNIT_BYTES + group * unit
        block = image[at : at + groups * unit].view(ml_dtypes.bfloat16)
        columns.append(block.reshape(groups, -1, GROUP, 8).swapaxes(1, 2).reshape(8 * groups, -1))
    return np.concatenate(columns, axis=1).astype(np.float64)


def _sums(weights: np.ndarray, image: np.ndarray, p: Product, s: Shape, item: tuple, tile: int):
    """[TILE_BLOCKS * 64, 8 * groups] accumulators of one tile."""
    expert, group, groups = item
    total = np.zeros((TILE_BLOCKS * 64, GROUP * groups))
    for c in range(p.depth):
        blocks = weights[(expert * p.tiles + tile) * p.depth + c].reshape(TILE_BLOCKS, -1)
        a = np.concatenate([fragment_matrix(b, p.chunk) for b in blocks]).astype(np.float64)
        total += a @ _tokens(image, p, s, c, group, groups).T
    return total


def _swiglu(acc: np.ndarray, block: int, routing: np.ndarray, s: Shape, item: tuple, t: np.ndarray):
    """The epilogue of one block [64, 8 * groups] into the flat bf16 image ``t``."""
    _, group, groups = item
    chunk = s.product(down=True).chunk
    half = block % (chunk.bk // 32)
    pitch = 4 if half >= 2 * chunk.units else 8
    core = block // (chunk.bk // 32) * s.groups * (chunk.bk // 8)
    core += half // 2 * s.groups * 8 + half % 2 * 4
    for w in range(4):
        rows = acc[16 * w : 16 * w + 16].reshape(2, 8, groups, GROUP)
        gate, up = np.minimum(rows[0], s.limit), np.clip(rows[1], -s.limit, s.limit)
        weight = routing[group * GROUP :][: groups * GROUP].reshape(groups, GROUP)
        value = (gate / (1 + np.exp(-gate)) * up * weight).astype(ml_dtypes.bfloat16)
        for j in range(groups):
            at = 64 * ((group + j) * pitch + core + w)
            t[at : at + 64] = value[:, j].T.reshape(-1)


def moe_experts_prefill(
    x: Array,
    ids: Array,
    weights: Array,
    packed: PackedExperts,
    shared: Array,
    *,
    experts: int,
    width: int,
    limit: float,
) -> Array:
    """``kernel_sm90.moe_experts_prefill`` in serving numerics, for small shapes; ``shared`` bf16
    [R, D] is what the shared expert adds.
    """
    s = Shape(x.shape[0], ids.shape[1], experts, x.shape[1], width, limit, 1)
    plan = pp.make_plan(ids, weights, s)
    count = int(plan.items[0])
    table = np.asarray(plan.items[1:]).reshape(3, -1)[:, :count]
    items = [tuple(int(v) for v in item) for item in table.T]
    up, down = s.product(down=False), s.product(down=True)
    words = [np.asarray(w).view(np.uint32) for w in (packed.up, packed.down)]
    image = gather(x, np.asarray(plan.rows), s)
    routing = np.asarray(plan.weights)
    t = np.full(s.groups * GROUP * s.f, np.nan, ml_dtypes.bfloat16)
    y = np.full((s.groups * GROUP, s.d), np.nan, ml_dtypes.bfloat16)
    for item in items:
        for tile in range(up.tiles):
            acc = _sums(words[0], image, up, s, item, tile)
            for m in range(TILE_BLOCKS):
                if tile * TILE_BLOCKS + m < up.blocks:
                    rows = acc[64 * m : 64 * m + 64]
                    _swiglu(rows, tile * TILE_BLOCKS + m, routing, s, item, t)
    t_image = t.view(np.uint8)
    for item in items:
        first = item[1] * GROUP
        for tile in range(down.tiles):
            acc = _sums(words[1], t_image, down, s, item, tile)
            columns = slice(tile * TILE_BLOCKS * 64, min(s.d, (tile + 1) * TILE_BLOCKS * 64))
            values = acc[: columns.stop - columns.start].T
            y[first : first + len(values), columns] = values.astype(ml_dtypes.bfloat16)
    return pp.combine(jnp.asarray(y), shared, plan.places).astype(jnp.bfloat16)
