"""The executables: every program compiled ahead of time for a bucket of shapes, the cache
donated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dsv41_jax.cache import Cache, CacheShape, new_cache
from dsv41_jax.compiling import jit
from dsv41_jax.engram_host import HostTables
from dsv41_jax.engram_staging import blank_rows, with_tables
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from serving.batch import build_rows, neutral_decode, neutral_sampling
from serving.buckets import Bucket, DecodeBatch
from serving.forwards import Decoded, decode, encode, prefill_full, prefill_scored, replay
from serving.forwards_speculative import draft, verify
from serving.handoff.state import put_token, put_windows, state_bytes, take_windows
from serving.kv_pool.moves import idle_values, put_pages, take_pages
from serving.memory import check_cache_fits
from serving.speculative import Speculation
from serving.swap import put_state, set_counts, take_state
from serving.table_rows import ENCODERS, without_tables
from sharding.all_reduce import peer_memory
from sharding.collectives import gather
from sharding.layouts import DATA
from sharding.peer import PeerMemory
from sharding.place import BY_RANK, BY_RANK_LATER, REPLICATED, Placement

__all__ = ["Bucket", "DecodeBatch", "Decoded", "Programs"]

FORWARDS = {
    "encode": encode,
    "replay": replay,
    "prefill_full": prefill_full,
    "prefill_scored": prefill_scored,
    "decode": decode,
    "draft": draft,
    "verify": verify,
}
# Outputs are led by requests, slots or pages; but decode stacks its steps.
OUTPUT_SPECS = {
    "replay": (BY_RANK, BY_RANK),
    "prefill_full": (BY_RANK, BY_RANK),
    "prefill_scored": (BY_RANK, BY_RANK, BY_RANK),
    "decode": (BY_RANK, Decoded(BY_RANK_LATER, BY_RANK_LATER, BY_RANK)),
    "verify": (BY_RANK, BY_RANK),
}
MOVES = {"take_state": take_state, "put_state": put_state, "set_counts": set_counts}
MOVES |= {"take_pages": take_pages, "put_pages": put_pages}
MOVES |= {"take_windows": take_windows, "put_windows": put_windows, "put_token": put_token}
READERS = "take_state", "take_pages", "take_windows", "draft"


@dataclass(frozen=True)
class Report:
    """What the peer-to-peer sums of a program that was run have to say: errors int32 [devices]."""

    program: str
    memory: PeerMemory
    errors: Array

    def check(self, step: str) -> None:
        """StuckStep if a rank got no answer; waits for the program."""
        self.memory.check(self.errors, f"{step} ({self.program})")


class Programs:
    """The executables over one model and cache; state and parameters are split once.

    logprobs: alternatives that every sampled token reports. max_bias_ids: None for sampling
    without logit rules; otherwise the cache also counts tokens. speculation: with it the cache
    holds draft windows and positions, as ``draft`` and ``verify`` need them. placement: where the
    model lies if it is spread over devices; the programs then run under ``shard_map``. ``shape`` is
    then that of one data rank; slots and pages count from 0 on each of them, whose inputs and
    outputs stand one after the other on the axis of the requests. shared: whether several processes
    run the programs; all of them then read what any rank samples. peers: of ``peer_kernels``, if
    ``ops`` are built for "peer"; what ran since then has left a report in ``reports``. host: the
    model's Engram tables if they are on the host; ``ENCODERS`` then take what ``TableRows`` gives,
    behind their other inputs.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        shape: CacheShape,
        *,
        logprobs: int = 0,
        max_stop_ids: int = 1,
        max_bias_ids: int | None = None,
        speculation: Speculation | None = None,
        placement: Placement | None = None,
        peers: str = "",
    ):
        self.placement, self.peers = placement, peers
        self.shared = placement is not None and placement.mesh.is_multi_process
        self.host = HostTables.of(model) if HostTables.held_by(model) else None
        self.graph, params = nnx.split(model)
        if self.host and self.shared:
            raise UserError("Engram tables on the host need one process for all devices")
        self.params = without_tables(params, self.host, placement) if self.host else params
        self.cfg, self.ops, self.shape = model.cfg, ops, shape
        self.logprobs, self.max_stop_ids = logprobs, max_stop_ids
        self.max_bias_ids, self.speculation = max_bias_ids, speculation
        self.executables: dict[tuple[str, Bucket], Any] = {}
        self.reports: list[Report] = []
        self._memories: dict[tuple[str, Bucket], PeerMemory | None] = {}

    @property
    def ranks(self) -> int:
        """Data ranks."""
        return self.placement.division.ways("batch") if self.placement else 1

    @property
    def device(self) -> Any:
        """Where inputs lie: a device, or the sharding of places over data ranks."""
        if self.placement is None:
            return jax.local_devices()[0]
        return NamedSharding(self.placement.mesh, BY_RANK)

    def new_cache(self) -> Cache:
        """An empty cache of all ranks; UserError if it does not fit the devices."""
        here = self.placement.mesh.local_devices if self.placement else jax.local_devices()[:1]
        check_cache_fits(jax.eval_shape(self._empty_cache), self.ranks, here)
        return jit(self._empty_cache)() if self.placement else self._empty_cache()

    def _empty_cache(self) -> Cache:
        """The cache as it is traced; of all ranks."""
        if self.placement is None:
            return self._rank_cache()
        return self.placement.over_ranks(self._rank_cache, (), BY_RANK)()

    def _rank_cache(self) -> Cache:
        counts, drafts = self.max_bias_ids is not None, self.speculation is not None
        return new_cache(self.cfg, self.ops.numerics, self.shape, counts=counts, drafts=drafts)

    def compile(self, name: str, bucket: Bucket) -> Any:
        """The executable of a program for a bucket, compiled the first time it is asked for."""
        memory = self.memory(name, bucket)
        if (name, bucket) not in self.executables:
            cache, inputs = jax.eval_shape(self._empty_cache), self.input_shapes(name, bucket)
            if self.placement:
                cache = self.placement.shapes(cache, BY_RANK)
                inputs = self.placement.shapes(inputs, BY_RANK)
            if memory is not None:
                inputs = *inputs, memory.table
            donate = () if name in READERS else (1,)
            function = jit(self.bound(name, bucket), donate=donate)
            self.executables[name, bucket] = function.lower(self.params, cache, *inputs).compile()
        return self.executables[name, bucket]

    def memory(self, name: str, bucket: Bucket) -> PeerMemory | None:
        """Of a program's peer-to-peer sums, made the first time it is asked for; None without any.
        UserError if the devices lack their kernels.
        """
        if (name, bucket) not in self._memories:
            memory = None
            if self.placement and self.peers and name not in MOVES:
                rows = self.cfg.dspark_block_size if name == "draft" else bucket.rows
                memory = peer_memory(self.placement, self.peers, bucket.requests * rows)
            if memory is not None and bucket.steps > 1:
                raise ValueError(f"{bucket.steps=} must be 1 with peer-to-peer sums")
            self._memories[name, bucket] = memory
        return self._memories[name, bucket]

    def __call__(self, name: str, bucket: Bucket, cache: Cache, *inputs: Any) -> Any:
        """Run a compiled program; all but ``READERS`` consume the cache passed in. KeyError if
        the bucket was not compiled.
        """
        if self.shared:
            inputs = self.on_devices(inputs)
        memory, run = self._memories.get((name, bucket)), self.executables[name, bucket]
        if memory is None:
            return run(self.params, cache, *inputs)
        out, errors = run(self.params, cache, *inputs, memory.table)
        errors.copy_to_host_async()
        self.reports.append(Report(name, memory, errors))
        return out

    def take_reports(self) -> list[Report]:
        """Those since they were taken last."""
        taken, self.reports = self.reports, []
        return taken

    def on_devices(self, values: Any) -> Any:
        """Inputs on their devices; arrays that are there already stay."""
        if self.placement is None:
            return jax.device_put(values)
        put = partial(self.placement.put, spec=BY_RANK)
        return jax.tree.map(lambda v: v if isinstance(v, jax.Array) else put(v), values)

    def on_rank(self, values: Any, rank: int) -> Any:
        """Host arrays [n, ...] of one data rank as a program's input; the other ranks get zeros."""
        return self.placement.put_part(values, rank) if self.placement else values

    def idle_inputs(self, name: str, bucket: Bucket) -> tuple:
        """Inputs after the cache with which a program changes nothing that matters."""
        one = self._idle_move(name, bucket) if name in MOVES else self._idle_rank(name, bucket)
        if self.host and name in ENCODERS:
            one = *one, blank_rows(self.host, bucket.requests, bucket.rows)
        return jax.tree.map(lambda leaf: np.concatenate([leaf] * self.ranks), one)

    def _idle_rank(self, name: str, bucket: Bucket) -> tuple:
        sampling = neutral_sampling(
            bucket.requests, self.max_stop_ids, self.max_bias_ids, self.cfg.vocab_size
        )
        batch = neutral_decode(bucket.requests, bucket.pages, self.max_stop_ids)
        if name == "decode":
            return batch, sampling
        if name == "draft":
            return (batch,)
        if name == "verify":
            drafts = np.zeros((bucket.requests, bucket.rows - 1), np.int32)
            inputs = batch, sampling, drafts, np.zeros(bucket.requests, np.int32)
            chosen = self.speculation and self.speculation.budget and drafts.size
            return (*inputs, drafts.astype(np.float32)) if chosen else inputs
        rows = build_rows([], bucket, self.cfg.engram_max_ngram_size - 1)
        if name == "encode":
            return (rows,)
        if name == "prefill_scored":
            return rows, sampling, np.zeros((bucket.requests, bucket.rows), np.int32)
        return rows, sampling

    def _idle_move(self, name: str, bucket: Bucket) -> tuple:
        slot = np.full(bucket.requests, -1, np.int32)
        pages = np.full((bucket.requests, bucket.pages), -1, np.int32)
        if name == "set_counts":
            return slot, np.zeros((bucket.requests, self.cfg.vocab_size), np.int32)
        if name == "take_state":
            return slot, pages
        if name == "take_pages":
            return (pages,)
        if name in ("take_windows", "put_token"):
            return slot, np.zeros_like(slot)
        if name == "put_windows":
            history = np.zeros((bucket.requests, self.cfg.engram_max_ngram_size - 1), np.int32)
            row = state_bytes(jax.eval_shape(self._rank_cache))[0]
            values = np.zeros((bucket.requests, row), np.uint8)
            return slot, slot, slot, history, np.zeros(bucket.requests, bool), values
        if name == "put_pages":
            return pages, idle_values(jax.eval_shape(self._rank_cache).pools, pages.shape)
        saved = jax.eval_shape(take_state, jax.eval_shape(self._rank_cache), slot, pages)
        return slot, pages, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), saved)

    def input_shapes(self, name: str, bucket: Bucket) -> tuple:
        """Shapes of a program's inputs after the cache."""
        inputs = self.idle_inputs(name, bucket)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)

    def bound(self, name: str, bucket: Bucket) -> Callable:
        """The function that a program compiles: of the parameters, the cache, its inputs and, with
        a ``memory``, its table; then also to the errors of its sums.
        """
        if self.placement is None:
            return self._of_rank(name, bucket)
        of_rank, idle = self._of_rank(name, bucket), self.idle_inputs(name, bucket)
        # XLA crashes on an empty array that comes from outside (no drafts): it is made inside.
        kept = [i for i, value in enumerate(idle) if not _empty(value)]

        def run(params: nnx.State, cache: Cache, *given: Any) -> Any:
            inputs = [value[: len(value) // self.ranks] if _empty(value) else 0 for value in idle]
            for i, value in zip(kept, given, strict=True):
                inputs[i] = value
            return of_rank(params, cache, *inputs)

        specs = [self.placement.parameter_specs(self.params), BY_RANK]
        specs += [BY_RANK] * len(kept)
        outputs = OUTPUT_SPECS.get(name, BY_RANK)
        if self.shared and name in OUTPUT_SPECS:
            run, outputs = _read_by_all(run, outputs)
        memory, passed = self.memory(name, bucket), kept
        if memory is not None:
            run, passed = _reporting(run, memory), [*kept, len(idle)]
            specs, outputs = [*specs, memory.table_spec], (outputs, memory.table_spec)
        spread = self.placement.over_ranks(run, tuple(specs), outputs)
        return lambda params, cache, *inputs: spread(params, cache, *(inputs[i] for i in passed))

    def _of_rank(self, name: str, bucket: Bucket) -> Callable:
        if name in MOVES:
            return lambda params, cache, *inputs: MOVES[name](cache, *inputs)
        options = self._options(name, bucket)

        def run(params: nnx.State, cache: Cache, *inputs: Any) -> Any:
            if self.host and name in ENCODERS:
                inputs, params = inputs[:-1], with_tables(params, inputs[-1])
            model = nnx.merge(self.graph, params)
            return FORWARDS[name](model, self.ops, cache, *inputs, **options)

        return run

    def _options(self, name: str, bucket: Bucket) -> dict[str, Any]:
        """What a forward takes beside its inputs."""
        if name == "encode":
            return {}
        if name == "draft":
            return {"length": bucket.rows}
        options: dict[str, Any] = {"logprobs": self.logprobs}
        if name == "decode":
            options["steps"] = bucket.steps
        if name == "verify" and self.speculation is not None:
            options["simulated"] = self.speculation.simulated
            options["budget"] = self.speculation.budget
        return options


def _reporting(run: Callable, memory: PeerMemory) -> Callable:
    """A program's function on a rank inside the memory's calls: of one argument more, this rank's
    table, and to one result more, its error.
    """

    def inside(*given: Any) -> tuple:
        *inputs, table = given
        with memory.calls(table) as calls:
            return run(*inputs), calls.finish()

    return inside


def _read_by_all(run: Callable, specs: tuple) -> tuple[Callable, tuple]:
    """A program's function on a rank, whose outputs beside the cache are all ranks' on each of
    them; its specs.
    """

    def whole(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(lambda leaf: gather(leaf, (DATA,), axis=len(spec) - 1), part)

    def gathered(*given: Any) -> tuple:
        cache, *found = run(*given)
        return cache, *jax.tree.map(whole, specs[1:], tuple(found))

    return gathered, (specs[0], *[REPLICATED] * (len(specs) - 1))


def _empty(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size == 0
