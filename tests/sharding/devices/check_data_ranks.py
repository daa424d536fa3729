"""Requests of every kind on data ranks give what they give on one device: greedy and sampled, with
penalties, grammars, prompt log probabilities, drafts, hits, preemption and aborts.
"""

import jax
import numpy as np
import pytest

from pallas_kernels.numerics import FLOAT32
from serving.engine import Engine
from serving.generate import load
from serving.grammars import Grammars
from serving.options import EngineOptions
from serving.programs import Programs
from serving.request import Request
from serving.sequence import Stage
from serving.speculative import Speculation
from tests.conftest import GOLDENS
from tests.serving.engine.support import assert_nothing_leaks, prompt
from tests.tolerances import SHARDED_ABS

pytestmark = pytest.mark.slow

TINY = GOLDENS / "tiny_ckpt"
OPTIONS = EngineOptions(
    slots=3,
    pages=8,
    page_size=16,
    max_tokens=128,
    prefill=((3, 48),),
    decode=(1, 3),
    logprobs=2,
    max_stop_ids=2,
    max_bias_ids=2,
    speculation=Speculation(max_batch=2),
)
# (prompt, new tokens): around pages and windows; two of them fill a pool.
SHAPES = [(60, 30), (1, 25), (16, 17), (96, 5), (17, 1), (65, 20), (2, 3), (33, 14), (15, 20)]
SAMPLED = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3},
    {"repetition_penalty": 2.0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "seed": 7, "logit_bias": ((5, 4.0), (6, -100.0))},
    {"prompt_logprobs": 2},
    {"speculative": False, "stop_ids": (7, 9)},
]


@pytest.fixture(scope="module")
def grammars():
    model = load(TINY, FLOAT32, kernels="reference").model
    made = Grammars.from_dir(TINY, model.cfg)
    yield made
    made.close()


@pytest.fixture(scope="module")
def requests(grammars):
    found = [Request(prompt(i, n), new, logprobs=2) for i, (n, new) in enumerate(SHAPES)]
    found += [
        Request(prompt(40 + i, 20 + i), 12, logprobs=2, **asked) for i, asked in enumerate(SAMPLED)
    ]
    grammar = grammars.json_object()
    found.append(Request(prompt(60, 12), 10, temperature=1.0, stop_ids=(1,), grammar=grammar))
    return found


def engine_on(name, grammars):
    loaded = load(TINY, FLOAT32, kernels="reference", layout=name, speculation=True)
    made = loaded.model, loaded.ops, OPTIONS
    engine = Engine(*made, grammars=grammars, placement=loaded.placement)
    engine.warm_up()
    return engine


def run(engine, requests):
    """The results of requests that come one a step, beside some that are given up."""
    sequences, doomed = [], []
    for i, request in enumerate(requests):
        sequences.append(engine.add(request))
        doomed.append(engine.add(Request(prompt(80 + i, 30), 20)))
        engine.step()
        if i % 3 == 2:
            engine.abort(doomed.pop(0))
    for sequence in doomed:
        engine.abort(sequence)
    while not engine.idle:
        engine.step()
        engine.check()
    assert all(sequence.stage is Stage.DONE for sequence in sequences)
    return sequences


@pytest.fixture(scope="module")
def want(requests, grammars):
    """Of one device, cold: a hit is another computation, so nothing may be found."""
    engine = engine_on("tp1", grammars)
    results = []
    for request in requests:
        results.append(engine.run([request])[0].result)
        engine.ranks[0].cache.clear()
    return results


def assert_same(got, want):
    assert got.token_ids == want.token_ids and got.finish_reason == want.finish_reason
    for name in ("logprobs", "prompt_logprobs"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert [token.token_id for token in mine] == [token.token_id for token in theirs]
        values = [[token.logprob for token in tokens] for tokens in (mine, theirs)]
        np.testing.assert_allclose(*values, rtol=0, atol=SHARDED_ABS)


@pytest.mark.parametrize("name", ["dep2", "dep4", "tp2xdp2"])
def test_as_on_one_device(name, requests, grammars, want, monkeypatch):
    engine, shapes, preempted = engine_on(name, grammars), [], []
    call, save = Programs.__call__, engine.executor._save

    def watch(programs, program, bucket, cache, *inputs):
        for leaf in jax.tree.leaves(inputs):
            assert leaf.shape[0] == programs.ranks * bucket.requests
        if program == "verify":
            active = inputs[0].active.reshape(programs.ranks, bucket.requests).sum(1)
            shapes.append((bucket.requests, bucket.rows, *active.tolist()))
        return call(programs, program, bucket, cache, *inputs)

    monkeypatch.setattr(Programs, "__call__", watch)
    monkeypatch.setattr(engine.executor, "_save", lambda s: (preempted.append(s), save(s)))
    for _ in range(2):
        for sequence, expected in zip(run(engine, requests), want, strict=True):
            if sequence.result.cached_tokens == 0:
                assert_same(sequence.result, expected)
    assert preempted, "pools are too large for this test"
    # The rank with most requests decides the bucket; drafts stop for all where one has too many.
    assert {(requests, rows) for requests, rows, *_ in shapes} == {(1, 1), (1, 6), (3, 1), (3, 6)}
    assert all(requests == (1 if max(active) == 1 else 3) for requests, _, *active in shapes)
    assert all(max(active) <= 2 for _, rows, *active in shapes if rows > 1)
    assert engine.acceptance.accepted > 0 and engine.compiles.count == 0
    assert_nothing_leaks(engine)
