"""What the prefix cache and the pool call when a page comes or goes."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from serving.kv_events.hashes import page_hashes
from serving.kv_events.log import Change, Evicted, Inserted, Pooled
from serving.kv_pool.keys import Chain


@dataclass(frozen=True)
class DeviceWatch:
    """Watches the prefix cache of a data rank."""

    put: Callable[[Change], None]

    def inserted(self, node: int, parent: int, tokens: bytes) -> None:
        self.put(Inserted(node, parent, tokens))

    def evicted(self, node: int) -> None:
        self.put(Evicted(node))


class PoolWatch:
    """Watches what is put into the pool; threads may share it."""

    def __init__(self, put: Callable[[int, Change], None], page_size: int):
        """put: takes a data rank and a change."""
        self._put, self._size = put, page_size
        self._names: WeakKeyDictionary[Chain, list[int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def stored(self, rank: int, chain: Chain, tokens: np.ndarray, index: int) -> None:
        """Page ``index`` of int32 ``tokens``, a sequence's with this chain, is in the pool."""
        size = self._size
        with self._lock:
            names = self._names.setdefault(chain, [])
            known = tokens[len(names) * size : (index + 1) * size]
            names += page_hashes(known, size, names[-1] if names else None)
            name, parent = names[index], names[index - 1] if index else None
        piece = np.ascontiguousarray(tokens[index * size : (index + 1) * size], np.int32)
        self._put(rank, Pooled(name, parent, piece.tobytes()))
