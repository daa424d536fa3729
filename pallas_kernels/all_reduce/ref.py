"""The sum over ranks, by a gather: what the peer-to-peer kernels have to equal bit for bit."""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.all_reduce.exchange import SENTINEL, Exchange, Gather
from pallas_kernels.mhc import ref as mhc


def sum_of(parts: Array) -> Array:
    """[N, ...] of the ranks -> [...]: in float32 in the order of the ranks, rounded once to the
    dtype of the parts; a sum of zero is +0.0.
    """
    total = reduce(jnp.add, parts.astype(jnp.float32))
    return jnp.where(total == 0, 0, total).astype(parts.dtype)


def all_reduce(x: Array, axes: tuple[str, ...]) -> Array:
    """Inside ``shard_map``: the sum of x [R, D] over the ranks of the axes."""
    return sum_of(jax.lax.all_gather(x, axes))


def sent(x: Array) -> Array:
    """x [R, N] of whole words as words uint32 [R, N'], as they arrive."""
    lanes = x.reshape(len(x), -1, 4 // x.dtype.itemsize)
    words = jax.lax.bitcast_convert_type(lanes, jnp.uint32)
    words = words.reshape(len(x), -1)
    return jnp.where(words == jnp.uint32(SENTINEL), 0, words)


def gather(x: Array, axes: tuple[str, ...], *, exchange: Exchange, union: bool) -> Array:
    """Inside ``shard_map``: x [R, N] of all ranks side by side, or the union of their bits."""
    Gather(exchange, len(x), x.shape[1] * x.dtype.itemsize, union)
    words = jax.lax.all_gather(sent(x), axes, axis=1)  # [R, ranks, N']
    if union:
        words = reduce(jnp.bitwise_or, jnp.moveaxis(words, 1, 0))
    return jax.lax.bitcast_convert_type(words, x.dtype).reshape(len(x), -1)


def all_reduce_norm(
    h: Array,
    y: Array,
    post: Array,
    comb: Array,
    pre: Array,
    weight: Array,
    axes: tuple[str, ...],
    *,
    norm_eps: float,
) -> tuple[Array, Array]:
    """``mhc.ref.expand_collapse_norm`` of the sum of y."""
    total = all_reduce(y, axes)
    return mhc.expand_collapse_norm(h, total, post, comb, pre, weight, norm_eps=norm_eps)
