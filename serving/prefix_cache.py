"""Whole pages of token prefixes, shared by requests and evicted from the leaves, oldest first."""

import heapq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.pages import PagePool

ROOT = 0


@dataclass
class Node:
    """A cached page: its tokens after those of ``parent``. used: the tick of its last use."""

    page: int
    parent: int
    tokens: bytes
    children: int = 0
    used: int = 0


class Watcher(Protocol):
    """Is told of every node that comes or goes, on the engine's thread: it must not wait."""

    def inserted(self, node: int, parent: int, tokens: bytes) -> None: ...

    def evicted(self, node: int) -> None: ...


class PrefixCache:
    """A tree of pages; an edge is the exact tokens of a page, so two prefixes never share by
    accident.

    The cache is one holder of each of its pages. A page that a request holds too is never evicted,
    and neither is one with children.
    """

    def __init__(self, pool: PagePool, page_size: int):
        self.pool, self.page_size = pool, page_size
        self._nodes: dict[int, Node] = {}
        self._edges: dict[tuple[int, bytes], int] = {}
        self._leaves: list[tuple[int, int]] = []
        self._next, self._tick = ROOT + 1, 0
        self.watcher: Watcher | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: np.ndarray, limit: int) -> list[int]:
        """Nodes of the longest cached prefix of int32 ``tokens``, at most ``limit`` pages; marks
        them used.
        """
        self._tick += 1
        matched = self.find(tokens, limit)
        for node in matched:
            self._touch(node)
        return matched

    def find(self, tokens: np.ndarray, limit: int) -> list[int]:
        """The nodes of ``match``, not marked."""
        matched, parent = [], ROOT
        for index in range(min(limit, len(tokens) // self.page_size)):
            node = self._edges.get((parent, self._edge(tokens, index)))
            if node is None:
                break
            matched.append(node)
            parent = node
        return matched

    def page(self, node: int) -> int | None:
        """The page of a node, None if it was evicted; a node's number is never used again."""
        found = self._nodes.get(node)
        return None if found is None else found.page

    def insert(self, parent: int, tokens: np.ndarray, page: int) -> int:
        """The node of one page of tokens below ``parent``. If it is new, the cache becomes a holder
        of ``page``; if the prefix is cached already the cached page stays and ``page`` remains the
        caller's alone.
        """
        self._tick += 1
        edge = parent, np.ascontiguousarray(tokens, np.int32).tobytes()
        node = self._edges.get(edge)
        if node is None:
            node, self._next = self._next, self._next + 1
            self.pool.share([page])
            self._nodes[node] = Node(page, parent, edge[1])
            self._edges[edge] = node
            if parent != ROOT:
                self._nodes[parent].children += 1
            if self.watcher is not None:
                self.watcher.inserted(node, parent, edge[1])
        self._touch(node)
        return node

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages that only the cache holds, least recently used leaves first;
        how many it freed.
        """
        freed, held = 0, []
        while freed < count and self._leaves:
            used, number = heapq.heappop(self._leaves)
            node = self._nodes.get(number)
            if node is None or node.used != used or node.children:
                continue
            if self.pool.holders(node.page) > 1:
                held.append((used, number))
                continue
            self._remove(number, node)
            freed += 1
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return freed

    def clear(self) -> None:
        """Forget everything that can be forgotten."""
        self.evict(len(self._nodes))

    def _edge(self, tokens: np.ndarray, index: int) -> bytes:
        return tokens[index * self.page_size : (index + 1) * self.page_size].tobytes()

    def _touch(self, number: int) -> None:
        node = self._nodes[number]
        node.used = self._tick
        if node.children:
            return
        heapq.heappush(self._leaves, (self._tick, number))
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [(n.used, i) for i, n in self._nodes.items() if not n.children]
            heapq.heapify(self._leaves)

    def _remove(self, number: int, node: Node) -> None:
        del self._nodes[number], self._edges[node.parent, node.tokens]
        self.pool.give_back([node.page])
        if self.watcher is not None:
            self.watcher.evicted(number)
        if node.parent != ROOT:
            parent = self._nodes[node.parent]
            parent.children -= 1
            if not parent.children:
                heapq.heappush(self._leaves, (parent.used, node.parent))

    def check(self) -> None:
        """Edges, children and holders agree, and every evictable leaf can be found."""
        children = dict.fromkeys(self._nodes, 0)
        for (parent, tokens), number in self._edges.items():
            node = self._nodes[number]
            assert (node.parent, node.tokens) == (parent, tokens)
            assert parent == ROOT or parent in self._nodes
            if parent != ROOT:
                children[parent] += 1
        assert len(self._edges) == len(self._nodes)
        assert all(node.children == children[number] for number, node in self._nodes.items())
        pages = [node.page for node in self._nodes.values()]
        assert len(set(pages)) == len(pages)
        assert all(self.pool.holders(page) for page in pages)
        queued = set(self._leaves)
        leaves = [(node.used, n) for n, node in self._nodes.items() if not node.children]
        assert queued.issuperset(leaves)
