"""The private state that decoding needs, between a slot and one row of bytes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.cache import Cache, Ring
from serving.kv_pool.moves import as_row, from_row


def take_windows(cache: Cache, slot: Array, length: Array) -> Array:
    """uint8 [B, bytes]: what comes after prompts of ``length`` int32 [B] reads of the private rows
    of slot int32 [B], -1 for none: the last window of every layer, the open pairs, then the last
    windows of the draft stages. Positions before the prompt are zeros (ARCHITECTURE section 10).
    """
    slot = jnp.maximum(slot, 0)
    parts = [_taken(ring, count, slot, length) for ring, count in [*_rings(cache), *_drafts(cache)]]
    return jnp.concatenate(parts, axis=-1)


def put_windows(
    cache: Cache,
    slot: Array,
    length: Array,
    token: Array,
    history: Array,
    drafted: Array,
    values: Array,
) -> Cache:
    """The cache with values uint8 [B, bytes] of ``take_windows`` in slot int32 [B], -1 is left out;
    with the newest ``token`` int32 [B] and the ids before it, ``history`` int32 [B, n-1]. drafted
    bool [B]: whether the values hold windows of the draft stages; otherwise these are empty.
    """
    offset, here = 0, slot >= 0

    def put(ring: Ring, count: int, live: Array) -> Ring:
        nonlocal offset
        size = _row_bytes(ring, count)
        part, offset = values[:, offset : offset + size], offset + size
        return _put(ring, count, slot, length, live, part)

    windows = tuple(put(ring, _window(cache), here) for ring in cache.windows)
    pairs = {owner: put(cache.pairs[owner], 1, here) for owner in sorted(cache.pairs)}
    where = jnp.where(here, slot, cache.last_token.shape[0])
    empty = [Ring(r.rows, r.tags.at[where].set(-1, mode="drop")) for r in cache.drafts]
    drafts = tuple(put(ring, _window(cache), here & drafted) for ring in empty)
    cache = replace(cache, windows=windows, pairs=pairs, drafts=drafts)
    cache = replace(cache, history=cache.history.at[where].set(history, mode="drop"))
    if cache.position is not None:
        cache = replace(cache, position=cache.position.at[where].set(length, mode="drop"))
    return put_token(cache, slot, token)


def put_token(cache: Cache, slot: Array, token: Array) -> Cache:
    """The cache with the newest ``token`` int32 [B] of slot int32 [B], -1 is left out."""
    slot = jnp.where(slot < 0, cache.last_token.shape[0], slot)
    return replace(cache, last_token=cache.last_token.at[slot].set(token, mode="drop"))


def state_bytes(cache: Cache) -> tuple[int, int]:
    """Bytes of a row of ``take_windows``, and how many of them are the draft stages'; the cache may
    be given as shapes.
    """
    drafts = sum(_row_bytes(ring, count) for ring, count in _drafts(cache))
    return sum(_row_bytes(ring, count) for ring, count in _rings(cache)) + drafts, drafts


def _window(cache: Cache) -> int:
    return cache.carry.tags.shape[1]


def _rings(cache: Cache) -> Iterator[tuple[Ring, int]]:
    """Rings in the order of their bytes, and how many of the last positions of each travel."""
    for ring in cache.windows:
        yield ring, _window(cache)
    for owner in sorted(cache.pairs):
        yield cache.pairs[owner], 1


def _drafts(cache: Cache) -> Iterator[tuple[Ring, int]]:
    for ring in cache.drafts:
        yield ring, _window(cache)


def _row_bytes(ring: Ring, count: int) -> int:
    leaves: list[Any] = jax.tree.leaves(ring.rows)
    return sum(count * int(np.prod(leaf.shape[2:])) * leaf.dtype.itemsize for leaf in leaves)


def _taken(ring: Ring, count: int, slot: Array, length: Array) -> Array:
    rows, exists = ring.tail(slot, length, count)

    def plane(leaf: Array) -> Array:
        seen = exists.reshape(*exists.shape, *[1] * (leaf.ndim - 2))
        return as_row(jnp.where(seen, leaf, jnp.zeros_like(leaf)), 1)

    return jnp.concatenate([plane(leaf) for leaf in jax.tree.leaves(rows)], axis=-1)


def _put(ring: Ring, count: int, slot: Array, length: Array, live: Array, values: Array) -> Ring:
    """The ring with the rows in ``values`` at the last ``count`` positions before ``length``."""
    leaves, treedef = jax.tree.flatten(ring.rows)
    offset, rows = 0, []
    for leaf in leaves:
        size = count * leaf.dtype.itemsize * int(np.prod(leaf.shape[2:]))
        data = from_row(values[:, offset : offset + size], leaf.dtype)
        rows.append(data.reshape(len(values), count, *leaf.shape[2:]))
        offset += size
    position = length[:, None] + jnp.arange(-count, 0, dtype=jnp.int32)
    return ring.write(
        jax.tree.unflatten(treedef, rows), slot, position, live[:, None] & (position >= 0)
    )
