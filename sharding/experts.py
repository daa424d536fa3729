"""``moe_experts`` whose experts are spread over ranks, whole or by columns (ARCHITECTURE 8).

Dispatch gathers the rows of all ranks, every rank runs its experts on them, and combine is a
reduce-scatter of the outputs. All ranks take part whatever they hold: a rank without rows sends
padding, which carries the id -1 and so reaches no expert.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.moe_experts.op import DECODE_ROWS, expert_count
from pallas_kernels.moe_experts.repack import PackedExperts
from pallas_kernels.moe_experts.weights import ExpertWeights
from sharding.collectives import Axes, all_reduce, gather, rank_of, reduce_scatter


@dataclass(frozen=True)
class SpreadExperts:
    """op: ``moe_experts`` of one device. rows: axes whose ranks have rows of their own and experts
    for one another. experts: axes that whole experts are spread over, those of ``rows`` included.
    columns: axes that the columns of every expert, the shared one too, are split over. reduce: of
    ``ALL_REDUCES``, over the columns.
    """

    op: Callable
    rows: Axes
    experts: Axes
    columns: Axes
    reduce: Callable[[Array, Axes], Array] = all_reduce

    def __call__(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        experts: ExpertWeights | PackedExperts,
        shared: ExpertWeights,
        *,
        limit: float,
    ) -> Array:
        if not self.experts:
            y = self.op(x, ids, weights, experts, shared, limit=limit)
            return self.reduce(y, self.columns)
        routed = self._routed(x, ids, weights, experts, shared, limit)
        nobody = jnp.full_like(ids, -1)
        kept = experts if _reads_shared(experts, len(x)) else _no_experts(experts)
        own = self.op(x, nobody, weights, kept, shared, limit=limit)
        both = routed.astype(jnp.float32) + own.astype(jnp.float32)
        return self.reduce(both.astype(x.dtype), self.columns)

    def _routed(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        experts: ExpertWeights | PackedExperts,
        shared: ExpertWeights,
        limit: float,
    ) -> Array:
        """[R, D] of the routed experts of all ranks, for this rank's rows."""
        held = expert_count(experts, x.shape[-1])
        x = gather(x, self.rows, axis=0)
        # One gather for ids and weights.
        bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
        ids, bits = jnp.split(gather(jnp.concatenate([ids, bits], 1), self.rows, axis=0), 2, axis=1)
        weights = jax.lax.bitcast_convert_type(bits, jnp.float32)
        local = ids - rank_of(self.experts) * held
        ids = jnp.where((local >= 0) & (local < held), local, -1)
        y = self.op(x, ids, weights, experts, _no_columns(shared), limit=limit)
        others = tuple(axis for axis in self.experts if axis not in self.rows)
        return all_reduce(reduce_scatter(y, self.rows), others)


def _reads_shared(experts: ExpertWeights | PackedExperts, rows: int) -> bool:
    """Whether the shared expert of so many rows is read from the packed weights."""
    return isinstance(experts, PackedExperts) and rows <= DECODE_ROWS


def _no_experts(experts: ExpertWeights | PackedExperts) -> ExpertWeights | PackedExperts:
    """A stack of none, of which the op gives the shared expert alone."""
    return jax.tree.map(lambda plane: plane[:0], experts)


def _no_columns(shared: ExpertWeights) -> ExpertWeights:
    """An expert of width 0, whose output is 0."""
    w1, w3 = (jax.tree.map(lambda plane: plane[:0], w) for w in (shared.w1, shared.w3))
    return ExpertWeights(w1, w3, jax.tree.map(lambda plane: plane[:, :0], shared.w2))
