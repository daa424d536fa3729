"""Rows of tables that are spread over ranks: Engram tables and the embeddings (ARCHITECTURE
section 9).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.engram.staged import StagedRows
from sharding.collectives import Axes, gather, peer_union, rank_of, reduce_scatter
from sharding.peer import calls_over


@dataclass(frozen=True)
class SpreadRows:
    """Rows of a table spread over the ranks of ``asking`` and ``sharing``. Ranks along ``asking``
    want rows of their own, those along ``sharing`` all want the same.
    """

    asking: Axes
    sharing: Axes

    def __call__(self, table: Any, ids: Array) -> Any:
        """Rows of ids int32 [B, ...] of a pytree of planes [rows, ...]: planes [B, ..., row].

        One exchange: every rank looks up what it holds of everybody's rows, the rest stays zero
        bits, and integer sums of the stored bits bring each row to whoever asked.
        """
        ids = gather(ids, self.asking, axis=0)
        held = jax.tree.leaves(table)[0].shape[0]
        local = ids - rank_of((*self.asking, *self.sharing)) * held
        mine = (local >= 0) & (local < held)
        local = jnp.clip(local, 0, held - 1)

        def exchanged(plane: Array) -> Array:
            rows = _bits(plane[local])
            rows = jnp.where(mine.reshape(*mine.shape, *(1,) * (rows.ndim - mine.ndim)), rows, 0)
            rows = reduce_scatter(rows, self.asking)
            if self.sharing:
                rows = jax.lax.psum(rows, self.sharing)
            return jax.lax.bitcast_convert_type(rows, plane.dtype)

        return jax.tree.map(exchanged, table)

    def peer(self, look_up: Callable, table: Any, ids: Array) -> Array | None:
        """Rows of ids, [..., N] from ``look_up`` of this rank's part of the table and ids int32
        [...], exchanged by ``peer_union``; None where that does not.
        """
        if self.asking or calls_over(self.sharing) is None:
            return None
        held = jax.tree.leaves(table)[0].shape[0]
        local = ids - rank_of(self.sharing) * held
        rows = look_up(table, jnp.clip(local, 0, held - 1))
        mine = (local >= 0) & (local < held)
        each = rows.reshape(*ids.shape, -1)
        return peer_union(jnp.where(mine[..., None], each, 0).reshape(rows.shape), self.sharing)


def spread_embedding(spread: SpreadRows, *, peer: bool) -> Callable:
    """``embedding`` of a table whose rows are spread over ranks. peer: stores to their memory bring
    them, in programs that have some.
    """

    def embedding(table: Array, ids: Array) -> Array:
        rows = spread.peer(lambda part, own: part[own], table, ids) if peer else None
        return spread(table, ids) if rows is None else rows

    return embedding


def spread_engram_rows(op: Callable, spread: SpreadRows, *, peer: bool = False) -> Callable:
    """``engram_rows`` of a table whose rows are spread over ranks, or staged for each of them;
    peer: as of ``spread_embedding``, dequantised before they are sent.
    """

    def engram_rows(table: Any, ids: Array) -> Array:
        if isinstance(table, StagedRows):
            return op(table, ids)
        found = spread.peer(op, table, ids) if peer else None
        if found is not None:
            return found
        rows = spread(table, ids)
        flat = jax.tree.map(lambda plane: plane.reshape(ids.size, plane.shape[-1]), rows)
        return op(flat, jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape))

    return engram_rows


def _bits(plane: Array) -> Array:
    """Unsigned integers of the plane's width."""
    width = 8 * plane.dtype.itemsize
    return jax.lax.bitcast_convert_type(plane, jnp.dtype(f"uint{width}"))
