"""Whatever is drafted, and whatever becomes of it, the tokens are those of plain decoding."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.compile_counter import CompileCounter
from serving.request import Request
from serving.sequence import Stage
from tests.serving.engine.support import (
    ask,
    assert_nothing_leaks,
    assert_oracle,
    assert_same,
    between_chunks,
    drain,
    each,
    everyone_makes_way,
    free_pages,
    poison,
    prompt,
    recorded,
    run,
)
from tests.serving.speculative.support import LENGTH, SLOTS, Drafter, right_for_a_while

# (prompt, new tokens): around pages, windows and pairs; more of them than slots.
SHAPES = [(90, 20), (1, 25), (16, 17), (64, 5), (17, 1), (65, 60), (2, 3), (33, 14), (15, 30)]
SHAPES += [(100, 28), (31, 2), (48, 12)]
SAMPLED = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8, "top_k": 40},
    {"temperature": 1.5, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 6, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "seed": 7, "logit_bias": ((5, 4.0), (6, -100.0))},
]


def requests(offset: int = 0) -> list[Request]:
    return [ask(prompt(offset + i, n), new) for i, (n, new) in enumerate(SHAPES)]


def sampled_requests() -> list[Request]:
    return [ask(prompt(70 + i, 20 + i), 25, **options) for i, options in enumerate(SAMPLED)]


def texts_of(plain, wanted) -> dict:
    """The answers of plain decoding."""
    plain.ranks[0].cache.clear()
    sequences = run(plain, wanted)
    plain.ranks[0].cache.clear()
    return {sequence.request: sequence.result for sequence in sequences}


@pytest.fixture(scope="module")
def want(plain) -> dict:
    return texts_of(plain, [*requests(), *sampled_requests()])


def tokens_of(want: dict) -> dict:
    return {request: result.token_ids for request, result in want.items()}


def assert_answers(sequences, want) -> None:
    for sequence in sequences:
        assert_same(sequence.result, want[sequence.request])


def test_the_models_own_drafts(engine, want, oracle):
    made = Drafter(engine)
    sequences = run(engine, requests())
    assert_answers(sequences, want)
    for sequence in sequences[:3]:
        assert_oracle(oracle, sequence)
    assert len(made.made) > 30 and engine.acceptance.accepted > 0


@pytest.mark.parametrize(("seed", "apart"), [(0, 0), (1, 2)])
def test_any_number_of_right_drafts(engine, want, seed, apart):
    """Slots end in mid-block and are taken by others, each at its own pace."""
    drafter = Drafter(engine, right_for_a_while(tokens_of(want), seed))
    sequences = run(engine, requests(), apart=apart)
    assert_answers(sequences, want)
    seen, total = engine.acceptance, sum(new for _, new in SHAPES)
    assert seen.accepted == sum(sequence.result.accepted for sequence in sequences)
    assert seen.drafted == sum(sequence.result.drafted for sequence in sequences)
    assert seen.accepted == sum(seen.by_position) and seen.by_position[-1] > 0
    # Every token but the first of each answer comes out of a step, one of them undrafted.
    assert total - len(SHAPES) - seen.accepted >= seen.steps > 0.25 * total
    assert len(drafter.made) < 64


def test_all_right_is_a_block_a_step(engine, want):
    """60 tokens: the first, nine blocks of six, and five more."""
    [request] = [request for request in requests() if request.max_new_tokens == 60]
    texts = tokens_of(want)
    drafter = Drafter(engine, lambda s, p, n: [*texts[s.request][p + 1 - s.length :], *[0] * n][:n])
    [sequence] = run(engine, [request])
    assert_answers([sequence], want)
    assert sequence.result.accepted == 9 * LENGTH + 4 == sequence.result.drafted
    assert engine.acceptance.tokens_per_step == pytest.approx(1 + 49 / 10)
    assert len(drafter.made) <= 20  # a second step is dispatched before the first one is read


def test_sampled_requests_draw_the_same_tokens(engine, want):
    """Temperature, filters, penalties and biases, with their seeds; counts go on in the block."""
    Drafter(engine, right_for_a_while(tokens_of(want), 4))
    sequences = run(engine, sampled_requests())
    assert_answers(sequences, want)
    assert all(sequence.result.accepted > 5 for sequence in sequences)


def test_without_overlap_the_tokens_are_the_same(speculating, want):
    engine = speculating.make(overlap=False)
    Drafter(engine, right_for_a_while(tokens_of(want), 5))
    assert_answers(run(engine, requests()), want)
    assert_nothing_leaks(engine)


@pytest.mark.parametrize("when", [between_chunks(), each(4)])
def test_preemption_changes_nothing(engine, want, when):
    log = recorded(engine, everyone_makes_way(when))
    Drafter(engine, right_for_a_while(tokens_of(want), 6))
    assert_answers(run(engine, [*requests(), *sampled_requests()]), want)
    assert log.preempted


def test_a_small_pool_preempts_and_changes_nothing(speculating, want):
    engine = speculating.make(pool=20)
    log = recorded(engine)
    Drafter(engine, right_for_a_while(tokens_of(want), 7))
    assert_answers(run(engine, requests()), want)
    assert Stage.DECODE in log.preempted
    assert_nothing_leaks(engine)


def test_one_request_may_fill_the_pool(speculating, want):
    engine = speculating.make(pool=8)
    Drafter(engine, right_for_a_while(tokens_of(want), 8))
    wanted = [
        request for request in requests() if len(request.prompt) + request.max_new_tokens == 128
    ]
    assert_answers(run(engine, wanted), want)
    assert_nothing_leaks(engine)


def test_requests_may_do_without(engine, want):
    """Some requests of a batch are never drafted for."""
    mixed = [replace(request, speculative=bool(i % 2)) for i, request in enumerate(requests())]
    known = {
        replace(request, speculative=s): result
        for request, result in want.items()
        for s in (True, False)
    }
    Drafter(engine, right_for_a_while(tokens_of(known), 9))
    sequences = run(engine, mixed)
    assert_answers(sequences, known)
    for sequence in sequences:
        assert (sequence.result.drafted > 0) <= sequence.request.speculative
    assert sum(sequence.result.drafted > 0 for sequence in sequences) >= 5


def test_requests_with_a_grammar_are_decoded_without_drafts(engine, plain, grammars, want):
    """F24: in one batch with requests that have drafts; the host follows the grammar by itself."""
    grammar = grammars.json_object()
    structured = [
        ask(prompt(90 + i, 12), 20, grammar=grammar, temperature=1.0, seed=i, stop_ids=(1,))
        for i in range(3)
    ]
    known = want | texts_of(plain, structured)
    Drafter(engine, right_for_a_while(tokens_of(known), 15))
    sequences = run(engine, [*structured, *requests()[:5]])
    assert_answers(sequences, known)
    assert [sequence.result.drafted for sequence in sequences[:3]] == [0] * 3
    assert all(sequence.result.drafted for sequence in sequences[3:] if sequence.length != 17)
    for sequence in sequences[:3]:
        assert sequence.output.text.lstrip().startswith("{")


def test_nothing_is_drafted_for_nobody(engine):
    drafter = Drafter(engine)
    run(engine, [replace(request, speculative=False) for request in requests()[:3]])
    assert drafter.made == [] and engine.acceptance.steps == 0


def test_larger_batches_are_not_drafted_for(speculating, want):
    """Beyond three decoding requests; below it drafting goes on behind tokens that were not."""
    engine = speculating.make(max_batch=3)
    log = recorded(engine)
    Drafter(engine, right_for_a_while(tokens_of(want), 10))
    assert_answers(run(engine, requests(), apart=1), want)
    for plan in log.plans:
        assert plan.drafts == (LENGTH if 0 < len(plan.decode) <= 3 else 0) or plan.preempt
    drafting = [plan.drafts for plan in log.plans if plan.decode]
    changes = [a != b for a, b in pairwise(drafting)]
    assert sum(changes) >= 2 and max(len(plan.decode) for plan in log.plans) > 5
    assert_nothing_leaks(engine)


def test_poisoned_free_slots_and_pages_change_nothing(engine, want):
    Drafter(engine, right_for_a_while(tokens_of(want), 11))
    for _ in range(2):
        engine.ranks[0].cache.clear()
        poison(engine, free_pages(engine), range(SLOTS))
        assert_answers(run(engine, requests()[:8], apart=1), want)


def test_draft_windows_are_rebuilt_behind_a_hit(engine):
    """F07: what the slots' draft windows held before the hit is never read."""
    base, made = prompt(20, 90), []
    run(engine, [ask(base, 1)])
    for value in (0.0, np.nan):
        cache = engine.executor.cache
        rows = [_filled(ring.rows, value) for ring in cache.drafts]
        drafts = [replace(ring, rows=own) for ring, own in zip(cache.drafts, rows, strict=True)]
        engine.executor.cache = replace(cache, drafts=tuple(drafts))
        drafter = Drafter(engine)
        [sequence] = run(engine, [ask(base, 12)])
        assert sequence.result.cached_tokens == 80
        engine.executor.programs = drafter.programs
        made.append(drafter.made)
    for one, other in zip(*made, strict=True):
        assert np.isfinite(np.asarray(other.confidence)[0]).all()
        np.testing.assert_array_equal(np.asarray(one.ids)[0], np.asarray(other.ids)[0])
        np.testing.assert_array_equal(one.confidence[0], other.confidence[0])


def _filled(rows, value: float):
    return jax.tree.map(lambda plane: jnp.full_like(plane, value), rows)


def test_generated_pages_are_cached_as_plain_decoding_writes_them(engine, plain, want):
    """A second turn that continues an answer adopts its pages; only accepted tokens are in them."""
    texts = tokens_of(want)
    [first] = [request for request in requests() if request.max_new_tokens == 60]
    Drafter(engine, right_for_a_while(texts, 13))
    run(engine, [first])
    turn = ask([*first.prompt, *texts[first][:40], 9, 8], 6)
    plain.ranks[0].cache.clear()
    run(plain, [first])
    [cold] = run(plain, [turn])
    [warm] = run(engine, [turn])
    assert warm.result.cached_tokens == cold.result.cached_tokens == 96
    assert_same(warm.result, cold.result)
    plain.ranks[0].cache.clear()


def test_aborts_at_every_step(engine, want):
    Drafter(engine, right_for_a_while(tokens_of(want), 14))
    rng, alive, wanted = np.random.default_rng(3), [], requests()
    for step in range(60):
        if step < 45:
            alive.append(engine.add(wanted[step % len(wanted)]))
        alive = [s for s in alive if s.stage is not Stage.DONE]
        if alive and step % 2:
            engine.abort(alive.pop(int(rng.integers(len(alive)))))
        engine.step()
        engine.check()
    drain(engine)


def test_nothing_compiles_after_warm_up(engine, want):
    counter = CompileCounter()
    counter.start()
    log = recorded(engine, everyone_makes_way(each(5)))
    run(engine, [*requests(), *sampled_requests()], apart=1)
    assert log.preempted and counter.count == 0
