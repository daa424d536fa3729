"""What surrounds the prefill kernel in XLA: rows sorted by expert, token images, the combine."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.moe_experts.order import permute, restore
from pallas_kernels.moe_experts.prefill_shape import GROUP, TILE, Shape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Pairs (row, slot) in the order of their experts, every expert's begin at a group of eight
    positions; items are runs of at most ``TILE`` positions of one expert.
    """

    items: Array  # int32 [1 + 3 * I], see ``Shape.at_expert``
    rows: Array  # int32 [P], the row at each position, -1 where there is none
    weights: Array  # f32 [P], its routing weight, 0 where there is none
    places: Array  # int32 [R, k], the position of each pair, -1 where it reaches no expert


def _up(a: Array, to: int) -> Array:
    return (a + to - 1) // to


def make_plan(ids: Array, weights: Array, s: Shape) -> Plan:
    """Plan of ids int32 [R, k], weights f32 [R, k]. An expert's pairs stay in their order; it has
    as few items as hold them, of nearly equal size.
    """
    flat, n = ids.reshape(-1), ids.size
    bits = (n - 1).bit_length()
    if s.experts + 1 > 2 ** (32 - bits):
        raise ValueError(f"{n=} pairs of {s.experts=} must fit sort keys of 32 bits")
    e = jnp.where((flat >= 0) & (flat < s.experts), flat, s.experts).astype(jnp.uint32)
    key = jax.lax.sort(e << bits | jnp.arange(n, dtype=jnp.uint32))
    expert, pair = (key >> bits).astype(jnp.int32), (key & (2**bits - 1)).astype(jnp.int32)
    bounds = jnp.arange(s.experts + 1, dtype=jnp.uint32) << bits
    starts = jnp.searchsorted(key, bounds, method="scan_unrolled").astype(jnp.int32)
    size = starts[1:] - starts[:-1]

    def before(count: Array) -> Array:
        """The sum over the experts before each."""
        index = jnp.arange(s.experts)
        return jnp.sum(jnp.where(index[None] < index[:, None], count[None], 0), axis=1)

    tiles = _up(size, TILE)
    step = _up(_up(size, jnp.maximum(tiles, 1)), GROUP)  # groups an item
    first_group, first_item = before(_up(size, GROUP)), before(tiles)
    item = jnp.arange(s.items, dtype=jnp.int32)
    owner = jnp.sum((first_item + tiles)[None] <= item[:, None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, s.experts - 1)
    done = (item - first_item[owner]) * step[owner]
    groups = jnp.minimum(step[owner], _up(size[owner], GROUP) - done)
    table = [jnp.sum(tiles, dtype=jnp.int32)[None], owner, first_group[owner] + done, groups]

    live = expert < s.experts
    at = jnp.minimum(expert, s.experts - 1)
    place = first_group[at] * GROUP + jnp.arange(n, dtype=jnp.int32) - starts[at]
    total = s.groups * GROUP
    place = jnp.where(live, place, total)
    put = {"mode": "drop", "unique_indices": True}
    rows = jnp.full(total, -1, jnp.int32).at[place].set(pair // ids.shape[1], **put)
    picked = jnp.zeros(total, jnp.float32).at[place].set(weights.reshape(-1)[pair], **put)
    places = jnp.zeros(n, jnp.int32).at[pair].set(jnp.where(live, place, -1), unique_indices=True)
    return Plan(jnp.concatenate(table), rows, picked, places.reshape(ids.shape))


def image(x: Array, bk: int) -> Array:
    """bf16 [G, 8, K] to int32 [G * K * 4]: chunks of ``bk`` columns, in a chunk units of 64 (the
    last may have 32), in a unit the groups' core matrices (8 tokens x 8 columns).
    """
    groups, _, k = x.shape
    c = permute(x, bk).reshape(groups, GROUP, k // bk, bk)
    parts, full = [], bk // 64 * 64
    for start, end, unit in ((0, full, 64), (full, bk, bk - full)):
        if unit:
            p = c[..., start:end].reshape(groups, GROUP, k // bk, -1, unit // 8, 8)
            parts.append(p.transpose(2, 3, 0, 4, 1, 5).reshape(k // bk, -1))
    pairs = jnp.concatenate(parts, axis=-1).reshape(-1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.int32)


def from_image(words: Array, bk: int, groups: int, k: int) -> Array:
    """The inverse of ``image``: bf16 [G, 8, K]."""
    c = jax.lax.bitcast_convert_type(words, jnp.bfloat16).reshape(k // bk, -1)
    full, parts = bk // 64 * 64, []
    for start, end, unit in ((0, full, 64), (full, bk, bk - full)):
        if unit:
            p = c[:, start * groups * GROUP : end * groups * GROUP]
            p = p.reshape(k // bk, -1, groups, unit // 8, GROUP, 8).transpose(2, 4, 0, 1, 3, 5)
            parts.append(p.reshape(groups, GROUP, k // bk, -1))
    return restore(jnp.concatenate(parts, axis=-1).reshape(groups, GROUP, k), bk)


def combine(y: Array, shared: Array, places: Array) -> Array:
    """y bf16 [P, D] by position, shared bf16 [R, D], places [R, k] to f32 [R, D]: summed in the
    order of slots, the shared expert last.
    """
    total = jnp.zeros(shared.shape, jnp.float32)
    for slot in range(places.shape[1]):
        place = places[:, slot]
        picked = y[jnp.maximum(place, 0)].astype(jnp.float32)
        total = total + jnp.where(place[:, None] >= 0, picked, 0)
    return total + shared.astype(jnp.float32)
