"""The sum over ranks, by a gather: what the peer-to-peer kernels have to equal bit for bit."""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array

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
