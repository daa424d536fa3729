"""Reference of ``moe_experts``: every expert on every row, in ascending order, as the official loop
adds them.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.linear.ref import linear
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import Numerics

F32 = jnp.float32


def expert(
    x: Array, w: ExpertWeights, routing: Array | None, *, limit: float, numerics: Numerics
) -> Array:
    gate = linear(x, w.w1, numerics=numerics).astype(F32)
    up = linear(x, w.w3, numerics=numerics).astype(F32)
    t = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    if routing is not None:
        t = routing[:, None] * t
    return linear(t.astype(numerics.dtype), w.w2, numerics=numerics)


def moe_experts(
    x: Array,
    ids: Array,
    weights: Array,
    experts: ExpertWeights,
    shared: ExpertWeights,
    *,
    limit: float,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    def add(total: Array, item: tuple[Array, ExpertWeights]) -> tuple[Array, None]:
        e, w = item
        chosen = ids == e
        routing = jnp.sum(jnp.where(chosen, weights, 0), axis=-1)
        y = expert(x, w, routing, limit=limit, numerics=numerics).astype(F32)
        return total + jnp.where(jnp.any(chosen, axis=-1)[:, None], y, 0), None

    count = experts.w1.shape[0]
    total, _ = jax.lax.scan(add, jnp.zeros(x.shape, F32), (jnp.arange(count), experts))
    shared_y = expert(x, shared, None, limit=limit, numerics=numerics).astype(F32)
    return (total + shared_y).astype(out_dtype or numerics.dtype)
