"""Acceptance of drafted tokens on the device (ARCHITECTURE section 10, Verification).

The drafter proposes its best token alone, so its distribution is a point: standard speculative
sampling then accepts d with probability p(d) and resamples from p without d. Both come from one
draw of the plain sampler: the drawn token is compared with d, and if it differs it is the answer.
With its seeds a request gets the very tokens that it would get without drafts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from serving.logit_rules import GENERATED
from serving.sampler import Sampled, Sampling, sample


def accept(
    logits: Array,
    sampling: Sampling,
    position: Array,
    drafts: Array,
    live: Array,
    *,
    logprobs: int,
    counts: Callable[[], Array] | None = None,
) -> tuple[Sampled, Array]:
    """The tokens of a block [B, T], and how many drafts int32 [B] they confirm.

    logits f32 [B, T, V]: row 0 follows the newest token, row i draft i - 1. position int32 [B]: of
    the token after row 0. drafts int32 [B, T-1], of which ``live`` int32 [B] count. counts: gives
    int32 [B, V] up to row 0; within the block they go on with the drafts. A token behind the first
    that differs from its draft means nothing.
    """
    b, t, _ = logits.shape
    if t == 1:  # XLA's partitioner does not survive the empty arrays of the general form
        sampled = sample(logits[:, 0], sampling, position, logprobs=logprobs, counts=counts)
        return jax.tree.map(lambda leaf: leaf[:, None], sampled), jnp.zeros(b, jnp.int32)
    flat = jax.tree.map(lambda leaf: jnp.repeat(leaf, t, axis=0), sampling)
    places = (position[:, None] + jnp.arange(t)).reshape(-1)
    every = None if counts is None else (lambda: _block_counts(counts(), drafts).reshape(b * t, -1))
    sampled = sample(logits.reshape(b * t, -1), flat, places, logprobs=logprobs, counts=every)
    sampled = jax.tree.map(lambda leaf: leaf.reshape(b, t, *leaf.shape[1:]), sampled)
    agree = (sampled.token[:, :-1] == drafts) & (jnp.arange(t - 1) < live[:, None])
    return sampled, jnp.sum(jnp.cumprod(agree, axis=1, dtype=jnp.int32), axis=1)


def likeliest(confidence: Array, live: Array, budget: int) -> Array:
    """How many drafts int32 [B] to verify of each request, ``budget`` in all: every request keeps
    its first one, the others go by the probability that all drafts up to them are accepted.

    confidence f32 [B, n]: acceptance logits of the drafts, of which ``live`` int32 [B] count. Among
    equals an earlier place in the block goes first, then an earlier request.
    """
    b, n = confidence.shape
    place, counts = jnp.arange(n), jnp.arange(n) < live[:, None]
    score = jnp.cumsum(jax.nn.log_sigmoid(confidence), axis=1)
    score = jnp.where(counts, jnp.where(place == 0, jnp.inf, score), -jnp.inf)
    order = jnp.argsort(-score.T.reshape(-1), stable=True)
    rank = jnp.zeros(n * b, jnp.int32).at[order].set(jnp.arange(n * b)).reshape(n, b).T
    kept = counts & ((rank < budget) | (place == 0))
    return jnp.sum(jnp.cumprod(kept, axis=1, dtype=jnp.int32), axis=1)


def simulated_acceptance(
    sampled: Sampled, drafts: Array, live: Array, position: Array, seed: Array, tokens: float
) -> tuple[Sampled, Array]:
    """For benchmarks: ``tokens`` a step on average (1 to T) whatever the model says, by taking that
    many drafts less one. The text means nothing.
    """
    whole, part = divmod(tokens - 1, 1)
    u = jax.vmap(lambda s, p: jax.random.uniform(jax.random.fold_in(jax.random.key(s), p)))
    accepted = jnp.minimum(int(whole) + (u(seed, position) < part), live).astype(jnp.int32)
    forced = jnp.arange(drafts.shape[1]) < accepted[:, None]
    token = sampled.token.at[:, :-1].set(jnp.where(forced, drafts, sampled.token[:, :-1]))
    return Sampled(token, sampled.logprob, sampled.top_ids, sampled.top_logprobs), accepted


def _block_counts(counts: Array, drafts: Array) -> Array:
    """int32 [B, T, V]: the counts in front of each row, whose drafts are the request's output."""
    n = drafts.shape[1]
    before = GENERATED * (jnp.arange(n) < jnp.arange(n + 1)[:, None])  # [T, n]
    index = jnp.arange(drafts.shape[0])[:, None, None], jnp.arange(n + 1)[:, None], drafts[:, None]
    rows = jnp.broadcast_to(counts[:, None], (counts.shape[0], n + 1, counts.shape[1]))
    return rows.at[index].add(before)
