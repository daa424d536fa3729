"""Structured output in batches of unlike requests: the grammar holds, and the neighbours do not
notice.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.grammars import Grammars
from tests.serving.engine.support import (
    ask,
    assert_same,
    drain,
    each,
    everyone_makes_way,
    prompt,
    recorded,
    run,
    solo,
)
from tests.serving.engine.test_rules import assert_ruled

END, THINK_END = 1, 509
TIGHT = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
COLOURS = ["red", "green", "mauve"]
SHAPE = {
    "type": "object",
    "properties": {
        "colour": {"enum": COLOURS},
        "round": {"type": "boolean"},
        "size": {"type": "integer", "minimum": -20, "maximum": 99},
    },
    "required": ["colour", "round", "size"],
    "additionalProperties": False,
    **TIGHT,
}
LIST = {"type": "array", "items": SHAPE["properties"]["colour"], "minItems": 1, "maxItems": 3}


def is_shape(value) -> bool:
    size, rounded = value["size"], value["round"]
    return (
        list(value) == ["colour", "round", "size"]
        and value["colour"] in COLOURS
        and isinstance(rounded, bool)
        and type(size) is int
        and -20 <= size <= 99
    )


def is_list(value) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 3 and set(value) <= set(COLOURS)


def structured(grammars):
    """Greedy and sampled requests with a grammar and what their values have to be."""
    shape, colours = grammars.json_schema(SHAPE), grammars.json_schema(LIST | TIGHT)
    sampled = {"temperature": 1.5, "top_p": 0.95, "seed": 11}
    return [
        (ask(prompt(60, 30), 70, grammar=shape), is_shape),
        (ask(prompt(61, 18), 70, grammar=shape, **sampled), is_shape),
        (ask(prompt(62, 40), 60, grammar=colours, stop_ids=(END,)), is_list),
        (ask(prompt(63, 25), 60, grammar=colours, top_k=40, **sampled), is_list),
    ]


def plain():
    sampled = {"temperature": 1.2, "seed": 5}
    lengths = (20, 33, 9, 50)
    return [ask(prompt(70 + i, n), 24, **(sampled if i % 2 else {})) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def alone(shared_engine, grammars):
    """The four structured requests, then the four plain ones, each alone."""
    requests = [request for request, _ in structured(grammars)] + plain()
    return [solo(shared_engine, request) for request in requests]


def mixed(grammars):
    """Structured and plain requests by turns; their places in ``alone``."""
    order = [0, 4, 5, 1, 2, 6, 3, 7]
    requests = [request for request, _ in structured(grammars)] + plain()
    return order, [requests[i] for i in order]


def assert_alike(sequences, order, alone):
    for sequence, index in zip(sequences, order, strict=True):
        assert_same(sequence.result, alone[index])


def test_structured_and_plain_requests_in_one_batch(engine, grammars, alone):
    compiled = engine.compiles.count
    log = recorded(engine)
    order, requests = mixed(grammars)
    sequences = run(engine, requests, apart=1)
    assert_alike(sequences, order, alone)
    checks = dict(enumerate(valid for _, valid in structured(grammars)))
    for sequence, index in zip(sequences, order, strict=True):
        if index in checks:
            assert sequence.result.finish_reason == "stop"
            assert checks[index](json.loads(sequence.output.text))
    assert engine.compiles.count == compiled
    # A plain request goes into every step in turn, one with a grammar into every other one.
    ahead = [set(a.decode) & set(b.decode) for a, b in zip(log.plans, log.plans[1:], strict=False)]
    assert any(ahead) and not any(s.matcher for both in ahead for s in both)


def test_without_overlap_and_after_preemptions_it_is_the_same(engines, grammars, alone):
    order, requests = mixed(grammars)
    simple = engines.make(overlap=False)
    assert_alike(run(simple, requests), order, alone)
    pressed = engines.make()
    log = recorded(pressed, everyone_makes_way(each(6)))
    assert_alike(run(pressed, requests), order, alone)
    assert any(s.matcher for plan in log.plans for s in plan.preempt)


def test_the_mask_is_that_of_the_grammar(engine, oracle, grammars):
    """Greedy tokens are the best of the oracle's logits among those that a fresh matcher allows."""
    grammar = grammars.json_schema(SHAPE)
    [sequence] = run(engine, [ask(prompt(60, 30), 70, grammar=grammar)])

    def rule(row, out):
        matcher = grammar.start()
        for token in out:
            grammars.advance([(matcher, token)])
        bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
        return np.where(bits[: len(row)], row, -np.inf)

    assert_ruled(oracle, sequence, rule)


def test_log_probabilities_are_those_of_the_logits_without_the_grammar(engine, grammars):
    base = prompt(6, 30)
    engine.ranks[0].cache.clear()
    requests = [ask(base, 1), ask(base, 1, grammar=grammars.choice(["zebra"]))]
    free, bound = (sequence.result for sequence in run(engine, requests))
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.logprobs[0].token_id != free.token_ids[0]


def test_lengths_stops_and_the_end(engine, grammars):
    base = prompt(60, 30)
    shape, word = grammars.json_schema(SHAPE), grammars.choice(["mauve"])
    many = grammars.regex("(ab)+")
    requests = [
        ask(base, 5, grammar=shape),
        ask(base, 20, grammar=word, stop_ids=(END,), min_tokens=20),
        ask(base, 30, grammar=many, stop_ids=(END,), min_tokens=12, logit_bias=((END, 100.0),)),
        ask(base, 70, grammar=shape, stop=('"round',)),
        ask(base, 30, grammar=many, logit_bias=((END, 100.0),)),
        ask(base, 9, grammar=grammars.regex("(xy)?"), stop_ids=(END,), min_tokens=3),
    ]
    cut, short, longer, stopped, ended, tiny = run(engine, requests)
    assert cut.result.finish_reason == "length" and len(cut.result.token_ids) == 5
    assert (short.output.text, short.result.finish_reason) == ("mauve", "stop")
    assert len(longer.result.token_ids) in (13, 14) and longer.result.token_ids[-1] == END
    assert set(longer.output.text.split("ab")) == {""}
    assert stopped.output.stopped == '"round' and stopped.output.text.startswith('{"colour"')
    assert ended.result.token_ids[-1] == END and ended.result.finish_reason == "stop"
    assert ended.output.text == "ab"
    assert tiny.output.text == "xy" and tiny.result.finish_reason == "stop"


def test_a_grammar_begins_after_the_reasoning(engine, grammars):
    """The end is impossible before, however probable; then the bias of the mark has no effect."""
    grammar = grammars.json_schema(LIST | TIGHT).behind(THINK_END)
    bias = ((END, 100.0), (THINK_END, 50.0))
    base = ask(prompt(64, 20), 60, grammar=grammar, stop_ids=(END,))
    biased, free = run(engine, [replace(base, logit_bias=bias), replace(base, max_new_tokens=5)])
    assert biased.result.token_ids[0] == THINK_END
    assert is_list(json.loads(biased.output.text))
    assert free.result.finish_reason == "length" and free.matcher.waiting


def test_an_abort_leaves_nothing(engine, grammars):
    requests = [request for request, _ in structured(grammars)]
    first, *others = [engine.add(request) for request in requests]
    for _ in range(4):
        engine.step()
    engine.abort(first)
    drain(engine)
    assert first.result.finish_reason == "abort"
    assert all(sequence.result.finish_reason == "stop" for sequence in others)


def test_a_fault_ends_one_request_alone(engine, grammars):
    broken, fine = (engine.add(ask(prompt(60, 30), 40, grammar=g)) for g in (
        grammars.json_schema(SHAPE), grammars.choice(["mauve"])
    ))  # fmt: skip
    broken.matcher.state.consume_token(THINK_END)
    drain(engine)
    assert broken.result.finish_reason == "error" and broken.result.fault
    assert fine.output.text == "mauve" and fine.result.finish_reason == "stop"


def test_a_grammar_of_another_tokenizer_is_refused(engine, tiny_dir):
    made = Grammars.from_dir(tiny_dir, Config.from_json(tiny_dir / "config.json"))
    request = ask(prompt(60, 30), 4, grammar=made.choice(["a"]))
    made.close()
    with pytest.raises(UserError, match=r"^grammar: must be made by"):
        engine.add(request)
