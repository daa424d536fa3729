"""The serving programs, which also give what goes into the LM head, what comes out and what was
chosen on the way; and which implementation of every operation they hold.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Cache, CacheShape
from dsv41_jax.compiling import jit
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from serving.bench.check_implementations import Implementation, Record, implementations, recorded
from serving.bench.forward_programs import SharedPrograms
from serving.bench.forward_routing import Tables, routed
from serving.bench.forward_weights import WeightSets
from serving.buckets import Bucket
from serving.programs import FORWARDS, READERS, Programs
from serving.speculative import Speculation

Key = tuple[str, Bucket]


@dataclass
class Choices:
    """What routers and indexers chose, by operation in the order of their calls. followed: choices
    of another run, which go on in the place of one's own; a router's weights stay its own in rows
    where it chose the same experts.
    """

    followed: dict[str, list] | None
    made: dict[str, list] = field(default_factory=dict)

    def ops(self, ops: Ops) -> Ops:
        return replace(
            ops,
            moe_gate=partial(self._route, ops.moe_gate),
            index_topk=partial(self._pick, "index_topk", ops.index_topk),
            top_blocks=partial(self._pick, "top_blocks", ops.top_blocks),
        )

    def _route(
        self, gate: Callable, *operands: Array | None, top_k: int, scale: float
    ) -> tuple[Array, Array]:
        ids, weights = gate(*operands, top_k=top_k, scale=scale)
        other = self._noted("moe_gate", (ids, weights))
        if other is None:
            return ids, weights
        same = jnp.all(ids == other[0], axis=-1, keepdims=True)
        return other[0], jnp.where(same, weights, other[1])

    def _pick(
        self, name: str, op: Callable, scores: Array, visible: Array, **options: int
    ) -> Array:
        picks = op(scores, visible, **options)
        other = self._noted(name, (picks,))
        return picks if other is None else other[0]

    def _noted(self, name: str, made: tuple[Array, ...]) -> tuple[Array, ...] | None:
        calls = self.made.setdefault(name, [])
        calls.append(made)
        return None if self.followed is None else self.followed[name][len(calls) - 1]


class Kept(Programs):
    """Programs of one device (parameters, cache, inputs, choices to follow) -> cache, {"head
    input": [..., D], "logits": [..., V]}, choices. The second is empty where no head runs. Of a
    draft only the first logits count: the others follow from its choices. leader: whose choices are
    followed; then, and with ``choosing``, choices are given.
    """

    def __init__(self, leader: "Kept | None", choosing: bool):
        self.leader, self.choosing = leader, choosing
        self.records: dict[Key, Record] = {}
        self._traced: dict[Key, jax.stages.Traced] = {}
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._lock = Lock()

    def opened(self, params: Any, record: Record) -> tuple[Model, Ops]:
        """The model, and its operations, whose calls are recorded."""
        raise NotImplementedError

    def traced(self, name: str, bucket: Bucket) -> jax.stages.Traced:
        """A program as the engine would compile it; traced once."""
        followed = self.leader.chosen(name, bucket) if self.leader else None
        with self._lock:
            if (name, bucket) not in self._traced:
                function = jit(self.bound(name, bucket), donate=() if name in READERS else (1,))
                cache, inputs = jax.eval_shape(self._empty_cache), self.input_shapes(name, bucket)
                made = function.trace(self.params, cache, *inputs, followed)
                self._traced[name, bucket] = made
            return self._traced[name, bucket]

    def executable(self, name: str, bucket: Bucket, options: dict[str, Any]) -> Any:
        """A program, compiled once; callers see to it that threads ask for different ones."""
        if (name, bucket) not in self._compiled:
            self._compiled[name, bucket] = self.traced(name, bucket).lower().compile(options)
        return self._compiled[name, bucket]

    def chosen(self, name: str, bucket: Bucket) -> Any:
        """Shapes of a program's choices."""
        return self.traced(name, bucket).out_info[2]

    def implementations(self, name: str, bucket: Bucket) -> list[Implementation]:
        """Of every operation that the program calls."""
        traced = self.traced(name, bucket)
        return implementations(self.records[name, bucket], traced.jaxpr.jaxpr)

    def _of_rank(self, name: str, bucket: Bucket) -> Callable:
        options, record = self._options(name, bucket), Record()
        self.records[name, bucket] = record

        def run(params: Any, cache: Cache, *given: Any) -> tuple[Cache, dict[str, Array], dict]:
            *inputs, followed = given
            (model, ops), kept, choices = self.opened(params, record), {}, Choices(followed)
            ops = choices.ops(ops) if self.choosing else ops
            head = partial(_kept, kept, ops.gathered_linear, self.cfg.vocab_size)
            ops = replace(ops, gathered_linear=head)
            out = FORWARDS[name](model, ops, cache, *inputs, **options)
            if name not in READERS:
                cache = out if name == "encode" else out[0]
            return cache, kept, choices.made

        return run


class RandomPrograms(Kept, SharedPrograms):
    """Over shared weight sets, experts picked by tables."""

    def __init__(self, sets: WeightSets, ops: Ops, shape: CacheShape, tables: Tables):
        SharedPrograms.__init__(self, sets, ops, shape, tables, Speculation())
        Kept.__init__(self, None, choosing=False)

    def opened(self, params: Any, record: Record) -> tuple[Model, Ops]:
        state, routing = self.sets.full(params["weights"], params["routing"])
        ops = routed(recorded(self.ops, record), routing, self.sets.placement)
        return nnx.merge(self.graph, state), ops


class CheckpointPrograms(Kept):
    """Over a loaded model."""

    def __init__(self, model: Model, ops: Ops, shape: CacheShape, leader: Kept | None = None):
        speculation = Speculation() if len(model.mtp) else None
        Programs.__init__(self, model, ops, shape, speculation=speculation)
        Kept.__init__(self, leader, choosing=True)

    def opened(self, params: Any, record: Record) -> tuple[Model, Ops]:
        return nnx.merge(self.graph, params), recorded(self.ops, record)


def _kept(
    kept: dict[str, Array],
    linear: Callable,
    vocabulary: int,
    x: Array,
    weight: Any,
    *,
    outputs: int,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    y = linear(x, weight, outputs=outputs, out_dtype=out_dtype)
    if outputs == vocabulary:
        kept.setdefault("head input", x)
        kept.setdefault("logits", y)
    return y
