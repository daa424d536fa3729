"""Penalties, bias, lengths, stops and seeds, in batches of unlike requests."""

from collections.abc import Callable

import numpy as np
import pytest

from serving.request import Request
from tests.serving.engine.support import (
    TIE,
    ask,
    assert_same,
    each,
    everyone_makes_way,
    prompt,
    recorded,
    run,
    solo,
)

Row = np.ndarray
Rule = Callable[[Row, list[int]], Row]


def assert_ruled(oracle, sequence, rule: Rule, *, replay: bool = True) -> None:
    """Each token is the best of the oracle's logits under a rule of (logits, tokens so far), which
    changed at least one of them.
    """
    out, request = sequence.result.token_ids, sequence.request
    hits = (sequence.result.cached_tokens,) if sequence.result.cached_tokens else ()
    fed = [*request.prompt, *out[:-1]]
    rows = oracle.logits(fed, sequence.length, hits=hits, replay=replay)
    assert oracle.margin > TIE
    assert out == [int(rule(row, out[:i]).argmax()) for i, row in enumerate(rows)]
    assert out != rows.argmax(-1).tolist()


def penalties(request: Request) -> Rule:
    def rule(row: Row, out: list[int]) -> Row:
        row = row.copy()
        seen = list({*request.prompt, *out})
        factor = request.repetition_penalty
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
        for token in set(out):
            row[token] -= request.frequency_penalty * out.count(token) + request.presence_penalty
        return row

    return rule


# Penalties change something only where tokens repeat: negative ones make them.
PENALISED = [
    ask(prompt(1, 30), 10, repetition_penalty=2.0),
    ask(prompt(2, 70), 10, repetition_penalty=0.5),
    ask(prompt(3, 20), 10, frequency_penalty=-2.0, presence_penalty=-2.0),
    ask(prompt(4, 33), 10, repetition_penalty=0.7, frequency_penalty=2.0, presence_penalty=0.5),
]


def test_penalties_equal_the_oracle_in_a_preempting_batch(engine, oracle):
    recorded(engine, everyone_makes_way(each(4)))
    plain = [ask(prompt(5 + i, 25), 10) for i in range(2)]
    free = [solo(engine, request).token_ids for request in plain]
    sequences = run(engine, [*plain, *PENALISED])
    for sequence, want in zip(sequences, free, strict=False):
        assert sequence.result.token_ids == want
    for sequence in sequences[2:]:
        assert_ruled(oracle, sequence, penalties(sequence.request))


def test_penalties_do_not_stay_in_a_slot(engine):
    """The same four slots again, without and with penalties."""
    plain = [ask(request.prompt, 6) for request in PENALISED]
    want = [solo(engine, request) for request in plain]
    run(engine, PENALISED)
    engine.ranks[0].cache.clear()
    for sequence, result in zip(run(engine, plain), want, strict=True):
        assert_same(sequence.result, result)


def test_penalties_of_a_warm_turn_count_the_cached_prompt(engine, oracle):
    base = prompt(2, 70)
    run(engine, [ask(base, 1)])
    [sequence] = run(engine, [ask(base, 6, repetition_penalty=0.5)])
    assert sequence.result.cached_tokens == 64
    assert_ruled(oracle, sequence, penalties(sequence.request))


def test_bias_equals_the_oracle(engine, oracle):
    base = prompt(6, 30)
    free = solo(engine, ask(base, 5)).token_ids
    request = ask(base, 5, logit_bias=((free[0], -100.0), (77, 3.5), (78, 3.0)))

    def rule(row, _):
        bias = np.zeros(len(row))
        bias[[token for token, _ in request.logit_bias]] = [b for _, b in request.logit_bias]
        return row + bias

    [sequence, _] = run(engine, [request, ask(base, 5)])
    assert_ruled(oracle, sequence, rule)
    assert free[0] not in sequence.result.token_ids
    [forced] = run(engine, [ask(base, 4, logit_bias=((9, 100.0),))])
    assert forced.result.token_ids == [9] * 4


def test_log_probabilities_are_those_of_the_logits_without_rules(engine):
    base = prompt(6, 30)
    engine.ranks[0].cache.clear()
    free, forced = (
        r.result for r in run(engine, [ask(base, 1), ask(base, 1, logit_bias=((9, 100.0),))])
    )
    assert forced.logprobs[0].top == free.logprobs[0].top
    assert forced.logprobs[0].token_id == 9 and forced.logprobs[0].logprob < -1


def test_stop_ids_and_the_minimum_before_them(engine):
    base = prompt(7, 24)
    free = solo(engine, ask(base, 12))
    stop = free.token_ids[2]
    assert stop not in free.token_ids[:2]
    requests = [
        ask(base, 12, stop_ids=(stop,)),
        ask(base, 12, stop_ids=(stop,), min_tokens=2),
        ask(base, 12, stop_ids=(stop,), min_tokens=3),
        ask(base, 12, stop_ids=(stop,), min_tokens=12),
    ]
    engine.ranks[0].cache.clear()
    kept, early, later, never = (sequence.result for sequence in run(engine, requests))
    assert kept.token_ids == early.token_ids == free.token_ids[:3]
    assert kept.finish_reason == early.finish_reason == "stop"
    assert later.token_ids[:2] == free.token_ids[:2] and later.token_ids[2] != stop
    assert len(later.token_ids) > 3
    assert stop not in never.token_ids and len(never.token_ids) == 12
    assert never.finish_reason == "length"


def test_stop_strings_cut_the_text(engine):
    base = prompt(8, 24)
    free = solo(engine, ask(base, 12))
    text = engine.tokenizer.decode(free.token_ids, skip_special=True)
    # Two characters across the border of two tokens, if the text has such a place.
    start = next(i for i in range(4, len(text) - 2) if text.find(text[i : i + 2]) == i)
    stop = text[start : start + 2]
    engine.ranks[0].cache.clear()
    [sequence, other] = run(engine, [ask(base, 12, stop=("zz~", stop)), ask(base, 12)])
    assert sequence.output.text == text[:start] and sequence.output.stopped == stop
    assert sequence.result.finish_reason == "stop"
    assert sequence.result.token_ids == free.token_ids[: len(sequence.result.token_ids)]
    assert len(sequence.result.token_ids) < 12
    assert other.output.text == text and other.result.finish_reason == "length"


def test_a_stop_string_that_does_not_complete_is_shown_at_the_end(engine):
    base = prompt(8, 24)
    free = solo(engine, ask(base, 6))
    text = engine.tokenizer.decode(free.token_ids, skip_special=True)
    [sequence] = run(engine, [ask(base, 6, stop=(text[-3:] + "~never~",))])
    assert sequence.output.text == text and sequence.result.finish_reason == "length"


SAMPLED = {"temperature": 1.5, "top_k": 50, "top_p": 0.95}


def test_a_seed_decides_alone(engine):
    """Not the batch, the slot, the neighbours, the hit or a preemption."""
    requests = [ask(prompt(9 + i, 20 + 9 * i), 12, seed=7 + i, **SAMPLED) for i in range(4)]
    alone = [solo(engine, request) for request in requests]
    noise = [ask(prompt(50 + i, 15), 9, seed=90 + i, temperature=2.0) for i in range(4)]
    recorded(engine, everyone_makes_way(each(5)))
    sequences = run(engine, [*noise[:2], *requests, *noise[2:]], apart=1)[2:6]
    for sequence, want in zip(sequences, alone, strict=True):
        assert_same(sequence.result, want)
    other = solo(engine, ask(requests[0].prompt, 12, seed=99, **SAMPLED))
    assert other.token_ids != alone[0].token_ids


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}])
def test_filters_at_their_end_are_greedy(engine, options):
    base = prompt(11, 30)
    want = solo(engine, ask(base, 8))
    got = solo(engine, ask(base, 8, temperature=3.0, seed=5, **options))
    assert got.token_ids == want.token_ids


def test_min_p_keeps_only_what_is_probable_enough(engine):
    base = prompt(12, 30)
    [sequence] = run(engine, [ask(base, 40, temperature=1.0, min_p=0.3, seed=3)])
    for token in sequence.result.logprobs:
        assert token.logprob >= token.top[0][1] + np.log(0.3) - 1e-5
    assert any(token.token_id != token.top[0][0] for token in sequence.result.logprobs)
