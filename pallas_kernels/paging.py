"""Pages of global rows: entry j of a request is row j % E of page table[j // E], E entries a
page.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quant.storage import StoredRows


def entries_per_page(pool: StoredRows) -> int:
    return jax.tree.leaves(pool)[0].shape[1]


def take_entries(pool: StoredRows, page_table: Array, entries: Array) -> StoredRows:
    """Rows of entries int32 [B, ...] through page_table int32 [B, P]; entries must lie in [0, P *
    E).
    """
    size = entries_per_page(pool)
    table_index = entries // size
    pages = jnp.take_along_axis(page_table, table_index.reshape(table_index.shape[0], -1), axis=1)
    pages = jnp.maximum(pages.reshape(entries.shape), 0)
    return pool.take(pages, entries % size)


def put_entries(
    pool: StoredRows, page_table: Array, entries: Array, rows: StoredRows, write: Array
) -> StoredRows:
    """Rows stored at entries int32 [B, G] where ``write`` [B, G]; a page of -1 or beyond the pool
    stores nothing.
    """
    size = entries_per_page(pool)
    pages = jnp.take_along_axis(
        page_table, jnp.clip(entries // size, 0, page_table.shape[1] - 1), axis=1
    )
    pool_pages = jax.tree.leaves(pool)[0].shape[0]
    keep = write & (pages >= 0) & (entries >= 0) & (entries < page_table.shape[1] * size)
    return pool.put(rows, jnp.where(keep, pages, pool_pages), entries % size)
