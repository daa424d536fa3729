"""Reference of ``index_topk`` and ``top_blocks``."""

import jax
import jax.numpy as jnp
from jax import Array

NONE = jnp.iinfo(jnp.int32).max


def _top_ids(scores: Array, k: int) -> Array:
    # lax.top_k orders -0.0 below 0.0; they are equal scores here.
    return jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), min(k, scores.shape[-1]))[1]


def _ascending(ids: Array, keep: Array, k: int) -> Array:
    ids = jnp.sort(jnp.where(keep, ids, NONE), axis=-1)
    ids = jnp.where(ids == NONE, -1, ids)
    lead = [(0, 0)] * (ids.ndim - 1)
    return jnp.pad(ids, [*lead, (0, k - ids.shape[-1])], constant_values=-1)


def index_topk(scores: Array, visible: Array, *, k: int) -> Array:
    ids = _top_ids(scores, k)
    return _ascending(ids, ids < visible[..., None], k)


def block_scores(scores: Array, visible: Array, *, block_size: int) -> Array:
    blocks = -(-scores.shape[-1] // block_size)
    lead = [(0, 0)] * (scores.ndim - 1)
    padded = jnp.pad(
        scores, [*lead, (0, blocks * block_size - scores.shape[-1])], constant_values=-jnp.inf
    )
    best = jnp.max(padded.reshape(*scores.shape[:-1], blocks, block_size), axis=-1)
    newest = jnp.where(visible > 0, (visible - 1) // block_size, -1)
    return jnp.where(jnp.arange(blocks) == newest[..., None], jnp.inf, best)


def top_blocks(scores: Array, visible: Array, *, block_size: int, k: int) -> Array:
    best = block_scores(scores, visible, block_size=block_size)
    ids = _top_ids(best, k)
    return _ascending(ids, jnp.take_along_axis(best, ids, axis=-1) > -jnp.inf, k)
