"""Requests that go on in another engine draft there as they would have in the first one."""

import os
from dataclasses import replace

import pytest

from serving.handoff.options import HandoffOptions
from tests.serving.engine.support import (
    ask,
    assert_nothing_leaks,
    assert_same,
    free_pages,
    poison,
    prompt,
    solo,
)
from tests.serving.handoff.support import POOL, begun, gone_on, join, new_pool
from tests.serving.speculative.support import SLOTS, Speculating

NAME = f"test-handoff-drafts-{os.getpid()}"
# Of one size of batches, as every one is a program more.
ONE = replace(POOL, name=NAME, batches=(4,))


@pytest.fixture
def split(speculating):
    """``split(form, plain)``: two engines with a new pool, the second one drafts; the first one
    has the programs for it, or is ``plain``. NaN in what is free.
    """
    made = []

    def pair(form: str, *, plain: bool = False):
        new_pool(NAME)
        parts = speculating.model, speculating.ops, speculating.tokenizer, speculating.grammars
        for role in ("both", "decode"):
            options = {"kv_pool": ONE, "handoff": HandoffOptions(role, form)}
            if plain and role == "both":
                engine = Speculating(*parts).make(speculation=None, **options)
            else:
                engine = speculating.make(**options)
            join(engine, ONE)
            poison(engine, free_pages(engine), range(SLOTS))
            engine.compiles.start()
            made.append(engine)
        return made

    yield pair
    for engine in made:
        assert engine.compiles.count == 0
        assert_nothing_leaks(engine)
        engine.close()
    new_pool(NAME)


def requests():
    """Of lengths about the window and the page, greedy and sampled."""
    sampled = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2}
    return [ask(prompt(n, n), 8, **(sampled if i % 2 else {})) for i, n in enumerate((64, 17, 65))]


@pytest.mark.parametrize("form", ["windows", pytest.param("replay", marks=pytest.mark.slow)])
def test_tokens_and_drafts_are_those_of_one_engine(split, engine, form):
    a, b = split(form)
    asked = [r for r in requests() if form == "windows" or len(r.prompt) <= 17]
    for request in asked:
        [got] = gone_on(b, [request], begun(a, [request]))
        want = solo(engine, request)
        assert_same(got.result, want)
        assert (got.result.drafted, got.result.accepted) == (want.drafted, want.accepted)
        assert got.result.drafted


@pytest.mark.slow
def test_a_first_engine_without_drafts(split, plain):
    """The second one has nothing to draft from at first, and the tokens are the same."""
    a, b = split("windows", plain=True)
    asked = requests()
    for request, got in zip(asked, gone_on(b, asked, begun(a, asked)), strict=True):
        assert_same(got.result, solo(plain, request))
