"""A request's pages on their way from the pool: filled by its threads, read by the engine."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from serving.kv_pool.counts import Counts
from serving.kv_pool.remote import Block, Waits


class PoolFetch:
    """``Fetch`` that ends by itself: when its pages are here, when one is missing, or when its time
    is up. Whatever comes later is counted and dropped.
    """

    def __init__(self, first: int, counts: Counts, ended: Callable[[], None]):
        """ended: called, by whatever thread, when the request need not wait any more."""
        self.first, self.stop = first, first
        self.missing: Sequence[int] | None = None
        self._counts, self._ended = counts, ended
        self._lock = threading.Lock()
        self._waits: Waits | None = None
        self._began = self._deadline = 0.0
        self._blocks: list[Block] = []

    @property
    def waits(self) -> Waits | None:
        with self._lock:
            if self._waits is not None and time.monotonic() > self._deadline:
                late = "late_lookups" if self._waits is Waits.LOOKUP else "late_loads"
                self._counts.add(late)
                self._end()
            return self._waits

    @property
    def open(self) -> bool:
        """Whether anybody waits for it."""
        return self.waits is not None

    def turn(self, waits: Waits, seconds: float) -> bool:
        """Wait for something from now on, so long at most; False if it was given up."""
        with self._lock:
            if waits is Waits.LOAD:
                if self._waits is None:
                    return False
                self._count_time()
            self._waits, self._began = waits, time.monotonic()
            self._deadline = self._began + seconds
            return True

    def arrived(self, rows: np.ndarray, count: int) -> bool:
        """The next ``count`` pages are there, in the first rows; False if it was given up."""
        with self._lock:
            if self._waits is None:
                self._counts.add("late", count)
                return False
            if count:
                self._blocks.append(Block(self.stop, count, rows))
                self.stop += count
            return True

    def finish(self) -> None:
        """Nothing more will come."""
        with self._lock:
            if self._waits is not None:
                self._end()

    def cancel(self) -> None:
        with self._lock:
            self._waits, self._blocks, self.missing = None, [], ()

    def take(self) -> list[Block]:
        with self._lock:
            taken, self._blocks = self._blocks, []
            return taken

    def _end(self) -> None:
        self._count_time()
        self._waits = None
        self._ended()

    def _count_time(self) -> None:
        name = "lookup_s" if self._waits is Waits.LOOKUP else "load_s"
        self._counts.add(name, time.monotonic() - self._began)
