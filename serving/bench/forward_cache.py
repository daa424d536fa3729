"""A cache in which every position that a measured step may see holds something.

Rows are drawn from a bank of random rows that the cache's own formats encoded, so selections,
gathers and softmax see what they see in earnest; tags say that the positions before each request's
next one were written.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Cache, Handoff, Pool, Ring, new_cache
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from pallas_kernels.quant.storage import StoredRows, row_types
from serving.bench.forward_programs import SharedPrograms
from sharding.place import BY_RANK, REPLICATED
from sharding.random_weights import hashed

BANK = 16384


def filled_cache(programs: SharedPrograms) -> Any:
    """The compiled function int32 [slots] -> Cache: of the tokens that each slot's request has
    behind it, on every data rank.
    """
    placement = programs.placement

    def fill(lengths: Array) -> Cache:
        return _filled(programs, lengths)

    if placement is None:
        return jit(fill)
    return jit(placement.over_ranks(fill, REPLICATED, BY_RANK))


def _filled(programs: SharedPrograms, lengths: Array) -> Cache:
    cfg, numerics, shape = programs.cfg, programs.ops.numerics, programs.shape
    drafts = programs.speculation is not None
    cache = new_cache(cfg, numerics, shape, drafts=drafts)
    types = row_types(numerics)
    latents, keys = _bank(types.latent, cfg.head_dim, 1), _bank(types.key, cfg.index_head_dim, 2)
    rows = _bank(types.window, cfg.head_dim, 3)

    def window(ring: Ring, seed: int) -> Ring:
        return Ring(_drawn(ring.rows, rows, seed), _tags(ring, lengths))

    pools = {
        layer: Pool(
            _drawn(pool.latents, latents, 10 + layer), _drawn(pool.keys, keys, 1010 + layer)
        )
        for layer, pool in cache.pools.items()
    }
    ids = hashed(jnp.uint32(4), cache.history.shape) % cfg.vocab_size
    return replace(
        cache,
        pools=pools,
        windows=tuple(window(ring, 2010 + i) for i, ring in enumerate(cache.windows)),
        drafts=tuple(window(ring, 3010 + i) for i, ring in enumerate(cache.drafts)),
        pairs={k: Ring(noise(r.rows, k), _tags(r, lengths)) for k, r in cache.pairs.items()},
        history=ids.astype(jnp.int32),
        last_token=ids[:, 0].astype(jnp.int32),
        carry=_carry(cfg, cache.carry, lengths),
        position=lengths if drafts else None,
    )


def _bank(kind: type[StoredRows], width: int, seed: int) -> StoredRows:
    return kind.encode(noise(jnp.zeros((BANK, width)), seed))


def _drawn(rows: Any, bank: StoredRows, seed: int) -> Any:
    """Rows like ``rows``, each some row of the bank."""
    lead = jax.tree.leaves(rows)[0].shape[:2]
    index = hashed(jnp.uint32(seed), lead) % BANK
    return jax.tree.map(lambda plane: plane[index], bank)


def noise(planes: Any, seed: int) -> Any:
    """Numbers of mean 0 and deviation 1 in the place of arrays."""

    def draw(plane: Array) -> Array:
        unit = hashed(jnp.uint32(seed), plane.shape).astype(jnp.float32) * 2.0**-31 - 1
        return (3**0.5 * unit).astype(plane.dtype)

    return jax.tree.map(draw, planes)


def _tags(ring: Ring, lengths: Array) -> Array:
    """The newest position below the length that lies on each place of a ring, or -1."""
    size = ring.tags.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)
    newest = lengths[:, None] - 1 - (lengths[:, None] - 1 - place) % size
    return jnp.where((newest >= 0) & (lengths[:, None] > 0), newest, -1)


def _carry(cfg: Config, carry: Ring, lengths: Array) -> Ring:
    """Hand-off of the last rows of a prompt."""
    tags = _tags(carry, lengths)
    h, pre = noise((carry.rows.h, carry.rows.pre), 5)
    blocks = -(-(tags + 1) // cfg.candidate_block_size)
    handoff = Handoff(
        h,
        jax.nn.sigmoid(pre),
        spread(tags + 1, cfg.index_topk),
        spread(blocks, cfg.candidate_topk_blocks),
    )
    return Ring(handoff, tags)


def spread(visible: Array, count: int) -> Array:
    """int32 [..., count]: ascending numbers below int32 [...] ``visible``, evenly spread; all of
    them, then -1, if there are fewer.
    """
    place, visible = jnp.arange(count, dtype=jnp.int32), visible[..., None]
    even = (place * (visible / count)).astype(jnp.int32)
    return jnp.where(visible >= count, even, jnp.where(place < visible, place, -1))
