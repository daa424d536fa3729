"""Reference of ``sparse_attention`` and of the list attention under it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import Numerics
from pallas_kernels.paging import take_entries
from pallas_kernels.quant.storage import StoredRows
from pallas_kernels.rotate import rotate

F32 = jnp.float32
FLOOR = -1e30
BLOCK = 64


def list_attention(q: Array, kv: Array, valid: Array, sink: Array, *, numerics: Numerics) -> Array:
    kv = jnp.where(valid[..., None], kv.astype(F32), 0)
    scores = (
        jnp.einsum("bthk,btlk->bthl", q.astype(F32), kv, precision="highest") * q.shape[-1] ** -0.5
    )
    scores = jnp.where(valid[:, :, None], scores, -jnp.inf)
    softmax = _blockwise if numerics.blockwise_softmax else _one_pass
    return softmax(scores, kv, sink).astype(numerics.dtype)


def _one_pass(scores: Array, kv: Array, sink: Array) -> Array:
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), sink))
    p = jnp.exp(scores - top[..., None])
    total = jnp.sum(p, axis=-1) + jnp.exp(sink - top)
    return jnp.einsum("bthl,btlk->bthk", p, kv, precision="highest") / total[..., None]


def _blockwise(scores: Array, kv: Array, sink: Array) -> Array:
    length = scores.shape[-1]
    top = jnp.full(scores.shape[:-1], FLOOR, F32)
    total = jnp.zeros(scores.shape[:-1], F32)
    acc = jnp.zeros((*scores.shape[:-1], kv.shape[-1]), F32)
    for first in range(0, length, BLOCK):
        s = scores[..., first : first + BLOCK]
        v = kv[..., first : first + BLOCK, :]
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        decay = jnp.exp(top - new_top)
        p = jnp.exp(s - new_top[..., None])
        total = total * decay + jnp.sum(p, axis=-1)
        rounded = p.astype(jnp.bfloat16).astype(F32)
        acc = acc * decay[..., None] + jnp.einsum(
            "bthl,btlk->bthk", rounded, v, precision="highest"
        )
        top = new_top
    return acc / (total + jnp.exp(sink - top))[..., None]


def sparse_attention(
    q: Array,
    cos: Array,
    sin: Array,
    window: StoredRows,
    written: Array,
    position: Array,
    floor: Array,
    pool: StoredRows | None,
    page_table: Array,
    selected: Array | None,
    sink: Array,
    *,
    window_size: int,
    numerics: Numerics,
) -> Array:
    q = rotate(q, cos[:, :, None], sin[:, :, None])
    rows = q.shape[1]
    first = position[:, :1] - (window_size - 1)
    low = jnp.maximum(position - (window_size - 1), floor[:, None])
    column = jnp.arange(window_size) + low[..., None]
    index = jnp.clip(column - first[..., None], 0, window_size + rows - 2)
    batch = jnp.arange(q.shape[0])[:, None, None]
    kv = [window.take(batch, index).decode(numerics.dtype)]
    valid = [(column <= position[..., None]) & written[batch, index]]
    if pool is not None and selected is not None:
        kv.append(take_entries(pool, page_table, jnp.maximum(selected, 0)).decode(numerics.dtype))
        valid.append(selected >= 0)
    lists = jnp.concatenate(kv, axis=2), jnp.concatenate(valid, axis=2)
    out = list_attention(q, *lists, sink, numerics=numerics)
    return rotate(out, cos[:, :, None], sin[:, :, None], inverse=True)


def ring_attention(
    q: Array,
    cos: Array,
    sin: Array,
    ring: StoredRows,
    tags: Array,
    slot: Array,
    position: Array,
    floor: Array,
    pool: StoredRows | None,
    page_table: Array,
    selected: Array | None,
    sink: Array,
    *,
    window_size: int,
    numerics: Numerics,
    ahead: Sequence[Array] = (),
) -> Array:
    slots, size = tags.shape
    at = position[:, :1] + jnp.arange(1 - window_size, position.shape[1])
    index = jnp.clip(slot, 0, slots - 1)[:, None], at % size
    owned = (slot >= 0) & (slot < slots)
    written = (tags[index] == at) & (at >= 0) & owned[:, None]
    window = ring.take(*index)
    return sparse_attention(
        q, cos, sin, window, written, position, floor, pool, page_table, selected, sink,
        window_size=window_size, numerics=numerics,
    )  # fmt: skip
