"""Collectives between the ranks of named mesh axes, for use inside ``shard_map``.

Every one of them is the identity for no axes, so that a layout without an axis pays nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.all_reduce.exchange import MAX_ROWS
from sharding.peer import Axes, traced_calls


def rank_of(axes: Axes) -> Array | int:
    """Number int32 [] of this rank within its group along the axes, the first axis outermost."""
    return jax.lax.axis_index(axes) if axes else 0


def all_reduce(x: Array, axes: Axes) -> Array:
    """The implementation ``psum``: the sum over ranks, taken in float32 and rounded once to the
    dtype of x; the same bits on every rank.
    """
    return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x


def peer_all_reduce(x: Array, axes: Axes) -> Array:
    """The implementation ``peer``: stores to the memory of the other GPUs for up to 64 rows of
    bf16, in a program that is traced inside ``PeerMemory.calls``; ``psum`` above.
    """
    if not axes or x.size > MAX_ROWS * x.shape[-1]:
        return all_reduce(x, axes)
    return traced_calls().all_reduce(x, axes)


# Implementations of the sum that follows attention and experts in every layer.
ALL_REDUCES: dict[str, Callable[[Array, Axes], Array]] = {
    "psum": all_reduce,
    "peer": peer_all_reduce,
}


def gather(x: Array, axes: Axes, *, axis: int) -> Array:
    """The parts of all ranks side by side along an axis of the array."""
    if not axes:
        return x
    return jax.lax.all_gather(x, axes, axis=axis % x.ndim, tiled=True)


def reduce_scatter(x: Array, axes: Axes) -> Array:
    """This rank's part, along the first array axis, of the sum over ranks (integers exactly, floats
    in float32).
    """
    if not axes:
        return x
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    summed = x.astype(jnp.float32) if floating else x
    return jax.lax.psum_scatter(summed, axes, scatter_dimension=0, tiled=True).astype(x.dtype)


def from_first(values: Any, axes: Axes) -> Any:
    """A pytree with the values of the group's first rank, bit for bit but for the sign of zero, on
    every rank.
    """
    if not axes:
        return values
    first = rank_of(axes) == 0

    def take(leaf: Array) -> Array:
        sent = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
        return jax.lax.psum(jnp.where(first, sent, 0), axes).astype(leaf.dtype)

    return jax.tree.map(take, values)


def anywhere(flag: Array, axes: Axes) -> Array:
    """Whether bool [] is true on any rank."""
    return jax.lax.psum(flag.astype(jnp.int32), axes) > 0 if axes else flag
