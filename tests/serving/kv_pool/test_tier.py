"""The pool's threads: what they look up, load and store, and what becomes of what goes wrong."""

from dataclasses import replace

import numpy as np
import pytest

from serving.kv_pool import pool as pool_module
from serving.kv_pool.counts import Counts
from serving.kv_pool.keys import Chain, Namespace
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.pool import KVPool
from serving.kv_pool.remote import Complete, Load, Waits
from serving.kv_pool.store import StoreError
from serving.kv_pool.tier import PoolTier
from serving.kv_pool.values import HEADER_BYTES, Codec, Verdict
from serving.request import Request
from serving.scheduler import Plan
from serving.sequence import Sequence
from tests.serving.kv_pool.support import WAIT_S, DictStore, eventually

SIZE, WINDOW = 2, 3
SPACE = Namespace("model", "float32", SIZE, ((".a", "uint8", (6,)),))
OPTIONS = PoolOptions("shm", "model", lookup_s=WAIT_S, load_s=WAIT_S, batches=(1, 3))
TOKENS = tuple(range(21))
PAGES = 10


def page(index: int) -> np.ndarray:
    return np.full(SPACE.page_bytes, index + 1, np.uint8)


def sequence(tokens=TOKENS) -> Sequence:
    return Sequence.of(Request(tokens, 1), 0)


class Fixture:
    """A tier over a DictStore."""

    def __init__(self, **options):
        self.store, self.counts = DictStore(), Counts()
        codec = Codec(SPACE.digest, SPACE.page_bytes)
        self.pool = KVPool(self.store, codec, self.counts)
        self.tier = PoolTier(self.pool, SPACE, replace(OPTIONS, **options), WINDOW, self.counts)
        self.keys = Chain(SPACE.digest, SIZE).keys(np.array(TOKENS, np.int32), PAGES)

    def fill(self, *indices: int) -> None:
        rows = np.zeros((len(indices), self.pool.codec.value_bytes), np.uint8)
        for row, index in zip(rows, indices, strict=True):
            row[HEADER_BYTES:] = page(index)
        assert all(self.pool.put([self.keys[i] for i in indices], rows).result(WAIT_S))

    def fetch(self, held: int = 0, limit: int = PAGES):
        fetch = self.tier.fetch(sequence(), held, limit)
        eventually(lambda: fetch.waits is None)
        return fetch

    @property
    def totals(self):
        return self.tier.snapshot()


@pytest.fixture
def make():
    made = []

    def fixture(**options) -> Fixture:
        made.append(Fixture(**options))
        return made[-1]

    yield fixture
    for one in made:
        for gate in one.store.gates.values():
            gate.set()
        one.tier.close()
        assert one.store.calls[-1][0] == "close"


def pages_of(blocks) -> list[int]:
    """Indices of the pages that came; each has its own bytes."""
    indices = []
    for block in blocks:
        for index, row in enumerate(block.rows[: block.count], block.first):
            assert (row[HEADER_BYTES:] == page(index)).all()
            indices.append(index)
    return indices


def test_pages_up_to_the_first_that_is_missing_come_in_batches(make):
    made = make()
    made.fill(*range(7), 8)
    fetch = made.fetch()
    assert (fetch.first, fetch.stop) == (0, 7)
    blocks = fetch.take()
    assert [(b.first, b.count, len(b.rows)) for b in blocks] == [(0, 3, 3), (3, 3, 3), (6, 1, 1)]
    assert pages_of(blocks) == list(range(7))
    assert [call for call in made.store.calls if call[0] in ("lookup", "get")] == [
        ("lookup", 10),
        ("get", 3),
        ("get", 3),
        ("get", 1),
    ]
    totals = made.totals
    assert (totals.lookups, totals.queried_tokens, totals.loaded) == (1, 20, 7)
    assert totals.lookup_s > 0 and totals.load_s > 0


def test_what_the_device_holds_is_leased_and_not_looked_up(make):
    made = make()
    made.fill(0, 2, 3, 4)
    fetch = made.fetch(held=3)
    eventually(lambda: fetch.missing is not None)
    assert pages_of(fetch.take()) == [3, 4] and fetch.missing == [1]
    assert ("lookup", 7) in made.store.calls and ("lease", 3) in made.store.calls
    assert made.totals.refreshed == 2


def test_with_everything_on_the_device_nobody_waits(make):
    made = make()
    gate = made.store.shut("lease")
    fetch = made.tier.fetch(sequence(), 10, 10)
    assert fetch.waits is None and fetch.stop == 10
    gate.set()
    eventually(lambda: fetch.missing is not None)
    assert fetch.missing == list(range(10)) and made.totals.lookups == 0


def test_a_hit_no_longer_than_the_window_is_not_loaded(make):
    made = make()
    made.fill(0)
    assert made.fetch().stop == 0
    assert made.totals.loaded == 0 and "get" not in dict(made.store.calls)


def test_loading_starts_when_the_lookup_returns(make):
    """Nobody looks at the fetch in between: no step of an engine is needed."""
    made = make()
    made.fill(*range(10))
    made.tier.fetch(sequence(), 0, 10)
    eventually(lambda: made.totals.loaded == 10)


@pytest.mark.parametrize("how", [Verdict.LOST, Verdict.CORRUPT, Verdict.FOREIGN])
def test_a_page_that_is_not_right_ends_the_prefix(make, how):
    made = make()
    made.fill(*range(10))
    gate = made.store.shut("get")
    fetch = made.tier.fetch(sequence(), 0, 10)
    eventually(lambda: fetch.waits is Waits.LOAD)
    value = made.store.values[made.keys[4]]
    if how is Verdict.LOST:
        del made.store.values[made.keys[4]]
    elif how is Verdict.CORRUPT:
        value[-1] ^= 1
    else:
        other = Codec(replace(SPACE, model="other").digest, SPACE.page_bytes)
        other.seal(made.keys[4], value)
    gate.set()
    eventually(lambda: fetch.waits is None)
    assert pages_of(fetch.take()) == [0, 1, 2, 3]
    assert getattr(made.totals, how.value) == 1 and made.totals.loaded == 4
    # What is damaged makes room for the right one; what is another's is not touched.
    assert (made.keys[4] in made.store.values) is (how is Verdict.FOREIGN)


def test_a_late_lookup_is_given_up_and_what_comes_then_is_dropped(make):
    made = make(lookup_s=0.05)
    made.fill(*range(10))
    gate = made.store.shut("lookup")
    fetch = made.fetch()
    assert fetch.stop == 0 and made.totals.late_lookups == 1
    # Until it answers nobody else waits for it.
    eventually(lambda: made.pool.lookups.busy_s > 0.05)
    assert made.tier.fetch(sequence(), 0, 10).waits is None and made.totals.skipped == 1
    gate.set()
    eventually(lambda: not made.pool.lookups.busy_s)
    assert fetch.take() == [] and made.totals.loaded == 0


def test_of_a_late_load_what_came_in_time_is_taken(make):
    made = make(load_s=0.5, least_rate=1e9)
    made.fill(*range(10))
    get, gate = made.store.get, made.store.shut("later")

    def slow(keys, rows):
        if keys[0] != made.keys[0]:
            gate.wait(WAIT_S)
        return get(keys, rows)

    made.store.get = slow
    fetch = made.fetch()
    assert pages_of(fetch.take()) == [0, 1, 2] and made.totals.late_loads == 1
    eventually(lambda: made.pool.loads.busy_s > 0.55)
    assert made.tier.fetch(sequence(), 0, 10).waits is None and made.totals.skipped == 1
    gate.set()
    eventually(lambda: made.totals.late == 3)
    assert made.totals.loaded == 3 and fetch.take() == []


def test_a_long_load_does_not_hold_up_others(make):
    """Every batch queues behind those of other requests."""
    made = make()
    made.fill(*range(10))
    order, get = [], made.store.get

    def noting(keys, rows):
        order.append(made.keys.index(keys[0]))
        return get(keys, rows)

    made.store.get, made.pool.loads = noting, type(made.pool.loads)("one", 1)
    gate = made.store.shut("get")
    long = made.tier.fetch(sequence(), 0, 10)
    eventually(lambda: long.waits is Waits.LOAD)
    short = made.tier.fetch(sequence(TOKENS[:7]), 0, 3)
    eventually(lambda: short.waits is Waits.LOAD)
    gate.set()
    eventually(lambda: long.waits is None and short.waits is None)
    assert (long.stop, short.stop) == (10, 3)
    assert order == [0, 0, 3, 6, 9]


@pytest.mark.parametrize("error", [StoreError("it is gone"), RuntimeError("it is gone")])
def test_a_store_that_fails_is_left_alone_for_a_while(make, monkeypatch, caplog, error):
    made = make()
    made.fill(*range(10))
    made.store.fail = error
    calls = len(made.store.calls)
    for _ in range(5):
        assert made.fetch().stop == 0
    assert len(made.store.calls) == calls + 1 and made.totals.errors == 1
    rows = np.zeros((1, made.pool.codec.value_bytes), np.uint8)
    assert made.pool.put(made.keys[:1], rows).result(WAIT_S) == [False]
    assert made.totals.dropped == 1
    made.store.fail = None
    monkeypatch.setattr(made.pool.checked, "_down_until", 0.0)
    assert made.fetch().stop == 10
    told = [record.message for record in caplog.records]
    assert len(told) == 2 and told[1] == "kv pool: back"
    assert "without it until it answers" in told[0] and "it is gone" in told[0]


def test_complete_pages_are_stored_under_their_names(make):
    made = make()
    done = sequence()
    items = [Complete(done, index, 0) for index in (0, 1, 5)]
    rows = np.zeros((1, 4, SPACE.page_bytes), np.uint8)
    rows[0, :3] = [page(0), page(1), page(5)]
    scheduler = type("Rank", (), {"prefetch": None, "running": []})()
    scheduler.prefetch = type("Prefetch", (), {"drain": lambda self, running: items})()
    made.tier.store([scheduler], lambda items: [(items, rows)])
    eventually(lambda: made.totals.stored == 3)
    assert set(made.store.values) == {made.keys[i] for i in (0, 1, 5)}
    assert pages_of(made.fetch().take()) == [0, 1]


def test_what_waits_too_long_to_be_stored_is_not(make):
    made = make(backlog=3 * SPACE.page_bytes)
    gate = made.store.shut("put")
    items = [Complete(sequence(), index, 0) for index in range(3)]
    scheduler = type("Rank", (), {"prefetch": None, "running": []})()
    scheduler.prefetch = type("Prefetch", (), {"drain": lambda self, running: items})()
    rows = np.zeros((1, 3, SPACE.page_bytes), np.uint8)
    for _ in range(3):
        made.tier.store([scheduler], lambda items: [(items, rows)])
    assert made.totals.dropped == 6
    gate.set()
    eventually(lambda: made.totals.stored == 3)
    made.tier.store([scheduler], lambda items: [(items, rows)])
    eventually(lambda: made.totals.stored == 6)


def test_steps_are_counted_by_what_starved_them(make):
    made = make()
    load = Load(sequence(), 2, 5, [])
    for starved in (set(), {Waits.LOOKUP}, {Waits.LOAD}, {Waits.LOAD, Waits.LOOKUP}):
        made.tier.dispatched(Plan(starved=starved, loads=[load]))
    seen = made.totals
    assert (seen.steps, seen.starved_lookups, seen.starved_loads) == (4, 2, 2)
    assert seen.hit_tokens == 4 * 3 * SIZE


def test_every_call_is_there_for_others(make):
    """The interface itself: lookup, get, put, lease, remove."""
    made = make()
    keys = made.keys[:2]
    made.fill(0)
    assert made.pool.lookup(keys).result(WAIT_S) == [True, False]
    assert made.pool.lease(keys).result(WAIT_S) == [True, False]
    rows = np.zeros((2, made.pool.codec.value_bytes), np.uint8)
    assert made.pool.get(keys, rows).result(WAIT_S) == [Verdict.GOOD, Verdict.LOST]
    assert (rows[0, HEADER_BYTES:] == page(0)).all()
    assert made.pool.remove(keys).result(WAIT_S) == [True, False]
    assert made.pool.lookup(keys).result(WAIT_S) == [False, False]


def test_a_store_that_hangs_does_not_keep_the_process(monkeypatch):
    monkeypatch.setattr(pool_module, "_CLOSE_S", 0.05)
    made = Fixture()
    gate = made.store.shut("lookup")
    made.pool.lookup(made.keys)
    made.tier.close()
    assert ("close", 0) not in made.store.calls
    gate.set()
