"""Draft lengths by the draft's own confidence, under a budget of drafts a step."""

from copy import deepcopy
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32
from serving.acceptance import likeliest
from serving.batch import neutral_decode, neutral_sampling
from serving.forwards_speculative import verify
from serving.server.draft_metrics import DraftMetrics
from serving.speculative import Acceptance, Speculation
from tests.serving.engine.support import ask, assert_nothing_leaks, assert_same, prompt, run
from tests.serving.speculative.support import LENGTH, SLOTS, Drafter, Speculating, right_for_a_while


def by_hand(confidence, live, budget: int) -> list[int]:
    """One draft after the other to whom the next is likeliest."""
    chosen = [min(int(n), 1) for n in live]
    log_p = -np.log1p(np.exp(-confidence.astype(np.float64)))
    while sum(chosen) < budget:
        open_ = [b for b, n in enumerate(live) if 0 < chosen[b] < n]
        if not open_:
            break
        best = max(open_, key=lambda b: log_p[b, : chosen[b] + 1].sum())
        chosen[best] += 1
    return chosen


def test_the_likeliest_drafts_are_chosen():
    choose = jit(likeliest)
    rng = np.random.default_rng(0)
    for budget in (1, 4, 7, 12, 20, 40):
        confidence = rng.normal(0, 3, (8, LENGTH)).astype(np.float32)
        live = rng.integers(0, LENGTH + 1, 8).astype(np.int32)
        confidence[live == 0] = np.nan  # of places without a request
        got = choose(confidence, live, budget)
        assert np.asarray(got).tolist() == by_hand(confidence, live, budget), budget


def test_equal_chances_go_to_early_places_of_early_requests():
    sure = np.full((3, LENGTH), 50, np.float32)
    choose, live = jit(likeliest), np.full(3, LENGTH, np.int32)
    got = [choose(sure, live, n).tolist() for n in (1, 4, 8, 15, 99)]
    assert got == [[1, 1, 1], [2, 1, 1], [3, 3, 2], [5, 5, 5], [5, 5, 5]]


class Agreeing:
    """A model whose best token is always the draft."""

    def __init__(self, drafts: np.ndarray):
        follow = np.concatenate([drafts, drafts[:, :1]], axis=1)
        self.logits = jnp.eye(512, dtype=jnp.float32)[follow]

    def layers_over(self, ops, rows, cache):
        return SimpleNamespace(normed=None), cache

    def scores(self, ops, x):
        return self.logits


def test_a_step_verifies_what_was_chosen():
    """A sure request, an unsure one, one without drafts, one with room for two rows."""
    shape = CacheShape(slots=4, pages=4, page_size=16)
    cache = new_cache(Config.preset("tiny"), FLOAT32, shape, drafts=True)
    batch = neutral_decode(4, 1, 1)
    batch.slot[:], batch.active[:], batch.last_position[:] = np.arange(4), True, [90, 90, 90, 2]
    drafts = np.random.default_rng(1).integers(0, 512, (4, LENGTH)).astype(np.int32)
    confidence = np.array([[9] * LENGTH, [-9] * LENGTH, [9] * LENGTH, [9] * LENGTH], np.float32)
    allowed = np.array([LENGTH, LENGTH, 0, LENGTH], np.int32)
    inputs = batch, neutral_sampling(4, 1, None), drafts, allowed
    model, ops = Agreeing(drafts), SimpleNamespace(agree=lambda values: values)
    run = jit(lambda cache, *a: verify(model, ops, cache, *a, logprobs=0, budget=6))
    for extra, want in (((confidence,), [4, 1, 0, 1]), ((), [5, 5, 0, 1])):
        after, made = run(cache, *inputs, *extra)
        assert made.drafted.tolist() == want
        assert made.count.tolist() == [1 + n for n in want] == after.position.tolist()


def test_a_budget_below_one_is_refused():
    with pytest.raises(UserError, match="draft budget 0 must be at least 1"):
        Speculation(budget=0)


def test_metrics_tell_what_was_verified_at_each_place():
    collected, seen = CollectorRegistry(), Acceptance()
    shown = DraftMetrics(collected, "tiny", Speculation(3, budget=4))
    for drafted, accepted in ((3, 1), (1, 1), (0, 0)):
        seen.add(drafted, accepted)
        shown.show(deepcopy(seen))

    def counts(name: str) -> list[float | None]:
        labels = [{"model_name": "tiny", "position": str(i)} for i in range(3)]
        return [collected.get_sample_value(f"{name}_total", label) for label in labels]

    assert counts("dsv41_draft_tokens_per_pos") == [2, 1, 1]
    assert counts("vllm:spec_decode_num_accepted_tokens_per_pos") == [2, 0, 0]


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding(speculating, plain):
    """Lengths of one to five, chosen by the model's own confidence."""
    shared = speculating.model, speculating.ops, speculating.tokenizer, speculating.grammars
    engine = Speculating(*shared).make(speculation=Speculation(LENGTH, SLOTS, budget=14))
    requests = [ask(prompt(200 + i, 3 + 9 * i), 30) for i in range(SLOTS)]
    want = run(plain, requests)
    plain.ranks[0].cache.clear()
    texts = {sequence.request: sequence.result.token_ids for sequence in want}
    Drafter(engine, right_for_a_while(texts, 3))
    for mine, theirs in zip(run(engine, requests), want, strict=True):
        assert_same(mine.result, theirs.result)
    seen = engine.acceptance
    assert seen.tried[0] == seen.steps and seen.tried == sorted(seen.tried, reverse=True)
    assert seen.tried[-1] > 0 and sum(seen.tried) == seen.drafted < 0.5 * LENGTH * seen.steps
    assert seen.accepted > 20
    assert_nothing_leaks(engine)
