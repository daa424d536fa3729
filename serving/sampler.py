"""Sampling on the device: greedy, temperature, top-k, top-p, seeds, log probabilities."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from serving.filters import highest, kept
from serving.logit_rules import LogitRules, adjusted, changes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Per request: temperature f32 [B] (0: greedy), top_k int32 [B] (0: all), top_p f32 [B], seed
    uint32 [B], min_p f32 [B] (0: all), reports bool [B]: whether it wants the best ids. rules None:
    the logits are taken as they are.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    min_p: Array
    reports: Array
    rules: LogitRules | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """token int32 [B], its logprob f32 [B]; the best n ids int32 [B, n] and their logprobs f32 [B,
    n], the first ids and -inf where a request does not report them.
    """

    token: Array
    logprob: Array
    top_ids: Array
    top_logprobs: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowScores:
    """Log probabilities of the tokens that follow each row, f32 [B, T], and of the best n ids."""

    logprob: Array
    top_ids: Array
    top_logprobs: Array


def sample(
    logits: Array,
    sampling: Sampling,
    position: Array,
    *,
    logprobs: int,
    counts: Callable[[], Array] | None = None,
) -> Sampled:
    """One token of each row of float32 logits [B, V], for position int32 [B].

    Greedy takes the lowest id among equals. A random draw depends on the row's logits, seed and
    position alone, not on its neighbours. Log probabilities are those of the unfiltered logits at
    temperature 1. counts: gives int32 [B, V], see ``adjusted``; needed with rules. What no row of
    the batch asks for is not computed.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    token = jax.lax.cond(
        _more_than_best(sampling, position),
        lambda: _chosen(logits, sampling, position, counts),
        lambda: best,
    )
    top = jnp.take_along_axis(logits, best[:, None], axis=1)
    shifted = logits - top
    total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    picked = jnp.take_along_axis(logits, token[:, None], axis=1) - top - total
    alternatives = _alternatives(shifted, total, sampling.reports, logprobs)
    return Sampled(token, picked[:, 0], *alternatives)


def _more_than_best(sampling: Sampling, position: Array) -> Array:
    """bool []: whether some row needs more than the id of its highest logit."""
    asked = jnp.any(sampling.temperature > 0)
    return asked if sampling.rules is None else asked | jnp.any(changes(sampling.rules, position))


def _chosen(
    logits: Array, sampling: Sampling, position: Array, counts: Callable[[], Array] | None
) -> Array:
    """Tokens int32 [B] under every option."""
    if sampling.rules is not None:
        assert counts is not None
        logits = adjusted(logits, sampling.rules, counts(), position)
    random = sampling.temperature > 0
    heat = jnp.where(random, sampling.temperature, 1)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / heat
    top_k, top_p = jnp.where(random, sampling.top_k, 0), jnp.where(random, sampling.top_p, 1)
    within = kept(scaled, top_k, top_p, sampling.min_p)
    drawn = jax.vmap(_draw)(jnp.where(within, scaled, -jnp.inf), sampling.seed, position)
    return jnp.where(random, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def _draw(logits: Array, seed: Array, position: Array) -> Array:
    return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), logits)


def _alternatives(shifted: Array, total: Array, reports: Array, count: int) -> tuple[Array, Array]:
    """Ids int32 [B, n] and log probabilities f32 [B, n] of the best ``count`` ids of the rows that
    report them; the first ids and -inf of others.
    """

    def best() -> tuple[Array, Array]:
        reported = jnp.where(reports[:, None], shifted - total, -jnp.inf)
        values, ids = highest(reported, count)
        return ids, values

    def nothing() -> tuple[Array, Array]:
        shape = shifted.shape[0], count
        return jax.lax.broadcasted_iota(jnp.int32, shape, 1), jnp.full(shape, -jnp.inf)

    return jax.lax.cond(jnp.any(reports), best, nothing) if count else nothing()
