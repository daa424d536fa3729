"""Pages between the device and the host, each as one row of bytes in the order of the planes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.cache import Cache
from serving.kv_pool.values import HEADER_BYTES


def page_planes(pools: Any) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Path, dtype and shape of a page's part of every plane of a cache's pools, given as arrays or
    shapes.
    """
    return tuple(
        (jax.tree_util.keystr(path), str(leaf.dtype), tuple(leaf.shape[1:]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(pools)
    )


def page_bytes(pools: Any) -> int:
    """Bytes of a page in all planes of a cache's pools."""
    return sum(
        leaf.dtype.itemsize * int(np.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(pools)
    )


def idle_values(pools: Any, lead: tuple[int, ...]) -> np.ndarray:
    """Values for ``put_pages`` that are no pages, uint8 [*lead, HEADER_BYTES + bytes]."""
    return np.zeros((*lead, HEADER_BYTES + page_bytes(pools)), np.uint8)


def take_pages(cache: Cache, pages: Array) -> Array:
    """uint8 [B, P, bytes]: pages int32 [B, P], every plane of a page one after the other; -1 is
    none, any bytes.
    """
    pages = jnp.maximum(pages, 0)
    return jnp.concatenate(
        [as_row(plane[pages], pages.ndim) for plane in jax.tree.leaves(cache.pools)], axis=-1
    )


def put_pages(cache: Cache, pages: Array, values: Array) -> Cache:
    """The cache with values uint8 [B, P, HEADER_BYTES + bytes] in pages int32 [B, P]; -1 is left
    out.
    """
    leaves, treedef = jax.tree.flatten(cache.pools)
    offset, written = HEADER_BYTES, []
    for plane in leaves:
        size = plane.dtype.itemsize * int(np.prod(plane.shape[1:]))
        part = values[..., offset : offset + size]
        rows = from_row(part, plane.dtype).reshape(*pages.shape, *plane.shape[1:])
        index = jnp.where(pages < 0, plane.shape[0], pages)
        written.append(plane.at[index].set(rows, mode="drop"))
        offset += size
    return replace(cache, pools=jax.tree.unflatten(treedef, written))


def as_row(values: Array, lead: int) -> Array:
    """uint8 [..., bytes] of all that follows the first ``lead`` axes."""
    if values.dtype != jnp.uint8:
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return values.reshape(*values.shape[:lead], -1)


def from_row(data: Array, dtype: Any) -> Array:
    """[..., n] of a dtype from uint8 [..., bytes]."""
    if dtype == jnp.uint8:
        return data
    size = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, size), dtype)
