"""Moving preempted requests' state between the device and the host, bit for bit."""

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Cache


def private(cache: Cache) -> dict[str, Any]:
    """Everything in a cache that belongs to slots, on first axes [slots, ...]."""
    return {f.name: getattr(cache, f.name) for f in fields(cache) if f.name != "pools"}


def take_state(cache: Cache, slot: Array, pages: Array) -> Any:
    """What B requests hold: the private rows of slot int32 [B] and their pages int32 [B, P]; -1 is
    none, any bytes.
    """
    slot, pages = jnp.maximum(slot, 0), jnp.maximum(pages, 0)
    state = jax.tree.map(lambda array: array[slot], private(cache))
    return state, jax.tree.map(lambda plane: plane[pages], cache.pools)


def put_state(cache: Cache, slot: Array, pages: Array, saved: Any) -> Cache:
    """The cache with saved states in slot int32 [B] and their pages int32 [B, P]; -1 is left
    out.
    """

    def put(plane: Array, rows: Array, index: Array) -> Array:
        return plane.at[jnp.where(index < 0, plane.shape[0], index)].set(rows, mode="drop")

    state, stored = saved
    mine = jax.tree.map(lambda plane, rows: put(plane, rows, slot), private(cache), state)
    pools = jax.tree.map(lambda plane, rows: put(plane, rows, pages), cache.pools, stored)
    return replace(cache, pools=pools, **mine)


def set_counts(cache: Cache, slot: Array, counts: Array) -> Cache:
    """The cache with the token counts int32 [B, V] of new requests in slot int32 [B], -1 for
    none.
    """
    assert cache.counts is not None
    slot = jnp.where(slot < 0, cache.counts.shape[0], slot)
    return replace(cache, counts=cache.counts.at[slot].set(counts, mode="drop"))
