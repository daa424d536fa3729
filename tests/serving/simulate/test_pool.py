"""The pool's model: it keeps what the shared-memory pool keeps, and loads take their time."""

import numpy as np
import pytest

from serving.kv_pool.remote import Waits
from serving.kv_pool.shm_table import ENTRY_BYTES, Table
from serving.request import Request
from serving.sequence import Sequence
from serving.simulate.events import Events
from serving.simulate.pool import Everything, Keys, LeastRecent, Link


class SharedTable:
    """The index and the eviction of the shared-memory pool, without leases."""

    def __init__(self, slots: int):
        counters = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._table = Table(memoryview(bytearray(slots * ENTRY_BYTES)), slots, *counters)

    def find(self, keys: list[bytes]) -> int:
        there = self._table.find(keys) >= 0
        return int(np.append(there, False).argmin())

    def lease(self, keys: list[bytes]) -> list[bool]:
        slots = self._table.find(keys)
        self._table.touch(slots, 0.0)
        return (slots >= 0).tolist()

    def put(self, keys: list[bytes]) -> None:
        there = self.lease(keys)
        missing = [key for key, held in zip(keys, there, strict=True) if not held]
        self._table.commit([self._table.claim(key, 0.0) for key in missing])


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize("slots", [7, 40])
def test_it_keeps_what_the_shared_memory_pool_keeps(slots):
    rng = np.random.default_rng(slots)
    model, table = LeastRecent(slots), SharedTable(slots)
    for _ in range(300):
        first = int(rng.integers(8)) * 16
        keys = [key(first + page) for page in range(int(rng.integers(1, 6)))]
        held = model.find(keys)
        assert held == table.find(keys)
        if rng.random() < 0.5:
            model.put(keys[held:])
            table.put(keys[held:])
        else:
            assert model.lease(keys) == table.lease(keys)
    assert len(model) == slots


def test_a_pool_without_limits_forgets_nothing():
    pool = Everything()
    pool.put([key(i) for i in range(1000)])
    assert pool.find([key(i) for i in range(1001)]) == 1000


def test_a_key_stands_for_all_tokens_before_its_end():
    first, second = np.arange(12, dtype=np.int32), np.arange(12, dtype=np.int32)
    second[1] = 99
    ones, others = Keys(4).keys(first, 3), Keys(4).keys(second, 3)
    assert not set(ones) & set(others)
    growing = Keys(4)
    assert [*growing.keys(first[:8], 2), growing.keys(first, 3)[2]] == ones


def request(tokens: int = 40) -> Sequence:
    prompt = np.arange(tokens, dtype=np.int32)
    return Sequence(Request((), 1), 0, prompt=prompt, chain=Keys(4))


def link(clock: Events, pool: LeastRecent, ready=lambda: None) -> Link:
    return Link(clock, pool, lookup_s=1.0, page_s=0.5, least_pages=3, ready=ready)


def test_a_fetch_waits_for_its_lookup_and_then_for_its_bytes():
    clock, pool, told = Events(), LeastRecent(100), []
    pool.put(Keys(4).keys(request().prompt, 6))
    fetch = link(clock, pool, lambda: told.append(clock.now)).fetch(request(), 2, 9)
    assert (fetch.first, fetch.stop, fetch.missing) == (2, 6, [])
    for now, waits in ((0.9, Waits.LOOKUP), (1.0, Waits.LOAD), (2.9, Waits.LOAD), (3.0, None)):
        clock.at(now, lambda waits=waits: (told.append(waits), fetch.waits is waits or 1 / 0))
    while clock.step(10):
        pass
    assert told == [Waits.LOOKUP, Waits.LOAD, Waits.LOAD, 3.0, None]
    assert fetch.take()[0].count == 4


def test_loads_of_a_rank_follow_one_another():
    clock, pool = Events(), LeastRecent(100)
    pool.put(Keys(4).keys(request().prompt, 4))
    rank = link(clock, pool)
    first, second = rank.fetch(request(), 0, 9), rank.fetch(request(), 0, 9)
    clock.at(3.0, lambda: None)
    clock.step(10)
    assert (first.waits, second.waits) == (None, Waits.LOAD)
    second.cancel()
    assert second.waits is None


def test_what_is_too_short_or_here_is_not_loaded():
    clock, pool = Events(), LeastRecent(100)
    pool.put(Keys(4).keys(request().prompt, 2))
    assert link(clock, pool).fetch(request(), 0, 9).stop == 0
    held = link(clock, pool).fetch(request(), 5, 5)
    assert held.waits is None
    assert held.missing == [2, 3, 4]
