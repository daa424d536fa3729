"""Warm turns: what they adopt, what they recompute, and that both are the stated rule."""

import contextlib

import numpy as np
import pytest

from tests.oracle import log_softmax
from tests.serving.engine.support import (
    PAGE,
    SLOTS,
    WINDOW,
    Tied,
    ask,
    assert_nothing_leaks,
    assert_oracle,
    assert_same,
    each,
    everyone_makes_way,
    free_pages,
    page_bits,
    poison,
    prompt,
    recorded,
    run,
    solo,
)
from tests.tolerances import REPLAY_LOGITS_ABS


def warm(engine, tokens, hit: int, new: int = 6):
    """The sequence of a prompt whose first ``hit`` tokens, whole pages, a cold request cached."""
    engine.ranks[0].cache.clear()
    run(engine, [ask(tokens[: hit + 1], 1)])
    [sequence] = run(engine, [ask(tokens, new)])
    return sequence


@pytest.mark.parametrize(("name", "hit"), [("p37", 32), ("p96", 32), ("p96", 80)])
def test_goldens_of_both_sided_replay(engine, goldens, name, hit):
    golden = goldens("replay_fp32.npz")
    want = golden[f"{name}.hit{hit}.logits"].astype(np.float64)
    result = warm(engine, golden[f"{name}.input_ids"], hit, len(want)).result
    assert result.cached_tokens == hit
    np.testing.assert_array_equal(result.token_ids, golden[f"{name}.hit{hit}.tokens"])
    for row, token in zip(log_softmax(want), result.logprobs, strict=True):
        ids, values = zip(*token.top, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=REPLAY_LOGITS_ABS)


@pytest.mark.parametrize("name", ["p5", "p37", "p96"])
def test_goldens_of_decoder_replay(engine, goldens, name):
    golden = goldens("replay_fp32.npz")
    [sequence] = run(engine, [ask(golden[f"{name}.input_ids"], 9)])
    np.testing.assert_array_equal(sequence.result.token_ids, golden[f"{name}.decoder.tokens"])


def check_rows(sequence, hit: int, length: int) -> None:
    assert sequence.result.cached_tokens == hit
    assert sequence.result.encoder_rows == length - hit + WINDOW
    assert sequence.result.decoder_rows == WINDOW


@pytest.mark.parametrize(
    ("hit", "length"),
    [(32, 33), (32, 34), (32, 47), (48, 64), (48, 95), (64, 66), (80, 81), (96, 113)],
)
def test_other_lengths_equal_the_oracle(engine, oracle, hit, length):
    sequence = warm(engine, prompt(hit * 200 + length, length), hit)
    check_rows(sequence, hit, length)
    assert_oracle(oracle, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("hit", [32, 48, 64, 80])
def test_every_length_behind_a_hit_equals_the_oracle(engine, oracle, hit):
    for length in range(hit + 1, 120):
        for seed in range(5):
            sequence = warm(engine, prompt(1000 * length + seed, length), hit, 4)
            check_rows(sequence, hit, length)
            with contextlib.suppress(Tied):
                assert_oracle(oracle, sequence)
                break
        else:
            raise AssertionError("five ties")


@pytest.mark.parametrize(
    ("shared", "hit"), [(1, 0), (15, 0), (16, 0), (17, 0), (31, 0), (32, 32), (33, 32), (63, 48)]
)
def test_only_whole_pages_beyond_a_window_are_adopted(engine, oracle, shared, hit):
    """F57, F58."""
    base = prompt(1, 70)
    run(engine, [ask(base, 1)])
    [sequence] = run(engine, [ask([*base[:shared], *prompt(2, 70 - shared)], 3)])
    assert sequence.result.cached_tokens == hit
    assert_oracle(oracle, sequence)


@pytest.mark.parametrize("new", [1, 13, 30])
def test_pages_made_while_decoding_are_hit_by_the_next_turn(engine, oracle, new):
    first = prompt(3, 41)
    [turn] = run(engine, [ask(first, new)])
    fed = 41 + new - 1
    [following] = run(engine, [ask([*first, *turn.result.token_ids, *prompt(4, 9)], 6)])
    assert following.result.cached_tokens == fed // PAGE * PAGE
    assert_oracle(oracle, following)


def test_a_stop_token_is_part_of_what_is_cached(engine):
    """The step behind the stop was on its way already, so that its row exists."""
    first = prompt(5, 27)
    free = solo(engine, ask(first, 30))
    at = next(i for i in range(4, 30) if free.token_ids[i] not in free.token_ids[:i])
    first = first[: 32 - (at + 1)] if at < 26 else first
    [turn] = run(engine, [ask(first, 30)])
    stop = turn.result.token_ids[at]
    engine.ranks[0].cache.clear()
    [turn] = run(engine, [ask(first, 30, stop_ids=(stop,))])
    known = [*first, *turn.result.token_ids]
    [following] = run(engine, [ask([*known, 5, 6], 1)])
    # Without a step in flight behind it the last token was never fed.
    assert following.result.cached_tokens == len(known) // PAGE * PAGE


def test_a_conversation_hits_all_but_its_last_page_turn_by_turn(engine, oracle):
    """Each turn's rows are computed behind the hit of that turn, and read by the next one."""
    tokens, hits = list(prompt(22, 40)), ()
    for turn in range(5):
        [sequence] = run(engine, [ask(tokens, 7)])
        assert sequence.result.cached_tokens == (hits[-1] if hits else 0)
        assert_oracle(oracle, sequence, hits=hits)
        hits = (*hits, (len(tokens) + 6) // PAGE * PAGE)
        tokens = [*tokens, *sequence.result.token_ids, *prompt(60 + turn, 9)]


def test_two_conversations_in_turn_recompute_little(engine):
    talks = [list(prompt(7, 40)), list(prompt(8, 44))]
    for turn in range(5):
        for index, tokens in enumerate(talks):
            known = len(tokens)
            tokens += prompt(100 * index + turn, 6) if turn else ()
            [sequence] = run(engine, [ask(tokens, 4)])
            if turn:
                new = len(tokens) - known
                assert sequence.result.encoder_rows <= new + WINDOW + PAGE
            tokens += sequence.result.token_ids


def test_two_conversations_at_once_recompute_little(engine):
    talks = [list(prompt(9, 40)), list(prompt(10, 44))]
    for turn in range(4):
        asked = [ask([*tokens, *(prompt(turn, 6) if turn else ())], 4) for tokens in talks]
        for tokens, sequence in zip(talks, run(engine, asked), strict=True):
            new = sequence.length - len(tokens)
            assert not turn or sequence.result.encoder_rows <= new + WINDOW + PAGE
            tokens[:] = [*sequence.request.prompt, *sequence.result.token_ids]


def test_the_batch_around_a_warm_turn_changes_nothing(engine):
    base = prompt(11, 65)
    asked = [ask([*base[:64], *prompt(n, n)], 8) for n in (17, 18, 33, 36)]
    alone = []
    for request in asked:
        engine.ranks[0].cache.clear()
        run(engine, [ask(base, 1)])
        alone.append(run(engine, [request])[0].result)
        assert alone[-1].cached_tokens == 64
    engine.ranks[0].cache.clear()
    run(engine, [ask(base, 1)])
    recorded(engine, everyone_makes_way(each(4)))
    together = run(engine, [*asked, *(ask(prompt(70 + i, 20), 5) for i in range(3))])
    for sequence, want in zip(together, alone, strict=False):
        assert sequence.result.cached_tokens == 64
        assert_same(sequence.result, want)


def test_shared_pages_stay_bit_identical(engine):
    base = prompt(12, 64)
    [first] = run(engine, [ask([*base, 9], 1)])
    pages = [engine.ranks[0].cache.page(node) for node in first.nodes]
    before = page_bits(engine, pages)
    assert len(pages) == 4
    recorded(engine, everyone_makes_way(each(5)))
    branches = [ask([*base, *prompt(80 + i, 3 + 6 * i)], 10) for i in range(5)]
    for sequence in run(engine, branches, apart=2):
        assert sequence.result.cached_tokens == 64
    assert [engine.ranks[0].cache.page(node) for node in first.nodes] == pages
    assert page_bits(engine, pages) == before


def test_repeats_with_poisoned_slots_and_pages(engine, oracle):
    """F29: A, A, B, A and more, A; between them everything free is overwritten with NaN."""
    a, b = ask(prompt(13, 70), 6), ask(prompt(14, 90), 6)
    hits = []
    for request in (a, a, b, ask([*a.prompt, *prompt(15, 20)], 6), a):
        poison(engine, free_pages(engine), range(SLOTS))
        [sequence] = run(engine, [request])
        hits.append(sequence.result.cached_tokens)
        assert_oracle(oracle, sequence)
    assert hits == [0, 64, 0, 64, 64]


def test_without_replay_a_warm_turn_equals_the_cold_one(engines, oracle, grammars):
    engine = engines.make(replay=False, prefill=((SLOTS, WINDOW),))
    requests = [ask(prompt(16, 70), 8), ask(prompt(16, 100), 8), ask(prompt(17, 30), 8)]
    for _ in range(2):
        for sequence in run(engine, requests):
            result = sequence.result
            assert result.cached_tokens == 0
            assert result.encoder_rows == result.decoder_rows == sequence.length
            assert_oracle(oracle, sequence, replay=False)
    [bound] = run(engine, [ask(prompt(17, 30), 8, grammar=grammars.choice(["mauve", "red"]))])
    assert bound.output.text in ("mauve", "red") and bound.result.finish_reason == "stop"
    assert_nothing_leaks(engine)


def test_without_a_prefix_cache_nothing_is_kept(engines, oracle):
    engine = engines.make(prefix_cache=False)
    for sequence in run(engine, [ask(prompt(18, 70), 4)] * 3):
        assert sequence.result.cached_tokens == 0
        assert_oracle(oracle, sequence)
    [rank] = engine.ranks
    assert len(rank.cache) == 0 and rank.pool.free == rank.pool.pages
