"""One sequence through the two halves of a model, with what every layer does kept to look at."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dsv41_jax import compiling
from dsv41_jax.cache import Cache, CacheShape, Handoff, new_cache
from dsv41_jax.layer_plan import LayerPlan, layer_plan
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.prompt import check_token_ids
from dsv41_jax.rows import Rows
from pallas_kernels.engram.ref import engram_gate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerTrace:
    """What one layer did with T rows.

    position int32 [T]. streams [T, S, D]: the residual streams behind it. selected int32 [T, k]:
    entries of its KV source, -1 for none; None in window-only layers. experts int32 [T, K] and
    weights f32 [T, K]: the routed ones. mixing f32 [2, T, S, S]: stream to stream, of its attention
    and of its experts. gate f32 [T, S]: Engram's, None in layers without.
    """

    position: Array
    streams: Array
    selected: Array | None
    experts: Array
    weights: Array
    mixing: Array
    gate: Array | None


class Tracer:
    """A sequence of T tokens on one device, layer by layer (ARCHITECTURE sections 3 to 9 and 12).

    The halves are programs of their own, compiled for each number of rows. UserError for token ids
    that the model does not have.
    """

    def __init__(self, model: Model, ops: Ops, ids: Sequence[int]):
        check_token_ids(ids, model.cfg)
        self.cfg, self.ids = model.cfg, np.asarray(ids, np.int32)
        graph, self._params = nnx.split(model)
        size = CacheShape(1, 1).page_size
        shape = CacheShape(slots=1, pages=-(-len(ids) // size), page_size=size)
        self._pages = np.arange(shape.pages, dtype=np.int32)[None]
        self._cache = new_cache(self.cfg, ops.numerics, shape)
        self._handoff: Handoff | None = None
        plan, cut = layer_plan(self.cfg), self.cfg.last_kv_source + 1

        def encode(params: nnx.State, cache: Cache, rows: Rows) -> tuple:
            recorder = _Recorder(ops)
            handoff, cache = nnx.merge(graph, params).encoder(recorder.ops, rows, cache)
            return recorder.layers(plan[:cut], rows), handoff, cache

        def decode(params: nnx.State, cache: Cache, rows: Rows, handoff: Handoff) -> tuple:
            recorder, model = _Recorder(ops), nnx.merge(graph, params)
            features, cache = model.decoder(recorder.ops, rows, handoff, cache)
            logits = model.logits(ops, features.h, features.pre)[0]
            return recorder.layers(plan[cut:], rows), logits, cache

        self._encode, self._decode = compiling.jit(encode), compiling.jit(decode)

    def encoder(self, start: int = 0) -> tuple[LayerTrace, ...]:
        """The layers up to the last KV source on the rows from ``start`` on.

        Above 0 it is the replay after a prefix hit that ends a window behind ``start``: windows see
        nothing below ``start``, and entries below the hit stay those of the run before, which
        ValueError asks for (ARCHITECTURE section 17, decision 5).
        """
        if not 0 <= start < len(self.ids) or (start and self._handoff is None):
            raise ValueError(f"{start=} must be 0, or below {len(self.ids)} after a run from 0")
        write_from = start + self.cfg.sliding_window if start else 0
        rows = self._rows(start, floor=start, write_from=write_from)
        layers, self._handoff, self._cache = self._encode(self._params, self._cache, rows)
        return layers

    def decoder(self, rows: int | None = None) -> tuple[tuple[LayerTrace, ...], Array]:
        """The layers after it and float32 logits [rows, V], on the last ``rows`` of those that the
        encoder ran on, by default on all.

        Fewer are bounded replay: windows see nothing below the first of them (decision 6).
        """
        if self._handoff is None:
            raise ValueError("encoder() must run before decoder()")
        held = self._handoff.pre.shape[1]
        count = held if rows is None else rows
        if not 1 <= count <= held:
            raise ValueError(f"{rows=} must be at least 1 and at most {held}")
        start = len(self.ids) - count
        handoff = jax.tree.map(lambda leaf: leaf[:, held - count :], self._handoff)
        inputs = self._rows(start, floor=start)
        layers, logits, self._cache = self._decode(self._params, self._cache, inputs, handoff)
        return layers, logits

    def candidates(self) -> Array:
        """Candidate blocks int32 [T, C] of the rows that the encoder last ran on, -1 for none;
        ValueError before it ran.
        """
        if self._handoff is None:
            raise ValueError("encoder() must run before candidates()")
        return self._handoff.candidates[0]

    def _rows(self, start: int, *, floor: int, write_from: int = 0) -> Rows:
        lookback = self.cfg.engram_max_ngram_size - 1
        history = np.concatenate([np.full(lookback, -1, np.int32), self.ids])
        tokens = self.ids[None, start:]

        def one(value: int) -> np.ndarray:
            return np.array([value], np.int32)

        return Rows(
            tokens=tokens,
            image=np.zeros(tokens.shape, bool),
            start=one(start),
            length=one(tokens.shape[1]),
            slot=one(0),
            page_table=self._pages,
            floor=one(floor),
            decoder_floor=one(floor),
            write_from=one(write_from),
            previous=history[None, start : start + lookback],
        )


class _Recorder:
    """Operations that keep, call by call, what a trace shows; for one forward inside a program."""

    def __init__(self, ops: Ops):
        self._kept: dict[str, list[Any]] = defaultdict(list)
        self.ops = replace(
            ops,
            mhc_coefficients=self._keep("mixing", ops.mhc_coefficients, lambda _, out: out[2]),
            mhc_expand=self._keep("streams", ops.mhc_expand, lambda _, out: out),
            mhc_expand_collapse_norm=self._keep(
                "streams", ops.mhc_expand_collapse_norm, lambda _, out: out[0]
            ),
            moe_gate=self._keep("routing", ops.moe_gate, lambda _, out: out),
            sparse_attention=self._keep("selected", ops.sparse_attention, _selected),
            ring_attention=self._keep("selected", ops.ring_attention, _selected),
            engram_gate_add=self._gated(ops.engram_gate_add),
            mhc_site=None,  # two operations, of which both results are kept
        )

    def _keep(self, name: str, function: Callable, shown: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self._kept[name].append(shown(arguments, result))
            return result

        return call

    def _gated(self, gate_add: Callable) -> Callable:
        def call(h: Array, kv: Array, *weights: Array, eps: float) -> Array:
            keys = kv[..., : h.shape[-2] * h.shape[-1]].reshape(h.shape)
            self._kept["gate"].append(engram_gate(h, keys, *weights, eps=eps))
            return gate_add(h, kv, *weights, eps=eps)

        return call

    def layers(self, plan: Sequence[LayerPlan], rows: Rows) -> tuple[LayerTrace, ...]:
        """The traces of the layers that ran, of the only request."""
        gates = iter(self._kept["gate"])
        traces = []
        for i, layer in enumerate(plan):
            experts, weights = self._kept["routing"][i]
            trace = LayerTrace(
                position=rows.position,
                streams=self._kept["streams"][2 * i + 1],
                selected=self._kept["selected"][i],
                experts=experts,
                weights=weights,
                mixing=jnp.stack(self._kept["mixing"][2 * i : 2 * i + 2], axis=1),
                gate=next(gates) if layer.engram else None,
            )
            traces.append(jax.tree.map(lambda leaf: leaf[0], trace))
        return tuple(traces)


def _selected(arguments: tuple[Any, ...], _result: Array) -> Array | None:
    return arguments[-2]
