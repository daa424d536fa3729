"""Answers that end in mid-block, at each of its places: strings, ids, lengths."""

from dataclasses import replace

import pytest

from dsv41_jax.errors import UserError
from serving.engine import Engine
from serving.request import Request
from serving.speculative import Acceptance, Speculation
from tests.serving.engine.support import ask, assert_same, prompt, run
from tests.serving.speculative.support import LENGTH, OPTIONS, Drafter

BASE = ask(prompt(33, 21), 30)
PLACES = range(2 * (1 + LENGTH))


@pytest.fixture(scope="module")
def answer(plain):
    [sequence] = run(plain, [BASE])
    plain.ranks[0].cache.clear()
    return sequence.result.token_ids


def all_right(answer):
    """Drafts of the answer without an end; beyond it anything."""

    def propose(sequence, position, n):
        first = position + 1 - sequence.length
        return [*answer[first : first + n], *[3] * n][:n]

    return propose


def assert_ends_alike(engine, plain, answer, requests) -> None:
    """Text, tokens and reason are those of plain decoding; whoever takes the slot next is fine."""
    Drafter(engine, all_right(answer))
    after = [ask(BASE.prompt, 9) for _ in requests]
    want = run(plain, [*requests, *after])
    got = run(engine, [*requests, *after])
    for mine, theirs in zip(got, want, strict=True):
        assert_same(mine.result, theirs.result)
        assert mine.output.text == theirs.output.text
    plain.ranks[0].cache.clear()
    assert engine.acceptance.accepted > 0


def test_stop_ids(engine, plain, answer):
    """The stop id is an accepted draft, the token after them, or the first token of all."""
    requests = [replace(BASE, stop_ids=(answer[place],)) for place in PLACES]
    assert_ends_alike(engine, plain, answer, requests)


def test_stop_strings(engine, plain, answer):
    """Strings that a token completes, and strings of parts of two tokens, in or across blocks."""
    text = engine.tokenizer.decode
    pieces = [text([token]) for token in answer]
    stops = [pieces[place] for place in PLACES]
    stops += [pieces[place][-1:] + pieces[place + 1][:1] for place in PLACES]
    requests = [replace(BASE, stop=(stop,)) for stop in stops if stop and "\ufffd" not in stop]
    assert len(requests) > 10
    assert_ends_alike(engine, plain, answer, requests)


def test_lengths(engine, plain, answer):
    requests = [replace(BASE, max_new_tokens=1 + place) for place in PLACES]
    assert_ends_alike(engine, plain, answer, requests)


def test_least_lengths(engine, plain, answer):
    """A stop id that would come early is impossible until then, in whatever row it falls."""
    requests = [
        replace(BASE, stop_ids=(answer[2], answer[5]), min_tokens=least)
        for least in (0, 3, 4, 7, 12)
    ]
    assert_ends_alike(engine, plain, answer, requests)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"length": 6}, "length 6 must be between 1 and 5"),
        ({"length": 0}, "length 0"),
        ({"max_batch": 0}, "drafts 0 must be at least 1"),
        ({"simulated": 0.5}, "acceptance 0.5 must be between 1 and 6"),
        ({"length": 2, "simulated": 3.51}, "3.51 must be between 1 and 3"),
    ],
)
def test_options_out_of_range(values, words):
    with pytest.raises(UserError, match=words):
        Speculation(**values)


def test_a_model_without_stages_is_refused(speculating):
    model = speculating.model
    stages = model.mtp
    model.mtp = type(stages)([])
    with pytest.raises(UserError, match=r"mtp\.\*"):
        Engine(model, speculating.ops, OPTIONS)
    model.mtp = stages


def test_totals():
    seen = Acceptance()
    for drafted, accepted in ((5, 5), (5, 0), (0, 0), (3, 2)):
        seen.add(drafted, accepted)
    assert (seen.steps, seen.drafted, seen.accepted) == (3, 13, 7)
    assert seen.tried == [3, 3, 3, 2, 2]
    assert seen.by_position == [2, 2, 1, 1, 1] and seen.tokens_per_step == pytest.approx(10 / 3)
    assert Acceptance().tokens_per_step == 1


def test_requests_are_drafted_for_by_default():
    assert Request((1,), 1).speculative
