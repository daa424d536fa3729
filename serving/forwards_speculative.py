"""What the programs of speculative decoding compute: ``draft`` and ``verify``.

A step drafts a block, then verifies it, without the host in between: positions, newest tokens and
proposals stay on the device. Rejected rows stay where they are in the caches. Rings hold rows by
position and reach farther than window and block together; entries that rejected tokens closed are
beyond what a later row may see; every position is written again before it is read (ARCHITECTURE
section 10, Rollback list). History, counts, position and newest token follow the accepted rows.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Cache
from dsv41_jax.engram import next_history
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from serving.acceptance import accept, likeliest, simulated_acceptance
from serving.buckets import DecodeBatch
from serving.logit_rules import counted
from serving.sampler import Sampled, Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposals:
    """Drafted ids int32 [B, n] and their confidence f32 [B, n], raw logits."""

    ids: Array
    confidence: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """sampled: [B, T, ...], of which ``count`` int32 [B] tokens are the step's; ``drafted`` int32
    [B]: drafts that were verified.
    """

    sampled: Sampled
    count: Array
    drafted: Array


def draft(model: Model, ops: Ops, cache: Cache, batch: DecodeBatch, *, length: int) -> Proposals:
    """The next ``length`` tokens of each request as DSpark proposes them; only reads the cache."""
    assert cache.position is not None
    slot, floor = batch.slot, jnp.maximum(batch.floor, batch.decoder_floor)
    place = cache.last_token[slot], slot, cache.position[slot], floor
    block = model.draft(ops, *place, cache, length)
    return Proposals(block.ids, block.confidence)


def verify(
    model: Model,
    ops: Ops,
    cache: Cache,
    batch: DecodeBatch,
    sampling: Sampling,
    drafts: Array,
    allowed: Array,
    confidence: Array | None = None,
    *,
    logprobs: int,
    simulated: float | None = None,
    budget: int | None = None,
) -> tuple[Cache, Verified]:
    """One step over the newest token and int32 [B, n] drafts, of which each request admits
    ``allowed`` int32 [B]. The batch's positions are not used, the cache's are. budget: drafts
    verified in all, chosen by their ``confidence`` f32 [B, n].
    """
    rows = _rows(cache, batch, drafts, allowed)
    if confidence is not None:
        assert budget is not None
        chosen = likeliest(confidence, rows.length - 1, budget)
        rows = replace(rows, length=jnp.minimum(rows.length, 1 + chosen))
    features, cache = model.layers_over(ops, rows, cache)
    logits = model.scores(ops, features.normed)
    table = cache.counts
    counts = None if table is None else lambda: table[rows.slot]
    live = jnp.maximum(rows.length - 1, 0)
    following = rows.start + 1
    sampled, accepted = accept(
        logits, sampling, following, drafts, live, logprobs=logprobs, counts=counts
    )
    if simulated is not None and drafts.shape[1]:
        sampled, accepted = simulated_acceptance(
            sampled, drafts, live, following, sampling.seed, simulated
        )
    sampled, accepted = ops.agree((sampled, accepted))
    count = jnp.where(rows.length > 0, accepted + 1, 0)
    return _committed(cache, rows, sampled.token, count), Verified(sampled, count, live)


def _rows(cache: Cache, batch: DecodeBatch, drafts: Array, allowed: Array) -> Rows:
    """Rows of the newest token and the drafts; no row at or beyond ``last_position``."""
    assert cache.position is not None
    start, slot = cache.position[batch.slot], batch.slot
    room = jnp.where(batch.active, jnp.maximum(batch.last_position - start, 0), 0)
    allowed = jnp.minimum(allowed, drafts.shape[1])
    tokens = cache.last_token[slot][:, None]
    if drafts.shape[1]:
        tokens = jnp.concatenate([tokens, drafts], axis=1)
    return Rows(
        tokens=tokens,
        image=jnp.zeros(tokens.shape, bool),
        start=start,
        length=jnp.minimum(allowed + 1, room),
        slot=slot,
        page_table=batch.page_table,
        floor=batch.floor,
        decoder_floor=batch.decoder_floor,
        write_from=jnp.zeros_like(start),
        previous=cache.history[slot],
    )


def _committed(cache: Cache, rows: Rows, token: Array, count: Array) -> Cache:
    """The cache after ``count`` int32 [B] of the tokens [B, T]; none leave a request as it was."""
    assert cache.position is not None
    kept = replace(rows, length=count)
    slot = jnp.where(count > 0, rows.slot, cache.last_token.shape[0])
    newest = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    cache = replace(
        cache,
        history=cache.history.at[slot].set(next_history(kept), mode="drop"),
        last_token=cache.last_token.at[slot].set(newest, mode="drop"),
        position=cache.position.at[slot].set(rows.start + count, mode="drop"),
    )
    if cache.counts is None:
        return cache
    slots = jnp.repeat(rows.slot, token.shape[1])
    counts = counted(cache.counts, slots, token.reshape(-1), kept.live.reshape(-1))
    return replace(cache, counts=counts)
