"""Reference of ``index_scores``."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import Numerics
from pallas_kernels.paging import entries_per_page, take_entries
from pallas_kernels.quant.storage import StoredRows

F32 = jnp.float32


def scores_of_keys(q: Array, weights: Array, keys: Array, *, numerics: Numerics) -> Array:
    """q [B, T, H, K], weights [B, T, H], keys [B, N, K] -> float32 [B, T, N], rounded as
    ``numerics.dtype`` rounds.
    """

    def rounded(x: Array) -> Array:
        return x.astype(numerics.dtype).astype(F32)

    dots = rounded(
        jnp.einsum("bthk,bnk->bthn", q.astype(F32), keys.astype(F32), precision="highest")
    )
    return rounded(jnp.sum(rounded(jax.nn.relu(dots) * weights.astype(F32)[..., None]), axis=2))


def candidate_mask(candidates: Array, blocks: int, block_size: int) -> Array:
    """bool [B, T, blocks * block_size] of the positions in the candidate block ids int32 [B, T, C]
    (-1 = none).
    """
    lead = jnp.ogrid[tuple(slice(n) for n in candidates.shape[:-1])]
    index = (*(axis[..., None] for axis in lead), jnp.where(candidates < 0, blocks, candidates))
    mask = jnp.zeros((*candidates.shape[:-1], blocks), bool).at[index].set(True, mode="drop")
    return jnp.repeat(mask, block_size, axis=-1)


def index_scores(
    q: Array,
    weights: Array,
    pool: StoredRows,
    page_table: Array,
    visible: Array,
    candidates: Array | None,
    *,
    block_size: int,
    numerics: Numerics,
) -> Array:
    entries = page_table.shape[1] * entries_per_page(pool)
    every = jnp.broadcast_to(jnp.arange(entries), (q.shape[0], entries))
    keys = take_entries(pool, page_table, every).decode(numerics.dtype)
    keys = jnp.where(every[..., None] < jnp.max(visible, axis=1)[:, None, None], keys, 0)
    scores = scores_of_keys(q, weights, keys, numerics=numerics)
    seen = jnp.arange(entries) < visible[..., None]
    if candidates is not None:
        blocks = -(-entries // block_size)
        seen &= candidate_mask(candidates, blocks, block_size)[..., :entries]
    return jnp.where(seen, scores, -jnp.inf)


def candidate_scores(
    q: Array,
    weights: Array,
    pool: StoredRows,
    page_table: Array,
    visible: Array,
    candidates: Array,
    *,
    block_size: int,
    numerics: Numerics,
) -> Array:
    scores = index_scores(
        q, weights, pool, page_table, visible, None, block_size=block_size, numerics=numerics
    )
    entries = candidates[..., None] * block_size + jnp.arange(block_size)
    entries = jnp.where(candidates[..., None] < 0, scores.shape[-1], entries)
    entries = entries.reshape(*visible.shape, -1)
    taken = jnp.take_along_axis(scores, jnp.minimum(entries, scores.shape[-1] - 1), axis=-1)
    return jnp.where(entries < scores.shape[-1], taken, -jnp.inf)
