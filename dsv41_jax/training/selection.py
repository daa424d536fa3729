"""The best of every row as a mask, for whole sequences: no sort, ties to the lowest index."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index_topk.ref import block_scores


def top_mask(scores: Array, k: int) -> Array:
    """bool [..., N]: the k largest scores [..., N] of each row, the lowest index first among equal
    ones; all of them if N <= k.
    """
    if scores.shape[-1] <= k:
        return jnp.ones(scores.shape, bool)
    order = _ordered(scores)

    def raised(i: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        enough = jnp.sum(order >= higher, axis=-1, keepdims=True) >= k
        return jnp.where(enough, higher, threshold)

    start = jnp.zeros((*scores.shape[:-1], 1), jnp.uint32)
    threshold = jax.lax.fori_loop(0, 32, raised, start)
    above, equal = order > threshold, order == threshold
    room = k - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))


def _ordered(scores: Array) -> Array:
    """uint32 that sort as float32 scores do; -0.0 equals 0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    negative = (bits >> 31) == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def candidate_mask(scores: Array, visible: Array, *, block_size: int, k: int) -> Array:
    """bool [B, T, N]: entries in the best k blocks of scores [B, T, N], -inf where nothing is seen
    (ARCHITECTURE 6.7).
    """
    best = block_scores(scores, visible, block_size=block_size)
    kept = top_mask(best, k) & (best > -jnp.inf)
    return jnp.repeat(kept, block_size, axis=-1)[..., : scores.shape[-1]]
