"""``moe_experts`` whose experts are spread over ranks, whole or by columns (ARCHITECTURE 8).

Dispatch brings rows to the ranks of their experts, every rank runs its own on them, and combine
brings the sums back. All ranks take part whatever they hold: a rank without rows sends padding,
which carries the id -1 and so reaches no expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.moe_experts.op import DECODE_ROWS, expert_count
from pallas_kernels.moe_experts.repack import PackedExperts
from pallas_kernels.moe_experts.weights import ExpertWeights
from sharding.collectives import Axes, all_reduce, rank_of
from sharding.dispatch import AllToAll, gathered


@dataclass(frozen=True)
class SpreadExperts:
    """op: ``moe_experts`` of one device. rows: axes whose ranks have rows of their own and experts
    for one another. experts: axes that whole experts are spread over, those of ``rows`` included.
    columns: axes that the columns of every expert, the shared one too, are split over. reduce: the
    sum over the columns, which also rounds; ``part``: dtype of what it sums, by default that of x.
    dispatch: of ``DISPATCHES``.
    """

    op: Callable
    rows: Axes
    experts: Axes
    columns: Axes
    reduce: Callable[[Array, Axes], Any] = all_reduce
    part: jnp.dtype | None = None
    dispatch: str = "gather"

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
            y = self.op(x, ids, weights, experts, shared, limit=limit, out_dtype=self.part)
            return self.reduce(y, self.columns)
        routed = self._routed(x, ids, weights, experts, shared, limit)
        nobody = jnp.full_like(ids, -1)
        kept = experts if _reads_shared(experts, len(x)) else _no_experts(experts)
        own = self.op(x, nobody, weights, kept, shared, limit=limit, out_dtype=jnp.float32)
        return self.reduce((routed + own).astype(self.part or x.dtype), self.columns)

    def _routed(
        self,
        x: Array,
        ids: Array,
        weights: Array,
        experts: ExpertWeights | PackedExperts,
        shared: ExpertWeights,
        limit: float,
    ) -> Array:
        """float32 [R, D] of the routed experts of all ranks, for this rank's rows."""
        held, nothing = expert_count(experts, x.shape[-1]), _no_columns(shared)
        first = rank_of(self.experts) * held

        def run(x: Array, ids: Array, weights: Array) -> Array:
            local = ids - first
            ids = jnp.where((local >= 0) & (local < held), local, -1)
            return self.op(x, ids, weights, experts, nothing, limit=limit, out_dtype=jnp.float32)

        others = tuple(axis for axis in self.experts if axis not in self.rows)
        dispatch = gathered
        if self.rows and self.dispatch == "all_to_all":
            ranks, copies = jax.lax.axis_size(self.rows), jax.lax.axis_size(others)
            dispatch = AllToAll(held * copies, ranks)
        return all_reduce(dispatch(run, x, ids, weights, self.rows), others)


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
