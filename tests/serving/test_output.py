"""Text behind stop strings: however tokens split a text, the cut is that of the whole text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.output import TextOutput

LETTERS = "abc"


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, pieces: list[str]):
        self._pieces = pieces

    def knows(self, token_id):
        return 0 <= token_id < len(self._pieces)

    def decode(self, ids, *, skip_special=False):
        return "".join(self._pieces[i] for i in ids)


def one_shot(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text up to the stop string that is complete first; of two complete at once the longer."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def shown(pieces: list[str], stops: tuple[str, ...]) -> tuple[TextOutput, list[str]]:
    output = TextOutput(Pieces(pieces), stops)
    out = []
    for token in range(len(pieces)):
        out.append(output.push(token))
        if output.stopped is not None:
            break
    return output, [*out, output.finish()]


PIECES = st.lists(st.text(LETTERS, max_size=4), max_size=8)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3).map(tuple)


@given(PIECES, STOPS)
@example(["abca"], ("abca", "bc"))
@example(["abc", "a"], ("abca", "bc"))
@example(["aab"], ("ab", "aab", "b"))
@settings(max_examples=400, deadline=None)
def test_any_split_gives_the_cut_of_the_whole_text(pieces, stops):
    want, stopped = one_shot("".join(pieces), stops)
    output, out = shown(pieces, stops)
    assert "".join(out) == output.text == want
    assert (output.stopped is not None) == stopped
    for stop in stops:
        assert stop not in output.text


@given(PIECES, STOPS)
@settings(max_examples=200, deadline=None)
def test_no_text_is_taken_back_and_none_is_held_without_need(pieces, stops):
    want, _ = one_shot("".join(pieces), stops)
    output, text = TextOutput(Pieces(pieces), stops), ""
    for token in range(len(pieces)):
        text += output.push(token)
        assert want.startswith(text)
        if output.stopped is not None:
            return
        held = "".join(pieces[: token + 1])[len(text) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stopped"),
    [
        (["ab", "c"], (), "abc", None),
        (["a", "b", "c"], ("bc",), "a", "bc"),
        (["abcabc"], ("c",), "ab", "c"),
        (["ab"], ("abc",), "ab", None),
        (["c"], ("c",), "", "c"),
        ([], ("c",), "", None),
    ],
)
def test_named_cases(pieces, stops, text, stopped):
    output, _ = shown(pieces, stops)
    assert (output.text, output.stopped) == (text, stopped)


def test_nothing_comes_after_a_stop_string():
    output = TextOutput(Pieces(["abc", "b"]), ("b",))
    assert [output.push(0), output.push(1), output.finish()] == ["a", "", ""]


def test_an_id_without_a_token_has_no_text(tiny_dir):
    tokenizer = Tokenizer.from_dir(tiny_dir, Config.preset("tiny"))
    output = TextOutput(tokenizer)
    pieces = [output.push(token) for token in (*tokenizer.encode("ab", bos=False), 511, 600, 2**40)]
    assert "".join(pieces) + output.finish() == tokenizer.decode(
        [*tokenizer.encode("ab", bos=False), 511], skip_special=True
    )
