"""The page pool as a state machine: every page has one place, whatever the order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv41_jax.errors import UserError
from serving.pages import PagePool

PAGES = 12


class Pool(RuleBasedStateMachine):
    """Against the plainest model: lists of the pages that are out."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.held: list[list[int]] = []

    @property
    def out(self) -> set[int]:
        return {page for pages in self.held for page in pages}

    @rule(count=st.integers(0, PAGES))
    def take(self, count):
        if count > PAGES - len(self.out):
            with pytest.raises(UserError, match=f"{count} pages are needed"):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == len(taken) == count
        assert not set(taken) & self.out
        assert set(taken) <= set(range(PAGES))
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.give_back(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.held))
        self.pool.share(pages)
        self.held.append(list(pages))

    @precondition(lambda self: len(self.out) < PAGES)
    @rule(data=st.data())
    def use_what_is_free(self, data):
        page = data.draw(st.sampled_from(sorted(set(range(PAGES)) - self.out)))
        for use in (self.pool.give_back, self.pool.share):
            with pytest.raises(ValueError, match=f"{page=} must be a page in use"):
                use([page])

    @rule(page=st.sampled_from([-1, PAGES, PAGES + 5]))
    def use_what_does_not_exist(self, page):
        for use in (self.pool.give_back, self.pool.share):
            with pytest.raises(ValueError, match="must be a page in use"):
                use([page])

    @invariant()
    def agrees(self):
        self.pool.check()
        assert self.pool.free == PAGES - len(self.out)
        for page in range(PAGES):
            assert self.pool.holders(page) == sum(pages.count(page) for pages in self.held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_pool_can_be_emptied_and_filled_again():
    pool = PagePool(3)
    first = pool.take(3)
    assert sorted(first) == [0, 1, 2] and pool.free == 0
    pool.give_back(first)
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_too_many_pages_take_none():
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(UserError, match="3 pages are needed, 2 of 3 are free"):
        pool.take(3)
    assert pool.free == 2


def test_a_page_cannot_be_given_back_twice():
    pool = PagePool(3)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(ValueError, match=f"page={pages[0]} must be a page in use"):
        pool.give_back(pages)
