"""Moving a preempted request's state between the device and the host, bit for bit."""

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
    """What a request holds: the private rows of slot int32 [] and its pages int32 [P] (-1 = none,
    any bytes).
    """
    state = jax.tree.map(lambda array: array[slot], private(cache))
    return state, jax.tree.map(lambda plane: plane[jnp.maximum(pages, 0)], cache.pools)


def put_state(cache: Cache, slot: Array, pages: Array, saved: Any) -> Cache:
    """The cache with a saved state in slot int32 [] and its pages int32 [P] (-1 = leave out)."""
    state, stored = saved
    mine = jax.tree.map(lambda array, row: array.at[slot].set(row), private(cache), state)

    def put(plane: Array, rows: Array) -> Array:
        index = jnp.where(pages < 0, plane.shape[0], pages)
        return plane.at[index].set(rows, mode="drop")

    return replace(cache, pools=jax.tree.map(put, cache.pools, stored), **mine)


def set_counts(cache: Cache, slot: Array, counts: Array) -> Cache:
    """The cache with the token counts int32 [V] of a new request in slot int32 []."""
    assert cache.counts is not None
    return replace(cache, counts=cache.counts.at[slot].set(counts))
