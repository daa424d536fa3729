"""Aborts, pressure, priorities, and that nothing is left behind."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv41_jax.errors import UserError
from serving.engine import Engine
from serving.request import Request
from serving.sequence import Stage
from serving.swap import private
from tests.serving.engine.support import (
    OPTIONS,
    SLOTS,
    ask,
    assert_nothing_leaks,
    assert_oracle,
    assert_same,
    drain,
    free_pages,
    page_bits,
    poison,
    prompt,
    recorded,
    run,
    solo,
)

LONG = prompt(1, 100)


def abort_when(engine, request: Request, when) -> None:
    """Step until ``when(sequence)``, with neighbours running, then abort."""
    sequence = engine.add(request)
    for _ in range(200):
        if when(sequence):
            break
        engine.step()
        engine.check()
    else:
        raise AssertionError("never came to it")
    engine.abort(sequence)
    engine.check()
    assert sequence.stage is Stage.DONE and sequence.result.finish_reason == "abort"
    seen = len(sequence.result.token_ids)
    engine.abort(sequence)
    events = drain(engine)
    assert all(event.sequence is not sequence for event in events)
    assert len(sequence.result.token_ids) == seen


STAGES = {
    "waiting": lambda s: s.stage is Stage.WAITING,
    "between chunks": lambda s: s.stage is Stage.PREFILL and s.computed == 64,
    "first token on its way": lambda s: s.dispatched == 1 and not s.result.token_ids,
    "decoding": lambda s: len(s.result.token_ids) == 3,
    "last token on its way": lambda s: s.all_dispatched,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("busy", [False, True])
def test_abort_frees_everything_and_touches_nobody(engine, oracle, stage, busy):
    neighbours = [engine.add(ask(prompt(2 + i, 20 + i), 9)) for i in range(3 if busy else 0)]
    abort_when(engine, ask(LONG, 8), STAGES[stage])
    [rank] = engine.ranks
    assert rank.pool.pages - rank.pool.free == len(rank.cache)
    for sequence in neighbours:
        assert_oracle(oracle, sequence)
    rank.cache.clear()
    assert rank.pool.free == rank.pool.pages
    [later] = run(engine, [ask(LONG, 8)])
    assert_oracle(oracle, later)


def test_a_preempted_state_leaves_the_device(engines, oracle):
    engine = engines.make(pool=8)
    first, second = [engine.add(ask(prompt(6 + i, 40), 40)) for i in range(2)]
    while second.stage is not Stage.SWAPPED:
        engine.step()
    assert not any(isinstance(a, np.ndarray) for a in jax.tree.leaves(second.saved.state))
    engine.step()
    assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(second.saved.state))
    drain(engine)
    for sequence in (first, second):
        assert_oracle(oracle, sequence)


def test_abort_of_a_preempted_request(engines, oracle):
    engine = engines.make(pool=8)
    first, second = (engine.add(ask(prompt(6 + i, 40), 40)) for i in range(2))
    while second.stage is not Stage.SWAPPED:
        engine.step()
        engine.check()
    engine.abort(second)
    drain(engine)
    assert second.saved is None and second.stage is Stage.DONE
    assert_oracle(oracle, first)
    assert_nothing_leaks(engine)


def test_what_an_aborted_prompt_wrote_is_hit(engine, oracle):
    abort_when(engine, ask(LONG, 8), STAGES["between chunks"])
    [later] = run(engine, [ask(LONG, 8)])
    assert later.result.cached_tokens == 64
    assert_oracle(oracle, later)


def test_abort_at_every_step_of_a_busy_engine(engine):
    """At each step another request goes, whatever stage it is in."""
    rng, alive = np.random.default_rng(3), []
    for step in range(120):
        if step < 80:
            length, new = rng.integers(1, 90), rng.integers(1, 20)
            alive.append(engine.add(ask(prompt(1000 + step, length), int(new))))
        alive = [s for s in alive if s.stage is not Stage.DONE]
        if alive and step % 2:
            engine.abort(alive.pop(int(rng.integers(len(alive)))))
        engine.step()
        engine.check()
    drain(engine)
    assert_nothing_leaks(engine)


def test_64_requests_in_a_pool_at_60_percent(engines, oracle):
    """Running alone, four requests of the longest kind would hold 60 % more than there is."""
    engine = engines.make(pool=15)
    log = recorded(engine)
    rng = np.random.default_rng(4)
    shapes = [(int(rng.integers(1, 70)), int(rng.integers(1, 30))) for _ in range(64)]
    requests = [ask(prompt(300 + i, n), new) for i, (n, new) in enumerate(shapes)]
    sequences = run(engine, requests)
    assert log.preempted
    for sequence, (_, new) in zip(sequences, shapes, strict=True):
        assert len(sequence.result.token_ids) == new
    for sequence in sequences[::16]:
        assert_oracle(oracle, sequence)
    assert_nothing_leaks(engine)


def test_one_request_may_fill_the_pool(engines, oracle):
    engine = engines.make(pool=8)
    run(engine, [ask(prompt(9, 60), 4)])
    [sequence] = run(engine, [ask(prompt(10, 100), 28)])
    assert_oracle(oracle, sequence)
    assert_nothing_leaks(engine)


def test_priorities_decide_who_starts_and_who_makes_way(engines):
    engine = engines.make(pool=10)
    log = recorded(engine)
    kept = [engine.add(ask(prompt(20 + i, 30), 30), priority=1) for i in range(2)]
    urgent = engine.add(ask(prompt(30, 30), 30), priority=0)
    while len(urgent.result.token_ids) < 30:
        engine.step()
        engine.check()
    victims = [s for plan in log.plans for s in plan.preempt]
    assert victims and urgent not in victims
    drain(engine)
    assert all(len(s.result.token_ids) == 30 for s in kept)
    assert_nothing_leaks(engine)


def test_poisoned_free_slots_and_pages_change_nothing(engine):
    """F29, F36: what a freed slot or page holds, its rows still tagged, is never seen."""
    requests = [ask(prompt(40 + i, n), 8) for i, n in enumerate((1, 15, 17, 40, 90))]
    want = [solo(engine, request) for request in requests]
    for _ in range(2):
        engine.ranks[0].cache.clear()
        poison(engine, free_pages(engine), range(SLOTS))
        for sequence, result in zip(run(engine, requests, apart=1), want, strict=True):
            assert np.isfinite([token.logprob for token in sequence.result.logprobs]).all()
            assert_same(sequence.result, result)


def test_idle_rows_write_nothing(engine):
    """F36: one request decodes in a batch of four; free pages and the other slots keep each bit."""
    sequence = engine.add(ask(prompt(50, 20), 40))
    engine.step()
    others = [slot for slot in range(SLOTS) if slot != sequence.slot]

    def slot_bits() -> list[bytes]:
        private_rows = jax.tree.leaves(private(engine.executor.cache))
        return [np.asarray(leaf)[others].tobytes() for leaf in private_rows]

    pages = {page: page_bits(engine, [page]) for page in free_pages(engine)}
    slots = slot_bits()
    while not engine.idle:
        engine.step()
        for page in sequence.pages:
            pages.pop(page, None)
    assert len(pages) > 15 and slot_bits() == slots
    for page, bits in pages.items():
        assert page_bits(engine, [page]) == bits


def test_events_carry_every_token_once_and_in_order(engine):
    requests = [ask(prompt(60 + i, 10 + i), 9) for i in range(6)]
    sequences = [engine.add(request) for request in requests]
    events = drain(engine)
    for sequence in sequences:
        mine = [event for event in events if event.sequence is sequence]
        assert [event.token.token_id for event in mine] == sequence.result.token_ids
        assert [event.finished for event in mine] == [False] * 8 + [True]
        assert "".join(event.text for event in mine) == sequence.output.text
        assert sequence.result.ttft_ms > 0 and sequence.result.tpot_ms > 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(prompt(0, 100), 29), "max_new_tokens"),
        (ask((1,), 4, stop_ids=tuple(range(9))), "stop_ids"),
        (ask((1,), 4, logit_bias=tuple((i, 1.0) for i in range(301))), "logit_bias"),
        (Request((1,), 4, logprobs=21), "logprobs"),
        (Request((1,), 4, prompt_logprobs=1), "prompt_logprobs"),
        (ask((512,), 4), "512"),
        (ask((), 4), "prompt"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(engine, request_, field):
    with pytest.raises(UserError, match=field):
        engine.add(request_)
    assert engine.idle


def test_limits_of_the_engine(engines):
    """Without a warm-up: these engines run nothing."""
    long = ask(prompt(0, 60), 5)
    small = Engine(engines.model, engines.ops, replace(OPTIONS, pages=4))
    with pytest.raises(UserError, match="at most 64"):
        small.add(long)
    short = Engine(engines.model, engines.ops, replace(OPTIONS, max_tokens=48))
    with pytest.raises(UserError, match="at most 48"):
        short.add(long)
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        short.add(ask((1,), 2, stop=("a",)))
