"""Grammars of the tiny tokenizer: what they allow, and what they refuse without harm."""

import json

import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving import grammar_probe
from serving.grammars import MAX_CHARS, Grammars

VOCAB, END, THINK_END = 512, 1, 509
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "é"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def chain(length: int) -> dict:
    """A schema of references, each to the next."""
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def spelled(text: str) -> list[int]:
    """A token a byte."""
    return [3 + byte for byte in text.encode()]


def allowed(matcher) -> set[int]:
    bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(grammars, grammar, ids: list[int]):
    """A matcher after some ids, each of which it had to allow."""
    matcher = grammar.start()
    for token in ids:
        assert token in allowed(matcher) and not matcher.complete
        grammars.advance([(matcher, token)])
        assert matcher.fault is None
    return matcher


@pytest.mark.parametrize(
    ("make", "texts", "others"),
    [
        (lambda g: g.json_schema(POINT), ['{"x": -12, "y":"é"}', '{\n "x":1,"y":"a"}'], []),
        (lambda g: g.json_schema(json.dumps(POINT)), ['{"x":0,"y":"a"}'], []),
        (lambda g: g.json_object(), ['{"a": {"b": [1, null]}}', "{}"], ["[", "1"]),
        (lambda g: g.choice(['a"\\\n/', "日本"]), ['a"\\\n/', "日本"], ["b", "/"]),
        (lambda g: g.regex("[a-c]{2}x"), ["abx", "ccx"], ["d"]),
        (lambda g: g.lark('start: "a" b\nb: /[0-9]/'), ["a7"], ["7"]),
    ],
    ids=["schema", "schema text", "object", "choice", "regex", "lark"],
)
def test_a_grammar_allows_its_texts_and_then_the_end(grammars, make, texts, others):
    grammar = make(grammars)
    for text in texts:
        matcher = follow(grammars, grammar, spelled(text))
        assert matcher.complete
    assert not {spelled(text)[0] for text in others} & allowed(grammar.start())
    assert END not in allowed(grammar.start())


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(grammars):
    grammar = grammars.regex("ab?(cd)?")
    for text, accepts in (("", False), ("a", True), ("ab", True), ("abc", False)):
        matcher = follow(grammars, grammar, spelled(text))
        assert (END in allowed(matcher)) == accepts and not matcher.complete
    matcher = follow(grammars, grammar, [*spelled("ab"), END])
    assert matcher.complete


def test_longer_tokens_are_allowed_and_markup_is_not(grammars, tiny_dir):
    matcher = follow(grammars, grammars.json_schema({"type": "string"}), spelled('"'))
    data = json.loads((tiny_dir / "tokenizer.json").read_text("utf-8"))
    markup = {token["id"] for token in data["added_tokens"]}
    assert {271, 274, 279} <= allowed(matcher)  # THE, model, token
    assert not markup & allowed(matcher)


def test_markup_that_the_tokenizer_calls_ordinary_is_not_allowed_either(tiny_dir):
    data = json.loads((tiny_dir / "tokenizer.json").read_text("utf-8"))
    for token in data["added_tokens"]:
        token["special"] = False
    made = Grammars(json.dumps(data), Config.from_json(tiny_dir / "config.json"))
    matcher = follow(made, made.json_schema({"type": "string"}), spelled('"'))
    made.close()
    assert 274 in allowed(matcher) and THINK_END not in allowed(matcher)


def test_ids_that_only_the_model_has_are_never_allowed(tiny_dir):
    data = json.loads((tiny_dir / "tokenizer.json").read_text("utf-8"))
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < 400]
    words = data["model"]["vocab"]
    data["model"]["vocab"] = {text: number for text, number in words.items() if number < 400}
    made = Grammars(json.dumps(data), Config.from_json(tiny_dir / "config.json"))
    grammar = made.regex("(.|\n)*")
    made.close()
    assert {END, 274} < allowed(grammar.start()) <= {END, *range(3, 400)}


def test_reasoning_comes_first(grammars):
    grammar = grammars.choice(["ab"]).behind(THINK_END)
    matcher = grammar.start()
    for token in (THINK_END + 1, *spelled("xy"), 300):
        assert allowed(matcher) == set(range(VOCAB)) - {END}
        grammars.advance([(matcher, token)])
    grammars.advance([(matcher, THINK_END)])
    assert allowed(matcher) == allowed(grammars.choice(["ab"]).start())
    grammars.advance([(matcher, token) for token in spelled("a")])
    grammars.advance([(matcher, token) for token in spelled("b")])
    assert matcher.complete


def test_matchers_of_one_grammar_are_independent(grammars):
    grammar = grammars.regex("a+|b+")
    a, b = grammar.start(), grammar.start()
    grammars.advance([(a, spelled("a")[0]), (b, spelled("b")[0])])
    assert allowed(a) & set(range(3, 259)) == set(spelled("a"))
    assert allowed(b) & set(range(3, 259)) == set(spelled("b"))
    assert grammars.regex("a+|b+").compiled is grammar.compiled


def test_a_foreign_token_is_a_fault(grammars):
    matcher = grammars.choice(["ab"]).start()
    grammars.advance([(matcher, spelled("z")[0])])
    assert matcher.fault is not None and not matcher.complete


def test_allows_only(grammars):
    matcher = grammars.choice(["a", "b"]).start()
    a, b = spelled("ab")
    assert matcher.allows_only((a, b, END, b)) and not matcher.allows_only((a, END))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: g.json_schema({"type": "thing"}), "Invalid type: thing"),
        (lambda g: g.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (lambda g: g.json_schema({"$ref": "http://localhost/schema"}), "localhost"),
        (lambda g: g.json_schema({"minimum": float("nan")}), "not valid JSON"),
        (lambda g: g.json_schema("{"), "not valid JSON"),
        (lambda g: g.json_schema(json.loads('{"items":' * 200 + "{}" + "}" * 200)), "limit"),
        (lambda g: g.json_schema({"enum": ["x" * MAX_CHARS]}), f"at most {MAX_CHARS}"),
        (lambda g: g.json_schema({"$ref": "#"}), ""),
        (lambda g: g.json_schema(chain(2000)), "nested too deeply"),
        (lambda g: g.choice([]), "at least one"),
        (lambda g: g.regex("(a"), "regex"),
        (lambda g: g.regex("(?=a)"), "look-around"),
        (lambda g: g.lark("start: nothing"), "nothing"),
    ],
    ids=lambda v: v or None if isinstance(v, str) else "",
)
def test_bad_grammars_are_refused(grammars, make, words):
    with pytest.raises(UserError, match=f"^grammar: .*{words}") as error:
        make(grammars)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    assert grammars.choice(["good"]).start().complete is False


def test_an_endless_compilation_is_cut_off(grammars, monkeypatch):
    monkeypatch.setattr(grammar_probe, "TIMEOUT_S", 0.3)
    with pytest.raises(UserError, match=r"takes longer than 0.3 s"):
        grammars.json_schema({"type": "integer", "multipleOf": 10**7 + 19})
    assert grammars.regex("[0-9]{3}z").start().complete is False


def test_a_dead_process_is_started_again(grammars):
    grammars.regex("first")
    process = grammars._probe._process
    process.kill()
    process.wait()
    assert not grammars.regex("second").start().complete
    assert grammars._probe._process is not process
