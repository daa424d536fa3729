"""Requests that one engine begins and another one goes on with: the tokens are those of one engine,
and what is lost on the way ends alone.
"""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from serving.handoff.options import HandoffOptions
from serving.handoff.ticket import NAME_BYTES, Ticket
from serving.sequence import Stage
from tests.oracle import log_softmax
from tests.serving.engine.support import (
    PAGE,
    SLOTS,
    WINDOW,
    Tied,
    ask,
    assert_nothing_leaks,
    assert_same,
    each,
    everyone_makes_way,
    free_pages,
    poison,
    prompt,
    recorded,
    run,
    solo,
)
from tests.serving.handoff.support import (
    POOL,
    begun,
    gone_on,
    join,
    new_pool,
    stepped,
    to_go_on,
    to_leave,
    values_of,
)
from tests.serving.kv_pool.support import eventually
from tests.tolerances import REPLAY_LOGITS_ABS

NAME = f"test-handoff-{os.getpid()}"
LENGTHS = 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 90
SAMPLING = (
    {},
    {"temperature": 1.0, "seed": 11},
    {
        "temperature": 0.8,
        "seed": 2**32 - 1,
        "top_k": 40,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "min_tokens": 3,
        "stop_ids": (1,),
        "logit_bias": ((7, 3.0), (9, -2.0)),
    },
)


@pytest.fixture(scope="module")
def made(engines):
    """Engines by role and form."""

    def engine(role: str, form: str):
        pool = replace(POOL, name=NAME)
        return engines.make(kv_pool=pool, handoff=HandoffOptions(role, form))

    return {
        "windows": (engine("prefill", "windows"), engine("decode", "windows")),
        "replay": (engine("both", "replay"), engine("decode", "replay")),
    }


@pytest.fixture
def split(made):
    """``split(form)``: an engine that begins requests and one that goes on with them, and a new
    pool. Free pages and slots hold NaN. Nothing is left in them, and nothing compiles.
    """
    used = []

    def pair(form: str = "windows", **pool):
        new_pool(NAME)
        for engine in made[form]:
            join(engine, replace(POOL, name=NAME, **pool))
            poison(engine, free_pages(engine), range(SLOTS))
            engine.compiles.start()
            used.append(engine)
        return made[form]

    yield pair
    for engine in used:
        assert engine.compiles.count == 0
        vars(engine.ranks[0]).pop("plan", None)
        assert_nothing_leaks(engine)
        assert not engine.departures.busy
        engine.close()
    new_pool(NAME)


def store_of(engine):
    return engine.kv_pool.pool.checked.store


def of_lengths(lengths, new: int = 4):
    """Greedy, sampled and ruled requests."""
    return [ask(prompt(n, n), new, **SAMPLING[i % 3]) for i, n in enumerate(lengths)]


def test_tokens_are_those_of_one_engine(split, engine):
    a, b = split()
    requests = of_lengths(LENGTHS)
    left = begun(a, requests)
    for request, got in zip(requests, gone_on(b, requests, left), strict=True):
        assert_same(got.result, solo(engine, request))
        result, n = got.result, got.length
        assert (result.encoder_rows, result.decoder_rows) == (0, 0)
        assert result.cached_tokens == result.pool_tokens == n
    seen = a.kv_pool.snapshot(), b.kv_pool.snapshot()
    assert seen[0].handoffs_left == seen[1].handoffs_taken == len(LENGTHS)
    # What was taken is gone: only whole pages are left.
    b.kv_pool.flush()
    pages = sum((n + 3) // PAGE for n in LENGTHS)
    assert store_of(b).used <= pages


def assert_replayed(oracle, sequence) -> None:
    """The first token is that of the whole prompt, the others are those behind a prefix hit of its
    whole pairs.
    """
    n, result = sequence.length, sequence.result
    hit = n - n % 2
    fed = [*sequence.request.prompt, *result.token_ids[:-1]]
    first = oracle.logits(fed[:n], n)[0].argmax()
    logits = oracle.logits(fed, n, hits=(hit,) if hit > WINDOW else ())[1:]
    if oracle.margin <= 1e-6:
        raise Tied("float32 cannot tell what is selected: take another prompt")
    assert result.token_ids == [first, *logits.argmax(-1)]
    for row, token in zip(log_softmax(logits), result.logprobs[1:], strict=True):
        ids, values = zip(*token.top, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=REPLAY_LOGITS_ABS)


def test_without_windows_the_last_one_is_replayed(split, oracle):
    a, b = split("replay")
    requests = [ask(prompt(n, n), 4) for n in (2, 17, 32, 33, 65)]
    left = begun(a, requests)
    for got in gone_on(b, requests, left):
        assert_replayed(oracle, got)
        n = got.length
        assert got.result.encoder_rows == min(n, WINDOW + n % 2)
    values = sum(-(-s.left.size // b.kv_pool.pool.codec.page_bytes) for s in left)
    assert values == len(requests), "nothing but the token"


def test_short_prompts_that_are_replayed_are_those_of_one_engine(split, engine):
    a, b = split("replay")
    requests = of_lengths((1, 15, 16))
    for request, got in zip(requests, gone_on(b, requests, begun(a, requests)), strict=True):
        assert_same(got.result, solo(engine, request))


@pytest.mark.parametrize("form", ["windows", pytest.param("replay", marks=pytest.mark.slow)])
def test_preempted_at_any_time(split, engine, oracle, form):
    a, b = split(form)
    requests = [ask(prompt(n, n)) for n in (33, 70)]
    left = begun(a, requests)
    recorded(b, everyone_makes_way(each(3)))
    for request, got in zip(requests, gone_on(b, requests, left), strict=True):
        if form == "windows":
            assert_same(got.result, solo(engine, request))
        else:
            assert_replayed(oracle, got)


def test_a_first_token_that_is_the_last(split, engine):
    a, b = split()
    first = solo(engine, ask(prompt(40, 30))).token_ids[0]
    requests = [ask(prompt(40, 30), 9, stop_ids=(first,)), ask(prompt(40, 30), 1)]
    ended = gone_on(b, requests, begun(a, requests))
    assert [s.result.token_ids for s in ended] == [[first], [first]]
    assert [s.result.finish_reason for s in ended] == ["stop", "length"]


def test_a_conversation_goes_to_and_fro(split, engine):
    """Each engine loads what it has not: of the second turn the one that decodes has most."""
    a, b = split()
    first = ask(prompt(41, 60), 8)
    [begins] = begun(a, [first])
    [one] = gone_on(b, [first], [begins])
    b.kv_pool.flush()
    turn = ask([*first.prompt, *one.result.token_ids, *prompt(42, 30)], 8)
    [begins] = begun(a, [turn])
    # Pages that the other engine filled while it decoded are hits, too.
    assert begins.result.cached_tokens == 64
    [two] = gone_on(b, [turn], [begins])
    assert (two.result.cached_tokens, two.result.pool_tokens) == (98, 98 - 64)
    assert_same(two.result, run_after(engine, first, turn))


def run_after(engine, first, turn):
    """A turn in one engine that has run the first one."""
    run(engine, [first])
    [second] = run(engine, [turn])
    engine.ranks[0].cache.clear()
    return second.result


def test_pages_that_go_while_the_rest_comes_are_loaded(split, engine):
    a, b = split()
    request = ask(prompt(43, 70), 6)
    gone_on(b, [request], begun(a, [request]))
    [left] = begun(a, [request])
    sequence = b.add(to_go_on(request, left))
    assert sequence.handed.first == 4
    b.ranks[0].cache.clear()
    assert stepped(b) == []
    assert_same(sequence.result, run_after(engine, request, request))
    assert sequence.result.pool_tokens == 70


@pytest.mark.parametrize(("what", "how"), [("record", "damaged"), ("page", "removed")])
def test_a_lost_one_ends_alone(split, engine, what, how):
    a, b = split()
    requests = of_lengths((40, 50))
    good, bad = begun(a, requests)
    own = values_of(a, bad.left, tail=True)
    page = a.kv_pool.chain_of(bad).keys(bad.prompt, 2)[1]
    key = {"record": own[2], "page": page}[what]
    store = store_of(a)
    if how == "removed":
        assert store.remove([key], leased=True) == [True]
    else:
        with store._locked():
            [slot] = store.table.find([key])
        store._rows[slot, -1] ^= 1
    other, lost = b.add(to_go_on(requests[0], good)), b.add(to_go_on(requests[1], bad))
    assert stepped(b) == [lost]
    assert lost.stage is Stage.DONE and lost.result.finish_reason == "error"
    assert not lost.result.token_ids and lost.result.fault
    assert b.kv_pool.snapshot().handoffs_lost == 1
    assert_same(other.result, solo(engine, requests[0]))
    # Begun again, it comes through: the engine still has its pages.
    [again] = gone_on(b, requests[1:], begun(a, requests[1:]))
    assert again.result.token_ids


def test_a_lost_one_does_not_wait_for_a_slot(split):
    a, b = split()
    requests = [ask(prompt(80 + i, 20), 60) for i in range(SLOTS)]
    begins = begun(a, requests)
    running = [b.add(to_go_on(r, s)) for r, s in zip(requests, begins, strict=True)]
    for sequence in running:
        eventually(lambda sequence=sequence: sequence.handed.waits is None)
    while not all(sequence.stage is Stage.DECODE for sequence in running):
        b.step()
    lost = b.add(replace(requests[0], ticket=Ticket(b"?" * NAME_BYTES, 100, 0)))
    eventually(lambda: lost.handed.waits is None)
    b.step()
    assert b.failed == [lost] and lost.stage is Stage.DONE
    assert all(sequence.stage is Stage.DECODE for sequence in running)
    for sequence in running:
        b.abort(sequence)
    assert stepped(b) == []


def test_pages_that_the_pool_has_lost_are_sent_again(split):
    a, b = split()
    request = ask(prompt(44, 17), 6)
    [left] = begun(a, [request])
    [want] = gone_on(b, [request], [left])
    b.ranks[0].cache.clear()
    key = a.kv_pool.chain_of(left).keys(left.prompt, 1)
    assert store_of(a).remove(key, leased=True) == [True]
    # No page beyond the window: the engine does not ask the pool before it begins.
    [got] = gone_on(b, [request], begun(a, [request]))
    assert got.result.token_ids == want.result.token_ids


def test_a_pool_without_room_ends_it(split):
    a, _ = split(capacity=30_000)
    sequence = a.add(to_leave(ask(prompt(45, 90))))
    assert stepped(a) == [sequence]
    assert sequence.result.finish_reason == "error" and sequence.result.fault


@pytest.mark.parametrize("end", ["aborted", "late"])
def test_one_that_nobody_waits_for_any_more(split, monkeypatch, end):
    a, _ = split()
    store, gate = store_of(a), threading.Event()
    real = store.put
    monkeypatch.setattr(store, "put", lambda *given: gate.wait(60) and real(*given))
    sequence = a.add(to_leave(ask(prompt(46, 40))))
    while sequence.stage is not Stage.LEAVING:
        a.step()
        a.check()
    assert not a.idle and a.step() == []
    if end == "aborted":
        a.abort(sequence)
        assert a.idle
    else:
        a.departures._leaving[sequence].deadline = 0.0
        assert stepped(a) == [sequence]
    assert sequence.stage is Stage.DONE and sequence.left is None
    gate.set()
    a.kv_pool.flush()
    eventually(lambda: store.used <= 40 // PAGE)


def test_one_that_makes_way_before_its_token_is_read(split):
    a, _ = split()
    recorded(a, everyone_makes_way(lambda rank: any(s.dispatched for s in rank.running)))
    sequence = a.add(to_leave(ask(prompt(47, 40))))
    assert stepped(a) == [sequence]


def test_aborted_on_the_way_in(split, monkeypatch):
    a, b = split()
    request = ask(prompt(48, 70), 6)
    [left] = begun(a, [request])
    store, gate = store_of(b), threading.Event()
    real = store.get
    monkeypatch.setattr(store, "get", lambda *given: gate.wait(60) and real(*given))
    sequence = b.add(to_go_on(request, left))
    for _ in range(20):
        b.step()
    assert sequence.stage is Stage.WAITING
    b.abort(sequence)
    b.check()
    assert b.idle
    gate.set()
