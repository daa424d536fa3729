"""Whatever runs beside a request, its tokens are those of its solo run."""

import pytest

from serving.compile_counter import CompileCounter
from serving.sequence import Stage
from tests.serving.engine.support import (
    WINDOW,
    ask,
    assert_nothing_leaks,
    assert_oracle,
    assert_same,
    between_chunks,
    each,
    everyone_makes_way,
    prompt,
    recorded,
    run,
    solo,
)

# (prompt, new tokens): around pages, windows, chunks and pairs.
SHAPES = [
    (90, 12),
    (1, 9),
    (16, 17),
    (64, 5),
    (17, 1),
    (65, 20),
    (2, 3),
    (33, 14),
    (15, 30),
    (100, 4),
]


def requests(offset: int = 0) -> list:
    return [ask(prompt(offset + i, n), new) for i, (n, new) in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def alone(shared_engine):
    return [solo(shared_engine, request) for request in requests()]


def test_solo_runs_equal_the_oracle(engine, oracle):
    for request in requests():
        engine.ranks[0].cache.clear()
        [sequence] = run(engine, [request])
        assert sequence.result.cached_tokens == 0
        assert_oracle(oracle, sequence)


@pytest.mark.parametrize("apart", [0, 1, 3])
def test_full_mixed_batch_equals_solo_runs(engine, alone, apart):
    log = recorded(engine)
    sequences = run(engine, requests(), apart=apart)
    for sequence, want in zip(sequences, alone, strict=True):
        assert_same(sequence.result, want)
    assert any(plan.chunks and plan.decode for plan in log.plans)
    assert max(len(plan.decode) for plan in log.plans) == 4


def test_a_small_pool_preempts_and_changes_nothing(engines, alone, oracle):
    engine = engines.make(pool=12)
    log = recorded(engine)
    sequences = run(engine, requests())
    assert log.preempted
    for sequence, want in zip(sequences, alone, strict=True):
        assert_same(sequence.result, want)
    longer = run(engine, [ask(prompt(60 + i, 40 + i), 40) for i in range(5)])
    for sequence in longer:
        assert_oracle(oracle, sequence)
    assert_nothing_leaks(engine)


@pytest.mark.parametrize("when", [between_chunks(), each(3), each(4), each(7)])
def test_preemption_at_any_stage_changes_nothing(engine, alone, when):
    log = recorded(engine, everyone_makes_way(when))
    for sequence, want in zip(run(engine, requests()), alone, strict=True):
        assert_same(sequence.result, want)
        assert sequence.result.encoder_rows == sequence.length
        assert sequence.result.decoder_rows == min(sequence.length, WINDOW)
    assert log.preempted


@pytest.mark.parametrize("chunk", [1, 2, 3, 15, 16, 17, 63])
def test_the_size_of_chunks_changes_nothing(engines, alone, chunk):
    """F31, F59: odd chunks split pairs, small ones the rows that the decoder layers replay."""
    engine = engines.make(chunk=chunk)
    for sequence, want in zip(run(engine, requests()), alone, strict=True):
        assert_same(sequence.result, want)
    assert_nothing_leaks(engine)


@pytest.mark.parametrize("chunk", [3, 7, 16, 33])
def test_preemption_in_the_middle_of_a_replay_changes_nothing(engines, oracle, chunk):
    """F58: chunks end inside the recomputed rows, and each is followed by a preemption."""
    engine, base = engines.make(chunk=chunk), prompt(20, 97)
    run(engine, [ask(base[:49], 1)])
    log = recorded(engine, everyone_makes_way(between_chunks()))
    sequences = run(engine, [*(ask(prompt(40 + i, 20 + i), 12) for i in range(3)), ask(base, 8)])
    assert sequences[3].result.cached_tokens == 48
    assert sequences[3].result.encoder_rows == 97 - 48 + WINDOW
    assert Stage.PREFILL in log.preempted
    for sequence in sequences:
        assert_oracle(oracle, sequence)
    assert_nothing_leaks(engine)


def test_without_overlap_the_tokens_are_the_same(engines, alone):
    engine = engines.make(overlap=False)
    for sequence, want in zip(run(engine, requests()), alone, strict=True):
        assert_same(sequence.result, want)
    assert_nothing_leaks(engine)


def test_order_of_arrival_changes_nothing(engine, alone):
    sequences = run(engine, requests()[::-1], apart=1)
    for sequence, want in zip(sequences[::-1], alone, strict=True):
        assert_same(sequence.result, want)


def test_nothing_compiles_after_warm_up(engine):
    counter = CompileCounter()
    log = recorded(engine, everyone_makes_way(each(5)))
    penalised = {"repetition_penalty": 1.3, "temperature": 1.0}
    run(engine, [*requests(), *(ask(prompt(i, 40), 6, **penalised) for i in range(4))], apart=1)
    assert log.preempted and max(len(plan.chunks) for plan in log.plans) > 1
    assert counter.count == 0
