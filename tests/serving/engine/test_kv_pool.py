"""Engines that share a pool: what one computed another loads, and whatever is wrong with a page,
the tokens are right.
"""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from serving.kv_pool.connect import open_tier
from serving.kv_pool.keys import Chain
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.shm import pool_path
from serving.kv_pool.values import HEADER_BYTES
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.scheduler import Scheduler
from serving.sequence import Stage
from serving.server.metrics import Metrics, snapshot
from tests.serving.engine.support import (
    PAGE,
    SLOTS,
    WINDOW,
    ask,
    assert_nothing_leaks,
    assert_oracle,
    each,
    everyone_makes_way,
    free_pages,
    page_bits,
    poison,
    prompt,
    recorded,
    run,
)
from tests.serving.kv_pool.support import WAIT_S, eventually

PATIENT = PoolOptions(
    "shm", "tiny", capacity=4_000_000, lookup_s=WAIT_S, load_s=WAIT_S, batches=(1, 4)
)


@pytest.fixture(scope="module")
def two_engines(engines):
    """Two engines that can move pages."""
    return [engines.make(kv_pool=replace(PATIENT, name=f"test-{os.getpid()}")) for _ in range(2)]


@pytest.fixture
def pair(two_engines):
    """``pair(**pool, second={...})``: two engines with one new pool; free pages and slots hold NaN.
    Nothing is left in them, and nothing compiles.
    """
    name = f"test-{os.getpid()}"
    path = pool_path(name)

    def make(second: dict | None = None, **pool):
        path.unlink(missing_ok=True)
        for engine, changed in zip(two_engines, ({}, second or {}), strict=True):
            join(engine, replace(PATIENT, name=name, **pool, **changed))
            poison(engine, free_pages(engine), range(SLOTS))
            engine.compiles.start()
        return two_engines

    yield make
    for engine in two_engines:
        assert engine.compiles.count == 0
        vars(engine.ranks[0]).pop("plan", None)
        assert_nothing_leaks(engine)
        engine.close()
    path.unlink(missing_ok=True)


def join(engine, pool: PoolOptions) -> None:
    """Give an engine another pool, and a scheduler for it."""
    engine.kv_pool = open_tier(replace(engine.options, kv_pool=pool), engine.executor)
    pages = PagePool(engine.options.pages)
    cache = PrefixCache(pages, PAGE)
    engine.ranks[0] = Scheduler(engine.ranks[0].limits, pages, cache, engine.kv_pool)


def totals(engine):
    return engine.kv_pool.snapshot()


def first_turn(engine, request):
    """The sequence of a request whose pages are in the pool, and the next turn's prompt."""
    [sequence] = run(engine, [request])
    pages = (sequence.length + len(sequence.result.token_ids) - 1) // PAGE
    eventually(lambda: totals(engine).stored >= pages)
    return sequence, (*request.prompt, *sequence.result.token_ids, *prompt(99, 7))


def keys_of(engine, tokens, count: int) -> list[bytes]:
    chain = Chain(engine.kv_pool.pool.codec.root, PAGE)
    return chain.keys(np.array(tokens, np.int32), count)


def stored_row(engine, key: bytes) -> np.ndarray:
    """The bytes of a page in the pool, writable."""
    store = engine.kv_pool.pool.checked.store
    with store._locked():
        [slot] = store.table.find([key])
    assert slot >= 0
    return store._rows[slot]


def test_the_second_turn_elsewhere_is_that_of_a_local_hit(pair, oracle):
    a, b = pair()
    first, turn = first_turn(a, ask(prompt(50, 77), 6))
    [here] = run(a, [ask(turn, 8)])
    [there] = run(b, [ask(turn, 8)])
    assert_oracle(oracle, there)
    assert there.result.logprobs == here.result.logprobs, "bit for bit"
    assert (here.result.cached_tokens, here.result.pool_tokens) == (80, 0)
    assert (there.result.cached_tokens, there.result.pool_tokens) == (80, 80)
    rows = len(turn) - 80 + WINDOW
    assert there.result.encoder_rows == here.result.encoder_rows == rows
    assert totals(b).loaded == 5 and totals(b).hit_tokens == 80
    # What it loaded is its own prefix cache's now, and not stored again; what it added is.
    assert totals(b).stored == (len(turn) + 7) // PAGE - 5
    again = run(b, [ask(turn, 8)])[0].result
    assert (again.cached_tokens, again.pool_tokens) == ((len(turn) - 1) // PAGE * PAGE, 0)
    assert first.result.pool_tokens == 0
    page = Metrics("name", pool=True)
    page.show(snapshot(b))
    assert b'vllm:external_prefix_cache_hits_total{model_name="name"} 80.0' in page.render()


def test_pages_travel_bit_for_bit(pair):
    a, b = pair()
    first, turn = first_turn(a, ask(prompt(51, 96), 1))
    kept = [a.ranks[0].cache.page(node) for node in first.nodes]
    [there] = run(b, [ask(turn, 1)])
    loaded = [b.ranks[0].cache.page(node) for node in there.nodes[: len(kept)]]
    assert len(kept) == 6 and page_bits(b, loaded) == page_bits(a, kept)


def test_many_at_once_share_and_are_those_of_the_oracle(pair, oracle):
    a, b = pair()
    _, turn = first_turn(a, ask(prompt(52, 64), 6))
    cold = [ask(prompt(53, 40), 6), ask(prompt(54, 70), 6)]
    branches = [ask([*turn[:64], *prompt(60 + i, 20)], 6) for i in range(4)]
    for sequence in run(b, [branches[0], cold[0], *branches[1:], cold[1]], apart=1):
        assert_oracle(oracle, sequence)
        assert sequence.result.cached_tokens == (64 if sequence.request in branches else 0)


def test_preempted_and_poisoned(pair, oracle):
    a, b = pair()
    _, turn = first_turn(a, ask(prompt(55, 70), 6))
    recorded(b, everyone_makes_way(each(4)))
    for sequence in run(b, [ask(turn, 8), ask(prompt(56, 50), 8)], apart=2):
        assert_oracle(oracle, sequence)


@pytest.mark.parametrize(("bad", "how"), [(0, "lost"), (2, "corrupt"), (4, "foreign")])
def test_a_bad_page_is_computed(pair, oracle, bad, how):
    a, b = pair()
    _, turn = first_turn(a, ask(prompt(57, 80), 6))
    key = keys_of(a, turn, 5)[bad]
    if how == "lost":
        assert b.kv_pool.pool.checked.store.remove([key], leased=True) == [True]
    else:
        stored_row(a, key)[HEADER_BYTES + 9 if how == "corrupt" else 8] ^= 2
    [there] = run(b, [ask(turn, 8)])
    assert_oracle(oracle, there)
    adopted = bad * PAGE if bad * PAGE > WINDOW else 0
    assert there.result.cached_tokens == there.result.pool_tokens == adopted
    seen = totals(b)
    assert (seen.corrupt, seen.foreign) == (how == "corrupt", how == "foreign")
    if how != "foreign":
        # The right page has taken its place.
        eventually(lambda: totals(b).stored >= 6 - bad)
        b.ranks[0].cache.clear()
        [again] = run(b, [ask(turn, 8)])
        assert again.result.pool_tokens == 80 and totals(b).corrupt == seen.corrupt


@pytest.mark.parametrize("call", ["lookup", "get"])
def test_a_late_page_is_computed_and_nobody_else_waits(pair, oracle, call, monkeypatch):
    a, b = pair()
    _, turn = first_turn(a, ask(prompt(58, 80), 6))
    store, gate = b.kv_pool.pool.checked.store, threading.Event()
    real = getattr(store, call)

    def slow(*given):
        assert gate.wait(WAIT_S)
        return real(*given)

    monkeypatch.setattr(store, call, slow)
    late = b.add(ask(turn, 8))
    other = b.add(ask(prompt(59, 10), 4))  # no whole page beyond the window: it asks for nothing
    while other.stage is not Stage.DONE:
        b.step()
    assert late.stage is Stage.WAITING and not late.pages
    late.fetch._deadline = 0.0  # its time is up
    run(b, [])
    gate.set()
    for sequence in (late, other):
        assert_oracle(oracle, sequence)
        assert sequence.result.cached_tokens == 0
    seen = totals(b)
    assert (seen.late_lookups, seen.late_loads) == (call == "lookup", call == "get")
    assert seen.starved_lookups + seen.starved_loads > 0


def test_another_checkpoints_pages_are_not_taken(pair, oracle):
    a, b = pair(second={"model": "another"})
    _, turn = first_turn(a, ask(prompt(61, 80), 6))
    [there] = run(b, [ask(turn, 8)])
    assert there.result.cached_tokens == 0 and totals(b).loaded == 0
    assert_oracle(oracle, there)
    [here] = run(a, [ask(turn, 8)])
    assert here.result.cached_tokens == 80


def test_a_pool_of_another_kind_is_not_used(pair, oracle, caplog):
    _, b = pair()
    path = pool_path(f"test-{os.getpid()}-other")
    path.write_bytes(b"something else")
    try:
        join(b, replace(PATIENT, name=f"test-{os.getpid()}-other"))
        for _ in range(2):
            [sequence] = run(b, [ask(prompt(62, 70), 4)])
            b.ranks[0].cache.clear()
            assert_oracle(oracle, sequence)
        assert totals(b).foreign_pools == 1 and totals(b).loaded == 0
        assert [r.message for r in caplog.records if "not a pool" in r.message]
        assert path.read_bytes() == b"something else"
    finally:
        path.unlink()


def test_a_full_pool(pair, oracle):
    """What is in use stays, the rest is computed."""
    a, b = pair(capacity=60_000)
    assert a.kv_pool.pool.checked.store.capacity == 4
    requests = [ask(prompt(63 + i, 90), 4) for i in range(3)]
    for engine in (a, b):
        for sequence in run(engine, requests):
            assert_oracle(oracle, sequence)
    eventually(lambda: totals(a).stored + totals(a).refused >= 15)


def test_a_fetch_that_is_aborted_leaves_nothing(pair, monkeypatch):
    a, b = pair()
    _, turn = first_turn(a, ask(prompt(67, 80), 6))
    store, gate = b.kv_pool.pool.checked.store, threading.Event()
    real = store.get
    monkeypatch.setattr(store, "get", lambda *given: gate.wait(WAIT_S) and real(*given))
    sequence = b.add(ask(turn, 8))
    for _ in range(20):
        b.step()
    b.abort(sequence)
    b.check()
    assert b.idle
    gate.set()
