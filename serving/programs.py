"""The compiled programs: encode, replay, prefill_full, decode (DESIGN, The compiled programs).

Each is compiled ahead of time for a bucket of shapes, with the cache donated. ``prefill_full`` runs
all layers in one dispatch: the rows between the halves never leave the device, and a chunk that is
not trimmed has no use for the carry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Cache, CacheShape, Handoff, new_cache
from dsv41_jax.compiling import jit
from dsv41_jax.model import Features, Model
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from serving.sampler import Sampled, Sampling, sample

PROGRAMS = ("encode", "replay", "prefill_full", "decode")


@dataclass(frozen=True)
class Bucket:
    """The shapes of one executable: requests B, rows T a request, pages P of a page table, steps a
    dispatch (decode).
    """

    requests: int
    rows: int
    pages: int
    steps: int = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """B requests that decode: slot, position (of the token to feed), floor, decoder_floor int32
    [B], active bool [B], page_table int32 [B, P]; stop_ids int32 [B, M] (-1 = none) and
    last_position int32 [B] end a request on the device.
    """

    slot: Array
    position: Array
    active: Array
    page_table: Array
    floor: Array
    decoder_floor: Array
    stop_ids: Array
    last_position: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoded:
    """sampled: [steps, B, ...] and which rows were active at each step, bool [steps, B]; the batch
    to go on with.
    """

    sampled: Sampled
    active: Array
    batch: DecodeBatch


def encode(model: Model, ops: Ops, cache: Cache, rows: Rows) -> Cache:
    handoff, cache = model.encoder(ops, rows, cache)
    carry = cache.carry.write(handoff, rows.slot, rows.position, rows.live)
    return replace(cache, carry=carry)


def replay(
    model: Model, ops: Ops, cache: Cache, rows: Rows, sampling: Sampling, *, logprobs: int
) -> tuple[Cache, Sampled]:
    carried, exists = cache.carry.at(rows.slot, rows.position)
    seen = (exists & rows.live)[..., None]
    handoff = Handoff(
        carried.h,
        carried.pre,
        jnp.where(seen, carried.selected, -1),
        jnp.where(seen, carried.candidates, -1),
    )
    features, cache = model.decoder(ops, rows, handoff, cache)
    return _first_token(model, ops, cache, rows, features, sampling, logprobs)


def prefill_full(
    model: Model, ops: Ops, cache: Cache, rows: Rows, sampling: Sampling, *, logprobs: int
) -> tuple[Cache, Sampled]:
    handoff, cache = model.encoder(ops, rows, cache)
    features, cache = model.decoder(ops, rows, handoff, cache)
    return _first_token(model, ops, cache, rows, features, sampling, logprobs)


def decode(
    model: Model,
    ops: Ops,
    cache: Cache,
    batch: DecodeBatch,
    sampling: Sampling,
    *,
    logprobs: int,
    steps: int,
) -> tuple[Cache, Decoded]:
    step = partial(_decode_step, model, ops, sampling, logprobs)
    sampled = jax.eval_shape(step, cache, batch)[1]
    outputs = jax.tree.map(
        lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), (sampled, batch.active)
    )

    def body(state: tuple) -> tuple:
        i, cache, batch, outputs = state
        cache, new, following = step(cache, batch)
        outputs = jax.tree.map(lambda out, leaf: out.at[i].set(leaf), outputs, (new, batch.active))
        return i + 1, cache, following, outputs

    state = (jnp.int32(0), cache, batch, outputs)
    if steps == 1:
        state = body(state)
    else:
        state = jax.lax.while_loop(lambda s: (s[0] < steps) & jnp.any(s[2].active), body, state)
    _, cache, batch, (sampled, active) = state
    return cache, Decoded(sampled, active, batch)


def _decode_step(
    model: Model, ops: Ops, sampling: Sampling, logprobs: int, cache: Cache, batch: DecodeBatch
) -> tuple[Cache, Sampled, DecodeBatch]:
    rows = Rows(
        tokens=cache.last_token[batch.slot][:, None],
        image=jnp.zeros((batch.slot.shape[0], 1), bool),
        start=batch.position,
        length=batch.active.astype(jnp.int32),
        slot=batch.slot,
        page_table=batch.page_table,
        floor=batch.floor,
        decoder_floor=batch.decoder_floor,
        write_from=jnp.zeros_like(batch.position),
        previous=cache.history[batch.slot],
    )
    cache, sampled = prefill_full(model, ops, cache, rows, sampling, logprobs=logprobs)
    stopped = jnp.any(sampled.token[:, None] == batch.stop_ids, axis=1)
    position = batch.position + rows.length
    active = batch.active & ~stopped & (position < batch.last_position)
    return cache, sampled, replace(batch, position=position, active=active)


def _first_token(
    model: Model,
    ops: Ops,
    cache: Cache,
    rows: Rows,
    features: Features,
    sampling: Sampling,
    logprobs: int,
) -> tuple[Cache, Sampled]:
    """Sample after each request's last live row; the token of a request without rows is not
    kept.
    """
    batch, last = jnp.arange(rows.length.shape[0]), jnp.maximum(rows.length - 1, 0)
    logits = model.logits(ops, features.h[batch, last], features.pre[batch, last])
    sampled = sample(logits, sampling, rows.start + rows.length, logprobs=logprobs)
    slot = jnp.where(rows.length > 0, rows.slot, cache.last_token.shape[0])
    return replace(
        cache, last_token=cache.last_token.at[slot].set(sampled.token, mode="drop")
    ), sampled


class Programs:
    """The executables over one model and cache; state and parameters are split once."""

    def __init__(
        self, model: Model, ops: Ops, shape: CacheShape, *, logprobs: int = 0, max_stop_ids: int = 1
    ):
        self.graph, self.params = nnx.split(model)
        self.cfg, self.ops, self.shape = model.cfg, ops, shape
        self.logprobs, self.max_stop_ids = logprobs, max_stop_ids
        self.executables: dict[tuple[str, Bucket], Any] = {}

    def new_cache(self) -> Cache:
        return new_cache(self.cfg, self.ops.numerics, self.shape)

    def compile(self, name: str, bucket: Bucket) -> Any:
        """The executable of a program for a bucket, compiled the first time it is asked for."""
        if (name, bucket) not in self.executables:
            arguments = self._arguments(name, bucket)
            function = jit(self._bound(name, bucket), donate=(1,))
            self.executables[name, bucket] = function.lower(*arguments).compile()
        return self.executables[name, bucket]

    def __call__(self, name: str, bucket: Bucket, cache: Cache, *inputs: Any) -> Any:
        """Run a compiled program; the cache passed in is consumed. KeyError if the bucket was not
        compiled.
        """
        return self.executables[name, bucket](self.params, cache, *inputs)

    def _bound(self, name: str, bucket: Bucket) -> Callable:
        options: dict[str, int] = {} if name == "encode" else {"logprobs": self.logprobs}
        if name == "decode":
            options["steps"] = bucket.steps
        program = {
            "encode": encode,
            "replay": replay,
            "prefill_full": prefill_full,
            "decode": decode,
        }[name]

        def run(params: nnx.State, cache: Cache, *inputs: Any) -> Any:
            return program(nnx.merge(self.graph, params), self.ops, cache, *inputs, **options)

        return run

    def _arguments(self, name: str, bucket: Bucket) -> tuple:
        cache = jax.eval_shape(self.new_cache)
        if name == "decode":
            batch = abstract_decode_batch(bucket, self.max_stop_ids)
            return self.params, cache, batch, abstract_sampling(bucket.requests)
        rows = abstract_rows(bucket, self.cfg.engram_max_ngram_size - 1)
        return (self.params, cache, rows) + (
            () if name == "encode" else (abstract_sampling(bucket.requests),)
        )


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def abstract_rows(bucket: Bucket, lookback: int) -> Rows:
    b, t = bucket.requests, bucket.rows
    return Rows(
        tokens=_int32(b, t),
        image=jax.ShapeDtypeStruct((b, t), jnp.bool_),
        start=_int32(b),
        length=_int32(b),
        slot=_int32(b),
        page_table=_int32(b, bucket.pages),
        floor=_int32(b),
        decoder_floor=_int32(b),
        write_from=_int32(b),
        previous=_int32(b, lookback),
    )


def abstract_decode_batch(bucket: Bucket, stop_ids: int) -> DecodeBatch:
    b = bucket.requests
    return DecodeBatch(
        slot=_int32(b),
        position=_int32(b),
        active=jax.ShapeDtypeStruct((b,), jnp.bool_),
        page_table=_int32(b, bucket.pages),
        floor=_int32(b),
        decoder_floor=_int32(b),
        stop_ids=_int32(b, stop_ids),
        last_position=_int32(b),
    )


def abstract_sampling(requests: int) -> Sampling:
    f32 = jax.ShapeDtypeStruct((requests,), jnp.float32)
    return Sampling(f32, _int32(requests), f32, jax.ShapeDtypeStruct((requests,), jnp.uint32))
