"""Reference of the compressor's pooling and of compress-and-store."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Pairs, Window
from pallas_kernels.norm import rms_norm
from pallas_kernels.paging import put_entries
from pallas_kernels.quant.storage import StoredRows
from pallas_kernels.rotate import rotate


def pool_pairs(u: Array, g: Array) -> Array:
    return jnp.sum(jax.nn.softmax(g, axis=-2) * u, axis=-2)


def closing_rows(start: Array, places: int, ratio: int) -> Array:
    """Row numbers int32 [B, G] at which groups close; at ratio 2 the last may be ``places``."""
    count = (places + ratio - 1) // ratio
    first = (ratio - 1) * (1 - start % 2)
    return first[:, None] + ratio * jnp.arange(count, dtype=jnp.int32)


def _pooled(pairs: Pairs, closing: Array) -> Array:
    index = jnp.minimum(closing, pairs.u.shape[1] - 1)[..., None]

    def pair(values: Array, before: Array) -> Array:
        # Row t of the chunk is row t + 1 here.
        rows = jnp.concatenate([before[:, None], values], axis=1)
        return jnp.stack([jnp.take_along_axis(rows, index + i, axis=1) for i in (0, 1)], axis=-2)

    return pool_pairs(pair(pairs.u, pairs.before_u), pair(pairs.g, pairs.before_g))


def _entries(chunk: Chunk, paged: Paged, places: int, ratio: int) -> tuple[Array, Array]:
    closing = closing_rows(chunk.start, places, ratio)
    position = chunk.start[:, None] + closing
    write = (closing < chunk.length[:, None]) & (position >= paged.write_from[:, None])
    return position // ratio, write


def store_latents(
    chunk: Chunk, paged: Paged, job: Latents, *, eps: float
) -> tuple[Array, StoredRows]:
    source = job.source
    if isinstance(source, Pairs):
        places = source.u.shape[1]
        x = _pooled(source, closing_rows(chunk.start, places, 2)).astype(job.weight.dtype)
    else:
        x, places = source.x, source.x.shape[1]
    latent = rms_norm(x, job.weight, eps)
    rows = job.pool.encode(rotate(latent, job.cos, job.sin))
    entry, write = _entries(chunk, paged, places, source.ratio)
    return latent, put_entries(job.pool, paged.page_table, entry, rows, write)


def store_keys(chunk: Chunk, paged: Paged, job: Keys, *, eps: float) -> StoredRows:
    rows = job.pool.encode(rotate(rms_norm(job.x, job.weight, eps), job.cos, job.sin))
    entry, write = _entries(chunk, paged, job.places, job.ratio)
    return put_entries(job.pool, paged.page_table, entry, rows, write)


def store_window(chunk: Chunk, job: Window, *, eps: float) -> tuple[StoredRows, StoredRows, Array]:
    rows = job.ring.encode(rotate(rms_norm(job.x, job.weight, eps), job.cos, job.sin))
    slots, size = job.tags.shape
    at = jnp.arange(job.x.shape[1], dtype=jnp.int32)
    position = chunk.start[:, None] + at
    keep = (at < chunk.length[:, None]) & (at >= chunk.length[:, None] - size)
    owned = (job.slot >= 0) & (job.slot < slots)
    index = jnp.where(keep & owned[:, None], job.slot[:, None], slots), position % size
    ring = job.ring.put(rows, *index)
    return rows, ring, job.tags.at[index].set(position, mode="drop")


def store_rows(
    chunk: Chunk, *, window: Window, paged: Paged | None = None, keys: Keys | None = None,
    eps: float,
) -> tuple[StoredRows | None, StoredRows, Array, StoredRows | None]:  # fmt: skip
    pool = None
    if keys is not None:
        assert paged is not None
        pool = store_keys(chunk, paged, keys, eps=eps)
    rows, ring, tags = store_window(chunk, window, eps=eps)
    return rows if window.emit else None, ring, tags, pool
