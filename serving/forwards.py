"""What each compiled program computes (DESIGN, The compiled programs).

``prefill_full`` runs all layers in one dispatch: the rows between the halves never leave the
device, and a chunk that is not trimmed has no use for the carry.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Cache, Handoff
from dsv41_jax.model import Features, Model
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from serving.buckets import DecodeBatch
from serving.filters import highest
from serving.logit_rules import counted
from serving.sampler import RowScores, Sampled, Sampling, sample


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
    features, cache = model.layers_over(ops, rows, cache)
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
    if steps == 1:
        cache, sampled, following = step(cache, batch)
        sampled, active = jax.tree.map(lambda leaf: leaf[None], (sampled, batch.active))
        return cache, Decoded(sampled, active, following)
    sampled = jax.eval_shape(step, cache, batch)[1]
    outputs = jax.tree.map(
        lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), (sampled, batch.active)
    )

    def going(batch: DecodeBatch) -> Array:
        """Whether any rank has an active row: ranks must run the same number of steps."""
        return ops.anywhere(jnp.any(batch.active))

    def body(state: tuple) -> tuple:
        i, _, cache, batch, outputs = state
        cache, new, following = step(cache, batch)
        outputs = jax.tree.map(lambda out, leaf: out.at[i].set(leaf), outputs, (new, batch.active))
        return i + 1, going(following), cache, following, outputs

    state = (jnp.int32(0), going(batch), cache, batch, outputs)
    state = jax.lax.while_loop(lambda s: (s[0] < steps) & s[1], body, state)
    _, _, cache, batch, (sampled, active) = state
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
    logits = model.scores(ops, features.normed[batch, last])
    table = cache.counts
    counts = None if table is None else lambda: table[rows.slot]
    position = rows.start + rows.length
    sampled = sample(logits, sampling, position, logprobs=logprobs, counts=counts)
    sampled = ops.agree(sampled)
    live = rows.length > 0
    slot = jnp.where(live, rows.slot, cache.last_token.shape[0])
    cache = replace(cache, last_token=cache.last_token.at[slot].set(sampled.token, mode="drop"))
    if cache.counts is not None:
        counts = counted(cache.counts, rows.slot, sampled.token, live)
        cache = replace(cache, counts=counts)
    if cache.position is not None:
        cache = replace(cache, position=cache.position.at[slot].set(position, mode="drop"))
    return cache, sampled


def prefill_scored(
    model: Model,
    ops: Ops,
    cache: Cache,
    rows: Rows,
    sampling: Sampling,
    targets: Array,
    *,
    logprobs: int,
) -> tuple[Cache, Sampled, RowScores]:
    """``prefill_full`` that also scores int32 [B, T] ``targets``, the token after each row."""
    features, cache = model.layers_over(ops, rows, cache)
    normalized = jax.nn.log_softmax(model.scores(ops, features.normed), axis=-1)
    picked = jnp.take_along_axis(normalized, targets[..., None], axis=-1)[..., 0]
    best, ids = highest(normalized, logprobs)
    cache, sampled = _first_token(model, ops, cache, rows, features, sampling, logprobs)
    return cache, sampled, RowScores(picked, ids, best)
