"""What surrounds the decode kernel, in XLA: which experts run on which rows, the images of tokens,
and the combine. On a GPU ``decode_arrange`` makes the plan and the images of its inputs.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.moe_experts.order import permute, restore
from pallas_kernels.quant import Fp8Rows

TILE = 8  # tokens of a routed work item


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Work items: an expert and up to eight of its (row, slot) pairs; only the first ``items`` of I
    count.
    """

    items: Array  # int32 [1]
    expert: Array  # int32 [I]
    pairs: Array  # int32 [I * 8], row * k + slot, -1 where there is none
    weights: Array  # f32 [I * 8], 0 where there is none


@dataclass(frozen=True)
class PlanLayout:
    """Where things lie in the one int32 array the kernel reads: items, expert, pairs, weights
    (bits), rows of the shared tiles (-1 where there is none), counters. Of sums in parts, pairs and
    rows are where the first K split of the sum lies, as rows of the output [parts, R].
    """

    items: int
    shared_tokens: int  # of all shared tiles together
    counter_count: int

    expert = 1

    @property
    def pairs(self) -> int:
        return self.expert + self.items

    @property
    def weights(self) -> int:
        return self.pairs + TILE * self.items

    @property
    def rows(self) -> int:
        return self.weights + TILE * self.items

    @property
    def counters(self) -> int:
        return self.rows + self.shared_tokens


def max_items(rows: int, k: int, experts: int) -> int:
    pairs = rows * k
    if rows <= TILE:
        return min(pairs, experts)
    return min(pairs, (pairs + (TILE - 1) * min(experts, pairs)) // TILE)


def make_plan(ids: Array, weights: Array, experts: int) -> Plan:
    """Plan of ids int32 [R, k], weights f32 [R, k]. Up to eight rows: one item an expert, a row
    keeps its place in it (the ids of a row must differ). More rows: an expert's pairs in order,
    eight an item.
    """
    rows, k = ids.shape
    flat = ids.reshape(-1)
    valid = (flat >= 0) & (flat < experts)
    count = max_items(rows, k, experts)
    e = jnp.where(valid, flat, experts)
    p = jnp.arange(rows * k, dtype=jnp.int32)
    same = (e[:, None] == e[None, :]) & (p[None, :] < p[:, None])
    place = jnp.sum(same, axis=1, dtype=jnp.int32)  # pairs of the same expert before this one
    leads = valid & (place % TILE == 0) if rows > TILE else valid & (place == 0)
    item = jnp.sum(leads[None, :] & (e[None, :] < e[:, None]), axis=1, dtype=jnp.int32)
    lane = p // k
    if rows > TILE:
        item, lane = item + place // TILE, place % TILE
    slot = jnp.where(valid, item * TILE + lane, count * TILE)
    pairs = jnp.full(count * TILE, -1, jnp.int32).at[slot].set(p, mode="drop")
    live = pairs >= 0
    picked = jnp.where(live, weights.reshape(-1)[pairs], 0)
    expert = jnp.zeros(count, jnp.int32).at[jnp.where(valid, item, count)].set(flat, mode="drop")
    return Plan(jnp.sum(leads, dtype=jnp.int32).reshape(1), expert, pairs, picked)


def image(x: Array, bk: int) -> Array:
    """bf16 [tiles, T, K] to int32 [tiles * K/bk, bk * T / 128, 64]: unswizzled wgmma core matrices
    (8 tokens x 8).
    """
    tiles, tokens, k = x.shape
    x = permute(x, bk).reshape(tiles, tokens // 8, 8, k // 8, 8).transpose(0, 3, 1, 2, 4)
    words = jax.lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int32)
    return words.reshape(tiles * k // bk, bk * tokens // 128, 64)


def from_image(words: Array, bk: int, tokens: int, k: int) -> Array:
    """The inverse of ``image``: bf16 [tiles, T, K]."""
    x = jax.lax.bitcast_convert_type(words, jnp.bfloat16).reshape(-1, k // 8, tokens // 8, 8, 8)
    return restore(x.transpose(0, 2, 3, 1, 4).reshape(-1, tokens, k), bk)


def round_activations(x: Array) -> Array:
    return Fp8Rows.quantize(x).dequantize(jnp.bfloat16)


def combine(y: Array, shared: Array, ids: Array, experts: int, round_outputs: bool) -> Array:
    """y f32 [R * k, splits, D] (unwritten where the id is invalid), shared f32 [R, splits, D] to
    f32 [R, D].
    """
    rows, k = ids.shape
    valid = (ids >= 0) & (ids < experts)
    y = y.reshape(rows, k, *y.shape[1:])

    def expert(splits: Array) -> Array:
        value = splits[:, 0]
        for s in range(1, splits.shape[1]):
            value = value + splits[:, s]
        # XLA may drop a cast to bf16 and back; this rounding it keeps.
        return jax.lax.reduce_precision(value, 8, 7) if round_outputs else value

    total = jnp.zeros((rows, y.shape[-1]), jnp.float32)
    for slot in range(k):
        total = total + jnp.where(valid[:, slot, None], expert(y[:, slot]), 0)
    return total + expert(shared)
