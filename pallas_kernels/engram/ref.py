"""Reference of the Engram lookup and gate."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.engram.staged import StagedRows, placed
from pallas_kernels.quant import Packed

F32 = jnp.float32


def engram_rows(table: Array | Packed | StagedRows, ids: Array, *, dtype: jnp.dtype) -> Array:
    table, ids = placed(table, ids)
    rows = jax.tree.map(lambda plane: plane[ids], table)
    values = rows.dequantize(dtype) if isinstance(rows, Packed) else rows.astype(dtype)
    return values.reshape(*ids.shape[:-1], ids.shape[-1] * values.shape[-1])


def engram_gate(
    h: Array, keys: Array, q_weight: Array, k_weight: Array, live: Array, *, eps: float
) -> Array:
    a, b = h.astype(F32), keys.astype(F32)
    weight = q_weight.astype(F32) * k_weight.astype(F32)
    norms = jax.lax.rsqrt(jnp.mean(a * a, -1) + eps) * jax.lax.rsqrt(jnp.mean(b * b, -1) + eps)
    dot = jnp.sum(a * weight * b, axis=-1) * norms * h.shape[-1] ** -0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6))
    return jnp.where(live[..., None], jax.nn.sigmoid(jnp.where(jnp.signbit(dot), -root, root)), 0)


def engram_add(h: Array, gate: Array, value: Array) -> Array:
    return (h.astype(F32) + gate[..., None] * value.astype(F32)[..., None, :]).astype(h.dtype)


def engram_gate_add(
    h: Array, kv: Array, q_weight: Array, k_weight: Array, live: Array, *, eps: float
) -> Array:
    streams, width = h.shape[-2:]
    keys = kv[..., : streams * width].reshape(h.shape)
    gate = engram_gate(h, keys, q_weight, k_weight, live, eps=eps)
    return engram_add(h, gate, kv[..., streams * width :])
