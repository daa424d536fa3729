"""Sampling on the device: greedy, temperature, top-k, top-p, seeds, log probabilities."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from serving.logit_rules import LogitRules, adjusted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Per request: temperature f32 [B] (0: greedy), top_k int32 [B] (0: all), top_p f32 [B], seed
    uint32 [B], min_p f32 [B] (0: all). rules None: the logits are taken as they are.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    min_p: Array
    rules: LogitRules | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """token int32 [B], its logprob f32 [B]; the best n ids int32 [B, n] and their logprobs f32 [B,
    n].
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
    counts: Array | None = None,
) -> Sampled:
    """One token of each row of float32 logits [B, V], for position int32 [B].

    Greedy takes the lowest id among equals. A random draw depends on the row's logits, seed and
    position alone, not on its neighbours. Log probabilities are those of the unfiltered logits at
    temperature 1.
    """
    ruled = logits
    if sampling.rules is not None:
        assert counts is not None
        ruled = adjusted(logits, sampling.rules, counts, position)
    drawn = jax.vmap(_draw)(ruled, replace(sampling, rules=None), position)
    token = jnp.where(sampling.temperature > 0, drawn, jnp.argmax(ruled, axis=-1))
    token = token.astype(jnp.int32)
    normalized = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(normalized, logprobs)
    picked = jnp.take_along_axis(normalized, token[:, None], axis=1)[:, 0]
    return Sampled(token, picked, top_ids, top_logprobs)


def _draw(logits: Array, sampling: Sampling, position: Array) -> Array:
    scaled = (logits - jnp.max(logits)) / jnp.where(
        sampling.temperature > 0, sampling.temperature, 1
    )
    key = jax.random.fold_in(jax.random.key(sampling.seed), position)
    return jax.random.categorical(key, jnp.where(_kept(scaled, sampling), scaled, -jnp.inf))


def _kept(scaled: Array, sampling: Sampling) -> Array:
    """The ids that top-k, then top-p leave; the id that crosses top_p stays, and the best id always
    does.
    """
    order = jnp.argsort(-scaled, stable=True)
    rank = jnp.arange(scaled.shape[0])
    within_k = (sampling.top_k <= 0) | (rank < sampling.top_k)
    p = jax.nn.softmax(jnp.where(within_k, scaled[order], -jnp.inf))
    within_p = (jnp.cumsum(p) - p < sampling.top_p) | (rank == 0) | (sampling.top_p >= 1)
    within_min = scaled[order] >= scaled[order[0]] + jnp.log(sampling.min_p)
    return jnp.zeros(scaled.shape, bool).at[order].set(within_k & within_p & within_min)
