"""Collectives between the ranks of named mesh axes, for use inside ``shard_map``.

Every one of them is the identity for no axes, so that a layout without an axis pays nothing.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.all_reduce.exchange import MAX_ROWS
from sharding.peer import Axes, calls_over, traced_calls


def rank_of(axes: Axes) -> Array | int:
    """Number int32 [] of this rank within its group along the axes, the first axis outermost."""
    return jax.lax.axis_index(axes) if axes else 0


def all_reduce(x: Array, axes: Axes, dtype: jnp.dtype | None = None) -> Array:
    """The implementation ``psum``: the sum over ranks, taken in float32 and rounded once to the
    dtype, by default that of x; the same bits on every rank.
    """
    summed = jax.lax.psum(x.astype(jnp.float32), axes) if axes else x
    return summed.astype(dtype or x.dtype)


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


def peer_gather(x: Array, axes: Axes, *, axis: int) -> Array:
    """``gather``, by stores to the memory of the other GPUs in a program that is traced inside
    ``PeerMemory.calls`` of these axes.
    """
    calls = calls_over(axes)
    if calls is None:
        return gather(x, axes, axis=axis)
    axis %= x.ndim
    lead, trail = x.shape[:axis], x.shape[axis + 1 :]
    parts = calls.gather(x.reshape(prod(lead), -1), axes)
    return parts.reshape(*lead, -1, *trail)


def peer_union(x: Array, axes: Axes) -> Array | None:
    """The sum over ranks of x [..., N], zeros on all of them but at most one in every place, by
    stores as ``peer_gather``; None in a program without peer memory of these axes. -0.0 may come
    out as 0.0.
    """
    calls = calls_over(axes)
    if calls is None:
        return None
    if calls.sums(x):
        return calls.all_reduce(x, axes)
    return calls.gather(x.reshape(-1, x.shape[-1]), axes, union=True).reshape(x.shape)


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
    """A pytree with the values of the group's first rank, bit for bit, on every rank, in one
    exchange; leaves are of 4 bytes or bool.
    """
    leaves, tree = jax.tree.flatten(values)
    if not axes or not leaves:
        return values
    bits = jnp.concatenate([_bits(leaf).ravel() for leaf in leaves])
    return _divided(_from_first(bits, axes), leaves, tree)


def peer_from_first(values: Any, axes: Axes) -> Any:
    """``from_first``, by stores as ``peer_gather``."""
    leaves, tree = jax.tree.flatten(values)
    calls = calls_over(axes)
    if calls is None or not leaves:
        return from_first(values, axes)
    bits = jnp.concatenate([_bits(leaf).ravel() for leaf in leaves])
    return _divided(calls.gather(bits[None], axes)[0, : bits.size], leaves, tree)


def _from_first(bits: Array, axes: Axes) -> Array:
    return jax.lax.psum(jnp.where(rank_of(axes) == 0, bits, 0), axes)


def _divided(bits: Array, leaves: list[Array], tree: Any) -> Any:
    """The tree of arrays like the leaves, from the bits of all of them."""
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = zip(leaves, jnp.split(bits, ends), strict=True)
    return tree.unflatten(_from_bits(part.reshape(leaf.shape), leaf.dtype) for leaf, part in parts)


def _bits(leaf: Array) -> Array:
    widened = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
    return jax.lax.bitcast_convert_type(widened, jnp.int32)


def _from_bits(bits: Array, dtype: jnp.dtype) -> Array:
    return bits.astype(bool) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(bits, dtype)


def anywhere(flag: Array, axes: Axes) -> Array:
    """Whether bool [] is true on any rank."""
    return jax.lax.psum(flag.astype(jnp.int32), axes) > 0 if axes else flag
