"""A prefix cache that tells a router's index what it holds."""

import numpy as np

from serving.pages import PagePool
from serving.prefix_cache import ROOT, Node, PrefixCache
from serving.routing.index import Residency
from serving.routing.score import Target
from serving.simulate.pool import page_key


class WatchedCache(PrefixCache):
    """The real cache; keys of its pages are those of ``pool.Keys``."""

    def __init__(self, pool: PagePool, page_size: int, target: Target, index: Residency):
        super().__init__(pool, page_size)
        self._target, self._index = target, index
        self._keys = {ROOT: b""}

    def insert(self, parent: int, tokens: np.ndarray, page: int) -> int:
        node = super().insert(parent, tokens, page)
        if node not in self._keys:
            piece = memoryview(np.ascontiguousarray(tokens, np.int32)).cast("B")
            self._keys[node] = key = page_key(self._keys[parent], piece)
            self._index.stored(self._target, [key])
        return node

    def _remove(self, number: int, node: Node) -> None:
        super()._remove(number, node)
        self._index.removed(self._target, [self._keys.pop(number)])
