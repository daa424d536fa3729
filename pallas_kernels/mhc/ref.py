"""Reference of the hyper-connection ops."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.norm import rms_norm

F32 = jnp.float32


def coefficients(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    v = h.reshape(*h.shape[:-2], h.shape[-2] * h.shape[-1]).astype(F32)
    r = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + norm_eps)
    mixes = jnp.einsum("...k,nk->...n", v, fn.astype(F32), precision="highest") * r
    return split_mixes(mixes, base, scale, streams=h.shape[-2], iters=iters, eps=eps)


def split_mixes(
    mixes: Array, base: Array, scale: Array, *, streams: int, iters: int, eps: float
) -> tuple[Array, Array, Array]:
    s = streams
    pre = jax.nn.sigmoid(mixes[..., :s] * scale[0] + base[:s]) + eps
    post = 2 * jax.nn.sigmoid(mixes[..., s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = mixes[..., 2 * s :] * scale[2] + base[2 * s :]
    return pre, post, sinkhorn(comb.reshape(*comb.shape[:-1], s, s), iters=iters, eps=eps)


def sinkhorn(comb: Array, *, iters: int, eps: float) -> Array:
    def columns(comb: Array) -> Array:
        return comb / (_sum(comb, -2) + eps)

    def once(_: int, comb: Array) -> Array:
        return columns(comb / (_sum(comb, -1) + eps))

    comb = columns(jax.nn.softmax(comb, axis=-1) + eps)
    # Unrolled, twenty iterations at every site would be half of a program's instructions.
    return jax.lax.fori_loop(0, iters - 1, once, comb)


def _sum(x: Array, axis: int) -> Array:
    """In one order, whatever the compiler makes of a reduction; the axis is kept."""
    first, *rest = jnp.split(x, x.shape[axis], axis)
    for part in rest:
        first = first + part
    return first


def collapse(h: Array, pre: Array) -> Array:
    return jnp.sum(pre[..., None] * h.astype(F32), axis=-2).astype(h.dtype)


def expand(h: Array, y: Array, post: Array, comb: Array) -> Array:
    kept = jnp.einsum("...ij,...id->...jd", comb, h.astype(F32), precision="highest")
    return (post[..., None] * y.astype(F32)[..., None, :] + kept).astype(h.dtype)


def expand_collapse_norm(
    h: Array,
    y: Array,
    post: Array,
    comb: Array,
    pre: Array,
    weight: Array,
    *,
    norm_eps: float,
) -> tuple[Array, Array]:
    h = expand(h, y, post, comb)
    return h, rms_norm(collapse(h, pre), weight, norm_eps)
