"""The pool that an engine talks to: batched calls that return at once, every value checked."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from serving.kv_pool.counts import Counts
from serving.kv_pool.lanes import Lane
from serving.kv_pool.store import PageStore, StoreError
from serving.kv_pool.values import Codec, Verdict

_log = logging.getLogger(__name__)
# After a failure of the backend nothing is asked of it for so long.
_RETRY_S = 1.0
_CLOSE_S = 5.0

Answer = TypeVar("Answer")


class CheckedStore:
    """A backend whose failures are answers: what cannot be had is lost, what is damaged is taken
    out. Blocks; never raises.
    """

    def __init__(self, store: PageStore, codec: Codec, counts: Counts):
        self.store, self.codec, self.counts = store, codec, counts
        self._down_until = 0.0
        self._down = False
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return self._call(lambda: self.store.lookup(keys), [False] * len(keys))

    def lease(self, keys: Sequence[bytes]) -> list[bool] | None:
        """None if the backend did not answer."""
        return self._call(lambda: self.store.lease(keys), None)

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> list[Verdict]:
        """Fill ``rows`` uint8 [N, value_bytes]; only those that are GOOD are what was asked for."""
        there = self._call(lambda: self.store.get(keys, rows), [False] * len(keys))
        verdicts = [
            self.codec.verdict(key, row) if found else Verdict.LOST
            for key, row, found in zip(keys, rows, there, strict=True)
        ]
        for verdict in verdicts:
            if verdict is not Verdict.GOOD:
                self.counts.add(verdict.value)
        damaged = [k for k, v in zip(keys, verdicts, strict=True) if v is Verdict.CORRUPT]
        if damaged:
            _log.warning("kv pool: %d damaged pages, taken out", len(damaged))
            self._call(lambda: self.store.remove(damaged, leased=True), [])
        return verdicts

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        """Store pages that stand in ``rows`` behind room for their headers."""
        for key, row in zip(keys, rows, strict=True):
            self.codec.seal(key, row)
        stored = self._call(lambda: self.store.put(keys, rows), None)
        if stored is None:
            self.counts.add("dropped", len(keys))
            return [False] * len(keys)
        self.counts.add("stored", sum(stored))
        self.counts.add("refused", len(stored) - sum(stored))
        return stored

    def remove(self, keys: Sequence[bytes], *, leased: bool = False) -> list[bool]:
        return self._call(lambda: self.store.remove(keys, leased=leased), [False] * len(keys))

    def _call(self, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        if time.monotonic() < self._down_until:
            return otherwise
        try:
            answer = call()
        except Exception as error:  # whatever a foreign library raises, requests go on without it
            self.counts.add("errors")
            known = isinstance(error, StoreError)
            self._turn(down=True, why=str(error) if known else repr(error))
            return otherwise
        self._turn(down=False)
        return answer

    def _turn(self, *, down: bool, why: str = "") -> None:
        with self._lock:
            changed, self._down = down != self._down, down
            self._down_until = time.monotonic() + _RETRY_S if down else 0.0
        if changed:
            _log.warning("kv pool: %s", f"without it until it answers: {why}" if down else "back")


class KVPool:
    """Async batched calls over a backend, on threads of its own. Futures never fail.

    Lookups have a thread that nothing else keeps busy; a call of any kind that hangs delays those
    of its kind only. ``checked`` has the same calls for who is on such a thread already.
    """

    def __init__(self, store: PageStore, codec: Codec, counts: Counts, loaders: int = 2):
        self.checked, self.codec, self.counts = CheckedStore(store, codec, counts), codec, counts
        self.lookups = Lane("kv-lookup")
        self.loads = Lane("kv-load", loaders)
        self.stores = Lane("kv-store")

    def lookup(self, keys: Sequence[bytes]) -> "Future[list[bool]]":
        """Which pages are there; they are leased: kept for some seconds."""
        return self.lookups.submit(self.checked.lookup, keys)

    def lease(self, keys: Sequence[bytes]) -> "Future[list[bool] | None]":
        """Keep pages for some seconds more; None if the backend did not answer."""
        return self.lookups.submit(self.checked.lease, keys)

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> "Future[list[Verdict]]":
        """Fill uint8 ``rows`` [N, value_bytes]: a header and a page each."""
        return self.loads.submit(self.checked.get, keys, rows)

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> "Future[list[bool]]":
        """Store the pages in uint8 ``rows`` [N, value_bytes], behind room for their headers."""
        return self.stores.submit(self.checked.put, keys, rows)

    def remove(self, keys: Sequence[bytes]) -> "Future[list[bool]]":
        """Forget pages; False where one is leased or not there."""
        return self.stores.submit(self.checked.remove, keys)

    def close(self) -> None:
        """Store what waits to be, for some seconds at most, and let go."""
        lanes = self.lookups, self.loads, self.stores
        if all([lane.close(_CLOSE_S) for lane in lanes]):
            self.checked.store.close()
