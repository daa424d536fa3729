"""Carries pages between the pool's buffers and the device."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from dsv41_jax.cache import Cache
from serving.buckets import Bucket
from serving.kv_pool.options import smallest_batch
from serving.kv_pool.remote import Block, Complete, Load
from serving.programs import Programs
from sharding.place import rank_part

Taken = Iterable[tuple[list[Complete], Any]]


class PageMover:
    """Dispatches ``put_pages`` and ``take_pages``, in batches of few sizes; waits for nothing."""

    def __init__(self, programs: Programs, batches: tuple[int, ...]):
        self._programs, self._batches = programs, batches

    def load(self, cache: Cache, loads: Items[Load]) -> Cache:
        """The cache with loaded pages in the pages of their sequences."""
        for load in loads:
            for block in load.blocks:
                pages = self._destinations(load, block)
                if (pages >= 0).any():
                    rank = load.data_rank
                    values = self._programs.on_rank(block.rows[None], rank)
                    bucket = Bucket(1, 1, len(block.rows))
                    table = self._on(rank, pages)
                    cache = self._programs("put_pages", bucket, cache, table, values)
        return cache

    def take(self, cache: Cache, items: Items[Complete]) -> Taken:
        """Pages of data ranks as rows [1, n, page bytes] on their way to the host, those of a rank
        at a time, in order.
        """
        most = max(self._batches)
        for rank in sorted({item.data_rank for item in items}):
            mine = [item for item in items if item.data_rank == rank]
            for first in range(0, len(mine), most):
                batch = mine[first : first + most]
                pages = np.full(smallest_batch(self._batches, len(batch)), -1, np.int32)
                pages[: len(batch)] = [item.page for item in batch]
                bucket = Bucket(1, 1, len(pages))
                taken = self._programs("take_pages", bucket, cache, self._on(rank, pages))
                rows = rank_part(taken, rank, self._programs.ranks)
                rows.copy_to_host_async()
                yield batch, rows

    def _destinations(self, load: Load, block: Block) -> np.ndarray:
        """int32 [n]: where each row of a block belongs, -1 for none."""
        index = block.first + np.arange(len(block.rows))
        wanted = (index >= load.first) & (index < min(load.stop, block.first + block.count))
        own = np.array(load.sequence.pages, np.int32)
        return np.where(wanted, own[np.minimum(index, len(own) - 1)], -1).astype(np.int32)

    def _on(self, rank: int, pages: np.ndarray) -> np.ndarray:
        """int32 [ranks, n]: the pages on their data rank, none on the others."""
        table = np.full((self._programs.ranks, len(pages)), -1, np.int32)
        table[rank] = pages
        return table
