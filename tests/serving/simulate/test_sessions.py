"""Sessions: prompts that grow, the same whatever happens; traces in ids of a grain."""

import numpy as np

from serving.bench.workloads import Conversation, Turn
from serving.simulate.sessions import Generator, Trace
from tests.serving.simulate.support import small


def generator(seed=0, grain=16, **values) -> Generator:
    scenario = small(**values)
    return Generator(scenario.workload, grain, 50.0, seed)


def test_a_prompt_holds_all_that_came_before_it():
    session = next(s for s in (generator(seed).next() for seed in range(20)) if s.turns > 2)
    for turn in range(1, session.turns):
        before = np.concatenate([session.prompt(turn - 1), session.answer(turn - 1)])
        now = session.prompt(turn)
        assert len(session.answer(turn - 1)) == session.output(turn - 1)
        assert len(now) > len(before)
        assert (now[: len(before)] == before).all()


def test_sessions_share_their_agents_text_and_nothing_else():
    made = generator()
    prompts = [made.next().prompt(0) for _ in range(30)]
    shared = {tuple(prompt[:16]) for prompt in prompts}
    assert len(shared) == 2
    own = np.concatenate([prompt[16:] for prompt in prompts])
    assert len(set(own.tolist())) == len(own)


def test_contexts_stay_below_the_most():
    made = generator(workload__max_context=1024)
    for session in (made.next() for _ in range(50)):
        assert session.turns == 1 or len(session.prompt(session.turns - 1)) * 16 <= 1024


def test_the_same_seed_makes_the_same_sessions():
    ones, others = (generator(seed=3).starts() for _ in range(2))
    assert [start.at_s for start in ones] == [start.at_s for start in others]
    assert [start.turn for start in ones] == [start.turn for start in others]
    different = generator(seed=4).starts()
    assert [start.at_s for start in ones] != [start.at_s for start in different]


def test_a_steady_state_is_in_the_middle_and_a_fresh_one_at_the_start():
    steady = generator(workload__sessions=200).starts()
    fresh = generator(workload__sessions=200, workload__steady=False).starts()
    assert {start.turn for start in fresh} == {0}
    assert max(start.turn for start in steady) > 2
    turns = [np.mean([start.session.turns for start in starts]) for starts in (steady, fresh)]
    assert turns[0] > turns[1]
    assert all(start.turn < start.session.turns for start in steady)


def test_medians_are_those_of_the_workload():
    made = generator(grain=1, workload__max_context=10**6)
    outputs = np.concatenate([made.next().outputs for _ in range(400)])
    assert abs(np.median(outputs) / 60 - 1) < 0.1
    assert outputs.max() <= 300


def test_a_trace_keeps_its_times_and_what_is_shown_of_answers():
    turns = (Turn((5, 6, 7), 2), Turn((5, 6, 7, 8, 9, 10), 3, 1.5))
    timed = Conversation((Turn((1, 2), 4),), 2.5)
    trace = Trace([Conversation(turns), timed, Conversation(turns)], at_once=1)
    starts = trace.starts()
    assert sorted(start.at_s for start in starts) == [0.0, 2.5]
    session = starts[1].session
    assert session.prompt(1).tolist() == [5, 6, 7, 8, 9, 10]
    assert session.answer(0).tolist() == [8, 9]
    assert len(session.answer(1)) == session.output(1) == 3
    assert session.delay_s(1) == 1.5
    assert trace.next() is not None
    assert trace.next() is None
