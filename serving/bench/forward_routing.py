"""Which experts a measured model picks.

A random router's choice depends on hidden states that mean nothing: rows that look alike would all
reach the same few experts. So the router runs, and its weights are used, but the ids that reach the
experts come from a table. What depends on ids alone can run before the router does.

balanced: every expert equally often. random: uniform, a row's experts differ. zipf: as random, but
the expert of popularity i is drawn with weight (i + 1)^-1.25, popularity shuffled by table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.ops import Ops
from sharding.collectives import rank_of
from sharding.layouts import DATA
from sharding.place import Placement

ROUTINGS = ("balanced", "random", "zipf")
ROWS = 8192  # of a table; more rows begin again
_ZIPF = 1.25
Tables = dict[str, Array]  # routers by experts and picks


@lru_cache
def table(routing: str, experts: int, top_k: int, seed: int, rows: int = ROWS) -> np.ndarray:
    """int32 [rows, top_k], the ids of a row distinct."""
    rng = np.random.default_rng((seed, experts, top_k))
    order = rng.permutation(experts)
    if routing == "balanced":
        return order[np.arange(rows * top_k).reshape(rows, top_k) % experts].astype(np.int32)
    popularity = (1 + np.arange(experts)) ** (-_ZIPF if routing == "zipf" else 0.0)
    # The top_k best of log weight + Gumbel noise are draws without replacement.
    scores = np.log(popularity) + rng.gumbel(size=(rows, experts))
    return order[np.argpartition(-scores, top_k, axis=1)[:, :top_k]].astype(np.int32)


def touched(routing: str, experts: int, top_k: int, rows: int, tables: int) -> float:
    """Distinct experts that ``rows`` rows reach, the mean over tables."""
    counts = [len(np.unique(table(routing, experts, top_k, seed)[:rows])) for seed in range(tables)]
    return float(np.mean(counts))


def new_tables(cfg: Config, routing: str, count: int, *, draft: bool) -> dict[str, np.ndarray]:
    """int32 [count, rows, top_k] of every kind of router of a model."""
    kinds = [(cfg.n_routed_experts, cfg.num_experts_per_tok)]
    if draft:
        kinds.append((cfg.dspark_n_routed_experts, cfg.dspark_num_experts_per_tok))
    return {
        _kind(*kind): np.stack([table(routing, *kind, seed) for seed in range(count)])
        for kind in kinds
    }


def _kind(experts: int, top_k: int) -> str:
    return f"{top_k} of {experts}"


def routed(ops: Ops, tables: Tables, placement: Placement) -> Ops:
    """The operations with the router's ids replaced; call n of a program reads table n. Data ranks
    read different rows of it.
    """
    return replace(ops, moe_gate=_Routed(ops.moe_gate, tables, placement))


@dataclass
class _Routed:
    gate: Callable
    tables: Tables
    placement: Placement
    calls: int = 0

    def __call__(
        self,
        x: Array,
        weight: Array,
        bias: Array,
        bias_vl: Array | None = None,
        image: Array | None = None,
        live: Array | None = None,
        *,
        top_k: int,
        scale: float,
    ) -> tuple[Array, Array]:
        operands = x, weight, bias, bias_vl, image, live
        ids, weights = self.gate(*operands, top_k=top_k, scale=scale)
        every = self.tables[_kind(weight.shape[0], top_k)]
        one, self.calls = every[self.calls % every.shape[0]], self.calls + 1
        rows = ids.size // top_k
        if rows > ROWS:
            one = jnp.tile(one, (-(-rows // ROWS), 1))
        start = 0
        if self.placement.division.ways("batch") > 1:
            start = rank_of((DATA,)) * rows % one.shape[0]
        one = jax.lax.dynamic_slice_in_dim(one, start, rows).reshape(ids.shape)
        return one if live is None else jnp.where(live[..., None], one, -1), weights
