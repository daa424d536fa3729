"""Requests that score their prompt: every row through every layer, nothing cached adopted."""

import numpy as np
import pytest

from dsv41_jax.score import all_logits
from tests.oracle import log_softmax
from tests.serving.engine.support import (
    OPTIONS,
    ask,
    assert_nothing_leaks,
    assert_oracle,
    assert_same,
    between_chunks,
    everyone_makes_way,
    prompt,
    recorded,
    run,
)
from tests.serving.engine.test_rules import assert_ruled, penalties
from tests.tolerances import FP32_LOGITS_ABS


@pytest.fixture(scope="module")
def scoring(engines):
    engine = engines.make(prompt_logprobs=True, prefill=((1, 64),))
    yield engine
    vars(engine.ranks[0]).pop("plan", None)
    assert_nothing_leaks(engine)


def assert_scores(sequence, logits: np.ndarray) -> None:
    """The scores are those of logits [n, V]."""
    scores, tokens = sequence.result.prompt_logprobs, sequence.request.prompt
    assert [score.token_id for score in scores] == list(tokens[1:])
    for row, score in zip(log_softmax(logits.astype(np.float64)), scores, strict=False):
        assert abs(score.logprob - row[score.token_id]) < FP32_LOGITS_ABS
        ids, values = zip(*score.top, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=FP32_LOGITS_ABS)
        assert len(ids) == OPTIONS.logprobs and values[0] >= row.max() - FP32_LOGITS_ABS


def scored(tokens, new: int = 3, **options):
    return ask(tokens, new, prompt_logprobs=4, **options)


@pytest.mark.slow  # both are held against the oracle or the goldens by default, too
def test_scores_are_those_of_the_scoring_command(scoring, engines):
    tokens = prompt(1, 100)
    [sequence] = run(scoring, [scored(tokens)])
    logits = all_logits(engines.model, engines.ops, tokens)
    assert_scores(sequence, logits)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 65, 100])
def test_scores_and_tokens_equal_the_oracle(scoring, oracle, length):
    scoring.ranks[0].cache.clear()
    [sequence] = run(scoring, [scored(prompt(2, length))])
    assert_oracle(oracle, sequence, replay=False)
    assert_scores(sequence, oracle.logits(sequence.request.prompt, 1, replay=False))
    assert sequence.result.encoder_rows == sequence.result.decoder_rows == length


def test_a_scored_request_with_a_grammar(scoring, oracle, grammars):
    """Its first token comes from the program that scores."""
    scoring.ranks[0].cache.clear()
    bound = scored(prompt(2, 65), 8, grammar=grammars.choice(["mauve", "red"]))
    sequences = run(scoring, [bound, scored(prompt(3, 30))])
    assert sequences[0].output.text in ("mauve", "red")
    assert sequences[0].result.token_ids[0] != sequences[0].result.logprobs[0].top[0][0]
    for sequence in sequences:
        assert_scores(sequence, oracle.logits(sequence.request.prompt, 1, replay=False))


def test_scored_and_other_requests_in_one_preempting_batch(scoring, oracle):
    recorded(scoring, everyone_makes_way(between_chunks()))
    base = prompt(3, 90)
    sequences = run(
        scoring, [scored(base), ask(base, 5), scored(prompt(4, 70)), ask(prompt(5, 20))]
    )
    assert_oracle(oracle, sequences[0], replay=False)
    assert_scores(sequences[0], oracle.logits(base, 1, replay=False))
    assert_scores(sequences[2], oracle.logits(sequences[2].request.prompt, 1, replay=False))
    for sequence in (sequences[1], sequences[3]):
        assert not sequence.result.prompt_logprobs
        assert_oracle(oracle, sequence)


def test_what_a_scored_request_wrote_is_hit_and_it_adopts_nothing(scoring, oracle):
    scoring.ranks[0].cache.clear()
    base = prompt(6, 70)
    [first, again] = (run(scoring, [scored(base)])[0] for _ in range(2))
    assert again.result.cached_tokens == 0
    assert_same(again.result, first.result)
    [warm] = run(scoring, [ask(base)])
    assert warm.result.cached_tokens == 64
    assert_oracle(oracle, warm)


def test_penalties_count_no_token_of_a_chunk_before_the_last(scoring, oracle):
    """A prompt of two chunks: what the first chunk would have sampled is nobody's output."""
    request = scored(prompt(7, 100), 8, frequency_penalty=-2.0, presence_penalty=-2.0)
    scoring.ranks[0].cache.clear()
    [sequence] = run(scoring, [request])
    assert_ruled(oracle, sequence, penalties(request), replay=False)
