"""Rows on their way to the ranks that hold their experts, and back (ARCHITECTURE section 8).

``gather`` sends every row to every rank. ``all_to_all`` sends a row only where one of its experts
is, up to a number of rows for each pair of ranks; when one of them has more for another, all of
them gather instead, so that no row is ever lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

import jax
import jax.numpy as jnp
from jax import Array

from sharding.collectives import Axes, anywhere, gather, reduce_scatter

DISPATCHES = ("gather", "all_to_all")
# (x [R, D], ids int32 [R, k] among all ranks' experts or -1, weights f32 [R, k]) -> f32 [R, D]
Experts = Callable[[Array, Array, Array], Array]


def gathered(run: Experts, x: Array, ids: Array, weights: Array, axes: Axes) -> Array:
    """What the experts of all ranks of ``axes`` give this rank's rows, in float32."""
    x = gather(x, axes, axis=0)
    # One gather for ids and weights.
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    ids, bits = jnp.split(gather(jnp.concatenate([ids, bits], 1), axes, axis=0), 2, axis=1)
    return reduce_scatter(run(x, ids, jax.lax.bitcast_convert_type(bits, jnp.float32)), axes)


@dataclass(frozen=True)
class AllToAll:
    """held: experts of each of the ranks. deviations: rows that one rank may send to another beyond
    the mean of uniform routing, in standard deviations.
    """

    held: int
    ranks: int
    deviations: float = 4.0

    def most(self, rows: int, k: int) -> int:
        """Rows that a rank with so many, each for ``k`` experts, has room for in what it sends."""
        share = 1 - (1 - 1 / self.ranks) ** k
        wanted = rows * share + self.deviations * sqrt(rows * share * (1 - share))
        return max(1, min(rows, ceil(wanted)))

    def __call__(self, run: Experts, x: Array, ids: Array, weights: Array, axes: Axes) -> Array:
        """As ``gathered``."""
        rows, most = x.shape[0], self.most(*ids.shape)
        ranks = jnp.arange(self.ranks)[:, None, None]
        wanted = jnp.any((ids >= 0) & (ids // self.held == ranks), axis=-1)  # [ranks, R]
        place = jnp.cumsum(wanted, axis=1) - 1
        sent = wanted & (place < most)

        def exchange(x: Array, ids: Array, weights: Array) -> Array:
            at = jnp.where(sent, place, most)
            source = jnp.full((self.ranks, most), rows, jnp.int32)
            source = jax.vmap(lambda s, a: s.at[a].set(jnp.arange(rows), mode="drop"))(source, at)
            there = source < rows
            source = jnp.where(there, source, 0)
            bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
            both = jnp.concatenate([jnp.where(there[..., None], ids[source], -1), bits[source]], -1)
            both = _swap(both, axes)
            far_ids, bits = jnp.split(both, 2, axis=1)
            y = run(
                _swap(x[source], axes), far_ids, jax.lax.bitcast_convert_type(bits, jnp.float32)
            )
            back = _swap(y.reshape(self.ranks, most, -1), axes).reshape(self.ranks, most, -1)
            each = jax.vmap(lambda rows_back, a: rows_back[jnp.minimum(a, most - 1)])(back, at)
            return jnp.sum(jnp.where(sent[..., None], each, 0), axis=0)

        def everything(x: Array, ids: Array, weights: Array) -> Array:
            return gathered(run, x, ids, weights, axes)

        if most == rows:
            return exchange(x, ids, weights)
        crowded = anywhere(jnp.any(wanted & ~sent), axes)
        return jax.lax.cond(crowded, everything, exchange, x, ids, weights)


def _swap(parts: Array, axes: Axes) -> Array:
    """Parts [ranks, C, ...] for each rank to those of each, [ranks * C, ...]."""
    flat = parts.reshape(-1, *parts.shape[2:])
    return jax.lax.all_to_all(flat, axes, split_axis=0, concat_axis=0, tiled=True)
