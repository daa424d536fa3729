"""What a layout adds to whole steps: peer-to-peer sums, its collectives by themselves, memory by
kind, and what is published for the same machines.

One command a layout and phase, each resumable with the same ``--json`` file:

python -m serving.bench forward --layout tp8 --phase decode --batch 1,8 --json tp8.json
python -m serving.bench forward --layout tp8 --phase decode --batch 32,128 --json tp8.json
python -m serving.bench forward --layout tp8 --phase verify --json tp8.json
python -m serving.bench forward --layout tp8 --phase prefill --rows 2048,8192,32768 --json tp8.json
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.engram_host import HostTables
from dsv41_jax.ops import Ops
from pallas_kernels.numerics import Numerics
from serving.bench.forward_programs import SharedPrograms
from serving.bench.forward_routing import Tables
from serving.bench.forward_time import timed
from serving.bench.forward_weights import WeightSets
from serving.buckets import Bucket
from serving.speculative import Speculation
from sharding.all_reduce import peer_kernels, peer_memory
from sharding.build import build_ops
from sharding.collectives import all_reduce, peer_all_reduce
from sharding.dispatch import AllToAll, gathered
from sharding.layouts import DATA, MODEL
from sharding.peer import PeerMemory
from sharding.place import BY_RANK, Placement

_KINDS = (
    (r"\.engram\.embed\.", "engram tables"),
    (r"^mtp\.", "draft"),
    (r"\.ffn\.(shared_)?experts\.", "experts"),
    (r"^(embed|head)\.", "embedding and head"),
)
_CHAIN = 12  # calls in one program
# Of other projects on the same machine; never ours.
_PUBLIC_STEP = "8.45 ms a token (8 x H200, TP8)"
_PUBLIC_PROMPT = "4475 tokens/s a GPU (4 x H200, cold)"


class Reporting:
    """A compiled program with peer-to-peer sums, called as one without: the table is added, and
    what the sums report is kept in ``errors``.
    """

    def __init__(self, compiled: jax.stages.Compiled, memory: PeerMemory):
        self.compiled, self.memory, self.errors = compiled, memory, None
        self.as_text, self.memory_analysis = compiled.as_text, compiled.memory_analysis

    def __call__(self, *given: Any) -> Any:
        out, self.errors = self.compiled(*given, self.memory.table)
        return out


@dataclass(frozen=True)
class _Lowered:
    lowered: jax.stages.Lowered
    memory: PeerMemory

    def compile(self, options: dict[str, Any]) -> Reporting:
        return Reporting(self.lowered.compile(options), self.memory)


@dataclass(frozen=True)
class _Traced:
    traced: jax.stages.Traced
    memory: PeerMemory

    def lower(self) -> _Lowered:
        return _Lowered(self.traced.lower(), self.memory)


class PeerPrograms(SharedPrograms):
    """``SharedPrograms`` whose sums over tensor ranks are peer-to-peer where they may be."""

    def inputs_as(self, name: str, bucket: Bucket) -> tuple:
        memory = self.memory(name, bucket)
        return (*super().inputs_as(name, bucket), *([memory.table] if memory else []))

    def traced(self, name: str, bucket: Bucket) -> Any:
        traced, memory = super().traced(name, bucket), self.memory(name, bucket)
        return _Traced(traced, memory) if memory else traced


@dataclass(frozen=True)
class LayoutBench:
    """One layout of a run. choice: of ``sharding.all_reduce.KINDS``. host: Engram tables, if they
    are not on the devices.
    """

    sets: WeightSets
    kernels: str
    choice: str
    host: HostTables | None = None
    _collectives: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.sets.placement.division.layout.name

    @property
    def numerics(self) -> Numerics:
        return self.sets.numerics

    @property
    def placement(self) -> Placement | None:
        placed = self.sets.placement
        return placed if placed.division.layout.devices > 1 else None

    @property
    def peers(self) -> str:
        return peer_kernels(self.choice, self.placement, self.numerics, self.kernels)

    def ops(self) -> Ops:
        division = self.placement.division if self.placement else "tp1"
        kind = "peer" if self.peers else "psum"
        return build_ops(division, self.numerics, self.kernels, kind)

    def programs(
        self, shape: CacheShape, tables: Tables, speculation: Speculation | None
    ) -> SharedPrograms:
        made = PeerPrograms(self.sets, self.ops(), shape, tables, speculation, self.host)
        made.peers = self.peers
        return made

    def memory(self, programs: SharedPrograms) -> dict[str, int]:
        """Bytes of one device by kind."""
        found: Counter[str] = Counter()
        for path, value in self.sets.shapes().items():
            kind = next((name for pattern, name in _KINDS if re.search(pattern, path)), "dense")
            found[kind] += sum(map(_local_bytes, jax.tree.leaves(value)))
        found["cache"] = sum(map(_local_bytes, jax.tree.leaves(programs.cache_shapes())))
        return dict(found)

    def columns(self, row: dict[str, Any], bucket: Bucket) -> dict[str, Any]:
        """What a row of a measured case gets beside its own; bucket: of its first dispatch."""
        rows = bucket.requests * bucket.rows
        found: dict[str, Any] = {"all_reduce": "peer" if self.peers else "psum"}
        if self.placement is not None:
            if rows not in self._collectives:
                given = self.placement, self.peers, rows, self.sets.cfg, self.numerics
                self._collectives[rows] = collective_us(*given)
            found["collective_us"] = self._collectives[rows]
        if row["phase"] == "prefill" and row["us"]:
            devices = self.sets.placement.division.layout.devices
            tokens = row["rows"] * row["batch"] * self.sets.placement.division.ways("batch")
            found["tokens_per_s_gpu"] = round(tokens / row["us"] * 1e6 / devices, 1)
            if devices == 4:
                found["public"] = _PUBLIC_PROMPT
        alone = (row["phase"], row["batch"], row["context"]) == ("decode", 1, 8192)
        if alone and self.name == "tp8":
            found["public"] = _PUBLIC_STEP
        return found


def layout_lines(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What people read of the columns above, a line a case and one a layout."""
    lines, held = [], {}
    for row in rows:
        if not row.get("collective_us"):
            continue
        each = [f"{name} {us:.1f}" for name, us in row["collective_us"].items()]
        parts = [f"us a collective of its rows: {', '.join(each)} ({row['all_reduce']})"]
        parts.append(f"made in {row['load_s']:.0f} s, compiled in {row['compile_s']:.0f} s")
        if "tokens_per_s_gpu" in row:
            parts.append(f"{row['tokens_per_s_gpu']:,.0f} tokens/s a GPU")
        if "public" in row:
            parts.append(f"public: {row['public']}")
        lines.append(f"{row['layout']} {row['case']}: {'; '.join(parts)}")
        held[row["layout"]] = row["bytes_per_device"]
    for name, kinds in held.items():
        sizes = [f"{kind} {size / 1e9:.3g}" for kind, size in kinds.items()]
        lines.append(f"{name}: GB a device: {', '.join(sizes)}")
    return ["", *lines] if lines else []


def check_sums(compiled: Mapping[Any, Any]) -> None:
    """StuckStep that names one of the executables in which a rank got no answer."""
    for name, made in compiled.items():
        if isinstance(made, Reporting) and made.errors is not None:
            made.memory.check(made.errors, str(name))


def collective_us(
    placement: Placement, peers: str, rows: int, cfg: Config, numerics: Numerics
) -> dict[str, float]:
    """Microseconds of one collective on so many rows of a data rank, in a chain of some: the sum
    over tensor ranks, and rows on their way to experts of other ranks and back, by dispatch.
    """
    layout, ranks = placement.division.layout, placement.division.layout.data
    x = jnp.ones((ranks * rows, cfg.hidden_size), numerics.dtype)
    found = {}
    if layout.tensor > 1:
        found["all_reduce"] = _sums_us(placement, peers, rows, x)
    if layout.experts_over_data and ranks > 1:
        k, held = cfg.num_experts_per_tok, -(-cfg.n_routed_experts // ranks)
        shape = ranks * rows, k
        ids = np.random.default_rng(0).integers(0, cfg.n_routed_experts, shape, np.int32)
        for name, dispatch in (("gather", gathered), ("all_to_all", AllToAll(held, ranks))):
            found[name] = _dispatch_us(placement, dispatch, x, ids)
    return {name: round(us, 2) for name, us in found.items()}


def _sums_us(placement: Placement, peers: str, rows: int, x: Array) -> float:
    memory = peer_memory(placement, peers, rows)
    reduce = peer_all_reduce if memory else all_reduce

    def chain(x: Array, *table: Array) -> Array:
        with memory.calls(*table) if memory else nullcontext():
            for _ in range(_CHAIN):
                x = reduce(x, (MODEL,)) * 0.5
        return x

    specs, table = (BY_RANK,), ()
    if memory:
        specs, table = (BY_RANK, memory.table_spec), (memory.table,)
    return _us(placement, chain, specs, x, *table)


def _dispatch_us(placement: Placement, dispatch: Callable, x: Array, ids: np.ndarray) -> float:
    """Of rows that no expert works on."""

    def chain(x: Array, ids: Array) -> Array:
        weights = jnp.ones(ids.shape, jnp.float32)
        for _ in range(_CHAIN):
            back = dispatch(lambda rows, *_: rows.astype(jnp.float32), x, ids, weights, (DATA,))
            x = (back * 0.5).astype(x.dtype)
        return x

    return _us(placement, chain, (BY_RANK, BY_RANK), x, ids)


def _us(placement: Placement, chain: Callable, specs: tuple, *inputs: Any) -> float:
    function = jit(placement.over_ranks(chain, specs, BY_RANK))
    own = placement.put(inputs[:1], BY_RANK), inputs[1:]
    given = [*own[0], *own[1]]
    return timed(lambda: function(*given)).us / _CHAIN


def _local_bytes(leaf: Any) -> int:
    """Of an abstract array on one device."""
    sharding = getattr(leaf, "sharding", None)
    shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
    return prod(shape) * leaf.dtype.itemsize
