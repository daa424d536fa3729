"""The prefix cache against a model that knows every page's tokens: a hypothesis state machine and
the named corners.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.pages import PagePool
from serving.prefix_cache import ROOT, PrefixCache

PAGES, SIZE = 12, 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@dataclass(eq=False)
class Holder:
    """A request that holds the first pages of its tokens."""

    tokens: np.ndarray
    pages: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


class PrefixCacheMachine(RuleBasedStateMachine):
    """``content``: the whole prefix that a page was last filled with. Few tokens and few pages, so
    that prefixes collide and eviction is frequent.
    """

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(self.pool, SIZE)
        self.content: dict[int, bytes] = {}
        self.holders: list[Holder] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=0, max_size=5 * SIZE + 1),
        limit=st.integers(0, 6),
    )
    def start(self, tokens, limit):
        """Match, share the hit, take the rest as the scheduler does."""
        held = Holder(ids(*tokens))
        matched = self.cache.match(held.tokens, limit)
        pages = [self.cache.page(node) for node in matched]
        assert len(matched) <= min(limit, len(tokens) // SIZE)
        for index, page in enumerate(pages):
            assert self.content[page] == self.prefix(held, index), "a hit of other tokens"
        self.pool.share(pages)
        missing = len(tokens) // SIZE - len(pages)
        before = self.pool.free
        freed = self.cache.evict(max(missing - before, 0))
        assert self.pool.free == before + freed
        assert [self.cache.page(node) for node in matched] == pages, "evicted what is in use"
        if self.pool.free < missing:
            self.pool.give_back(pages)
            return
        held.pages = pages + self.pool.take(missing)
        held.nodes = matched
        for index in range(len(pages), len(held.pages)):
            self.content[held.pages[index]] = self.prefix(held, index)
        self.holders.append(held)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data):
        """The next page of a holder, while the nodes before it are still there."""
        held = data.draw(st.sampled_from(self.holders))
        index = len(held.nodes)
        parent = held.nodes[-1] if held.nodes else ROOT
        if index == len(held.pages) or (parent != ROOT and self.cache.page(parent) is None):
            return
        own, holders = held.pages[index], self.pool.holders(held.pages[index])
        node = self.cache.insert(parent, held.tokens[index * SIZE : (index + 1) * SIZE], own)
        held.nodes.append(node)
        cached = self.cache.page(node)
        assert self.content[cached] == self.prefix(held, index)
        assert self.pool.holders(own) in (holders, holders + 1)
        assert self.cache.match(held.tokens, index + 1) == held.nodes

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        held = data.draw(st.sampled_from(self.holders))
        self.holders.remove(held)
        self.pool.give_back(held.pages)

    @rule(count=st.integers(0, PAGES))
    def evict(self, count):
        evictable = self.evictable()
        assert self.cache.evict(count) == min(count, evictable)

    @rule()
    def clear(self):
        self.cache.clear()
        assert self.evictable() == 0

    @invariant()
    def agrees(self):
        self.pool.check()
        self.cache.check()
        for page in (page for held in self.holders for page in held.pages):
            assert self.pool.holders(page)
        in_use = {page for held in self.holders for page in held.pages}
        assert self.pool.pages - self.pool.free == len(in_use | self.cached())

    def teardown(self):
        for held in self.holders:
            self.pool.give_back(held.pages)
        self.cache.clear()
        assert len(self.cache) == 0 and self.pool.free == PAGES

    def prefix(self, held: Holder, index: int) -> bytes:
        return held.tokens[: (index + 1) * SIZE].tobytes()

    def cached(self) -> set[int]:
        return {node.page for node in self.cache._nodes.values()}

    def evictable(self) -> int:
        """How many nodes no request holds, neither them nor any page below them."""
        in_use = {page for held in self.holders for page in held.pages}
        nodes, kept = self.cache._nodes, set()
        for number in [number for number, node in nodes.items() if node.page in in_use]:
            while number != ROOT:
                kept.add(number)
                number = nodes[number].parent
        return len(nodes) - len(kept)


PrefixCacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPrefixCache = PrefixCacheMachine.TestCase


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(PAGES), SIZE)


def fill(cache: PrefixCache, *tokens: int) -> list[int]:
    """Nodes of a prefix that only the cache holds."""
    nodes, parent = [], ROOT
    for index in range(len(tokens) // SIZE):
        [page] = cache.pool.take(1)
        parent = cache.insert(parent, ids(*tokens)[index * SIZE : (index + 1) * SIZE], page)
        cache.pool.give_back([page])
        nodes.append(parent)
    return nodes


def test_same_page_below_other_parents_is_another_prefix(cache):
    a, b = fill(cache, 1, 1, 5, 5), fill(cache, 2, 2, 5, 5)
    assert a[1] != b[1]
    assert cache.match(ids(2, 2, 5, 5, 7), 9) == b
    assert cache.match(ids(5, 5), 9) == []


def test_only_whole_pages_up_to_the_limit(cache):
    nodes = fill(cache, 1, 2, 3, 4)
    assert cache.match(ids(1, 2, 3), 9) == nodes[:1]
    assert cache.match(ids(1, 2, 3, 4), 1) == nodes[:1]
    assert cache.match(ids(), 9) == []


def test_least_recently_used_leaf_goes_first(cache):
    a, b, c = fill(cache, 1, 1), fill(cache, 2, 2), fill(cache, 3, 3)
    cache.match(ids(1, 1), 1)
    assert cache.evict(1) == 1
    assert [cache.page(n) is None for n in (*a, *b, *c)] == [False, True, False]


def test_parents_go_after_their_children(cache):
    stem, left = fill(cache, 1, 1, 2, 2)
    right = fill(cache, 1, 1, 3, 3)[1]
    assert cache.evict(2) == 2
    assert cache.page(left) is None and cache.page(right) is None
    assert cache.page(stem) is not None
    assert cache.evict(9) == 1 and len(cache) == 0


def test_a_page_in_use_is_not_evicted_and_neither_is_what_leads_to_it(cache):
    stem, leaf = fill(cache, 1, 1, 2, 2)
    cache.pool.share([cache.page(leaf)])
    assert cache.evict(9) == 0
    cache.pool.give_back([cache.page(leaf)])
    assert cache.evict(9) == 2
    assert cache.page(stem) is None


def test_a_node_number_never_comes_back(cache):
    [old] = fill(cache, 1, 1)
    cache.clear()
    [new] = fill(cache, 1, 1)
    assert new != old and cache.page(old) is None


def test_hits_alone_do_not_grow_the_queue_of_leaves(cache):
    fill(cache, 1, 1, 2, 2)
    for _ in range(5000):
        cache.match(ids(1, 1, 2, 2), 2)
    assert len(cache._leaves) < 200
    cache.check()


def test_insert_copies_the_tokens_that_it_is_given(cache):
    tokens = ids(1, 2)
    [page] = cache.pool.take(1)
    node = cache.insert(ROOT, tokens, page)
    tokens[:] = 9
    assert cache.match(ids(1, 2), 1) == [node]
