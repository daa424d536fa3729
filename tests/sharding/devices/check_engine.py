"""The engine on tensor layouts: tokens of the goldens, preemption included."""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32
from serving.engine import Engine
from serving.executor import EngineOptions
from serving.generate import load
from serving.request import Request
from serving.speculative import Speculation
from sharding.watchdog import StuckStep
from tests.conftest import GOLDENS

TINY = GOLDENS / "tiny_ckpt"
PROMPTS = ("p37", "p5", "p96")
# Pages of 16 tokens: the prompts need 3 + 1 + 6, their ends one more.
OPTIONS = EngineOptions(
    slots=3,
    pages=10,
    page_size=16,
    max_tokens=112,
    prefill=((1, 48),),
    decode=(3,),
    prefix_cache=False,
    logprobs=2,
    prompt_logprobs=False,
    max_stop_ids=1,
    max_bias_ids=1,
)


def golden_requests():
    requests, tokens = [], []
    with np.load(GOLDENS / "replay_fp32.npz") as file:
        for name in PROMPTS:
            want = file[f"{name}.decoder.tokens"].tolist()
            prompt = tuple(file[f"{name}.input_ids"].tolist())
            requests.append(Request(prompt=prompt, max_new_tokens=len(want), stop_ids=()))
            tokens.append(want)
    return requests, tokens


def engine_on(name, options=OPTIONS):
    loaded = load(TINY, FLOAT32, kernels="reference", layout=name, speculation=True)
    engine = Engine(loaded.model, loaded.ops, options, placement=loaded.placement)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("name", ["tp2", pytest.param("tp8", marks=pytest.mark.slow)])
def test_golden_tokens(name, monkeypatch):
    engine = engine_on(name)
    requests, tokens = golden_requests()
    moved = []
    restore = engine.executor._restore
    monkeypatch.setattr(
        engine.executor, "_restore", lambda sequence: (moved.append(sequence), restore(sequence))
    )
    done = engine.run(requests)
    assert [sequence.result.token_ids for sequence in done] == tokens
    assert moved, "no request was preempted: the pool is too large for this test"
    assert engine.compiles.count == 0
    for array in jax.tree.leaves(engine.executor.cache):
        parts = [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]
        assert len(parts) == engine.executor.programs.placement.mesh.size
        assert len(set(parts)) == 1, "ranks differ in what they cached"
    _assert_a_stuck_step_is_named(engine, requests[0], monkeypatch)


@pytest.mark.slow
def test_drafts_change_no_token():
    """Draft experts spread over the ranks, their head split by vocabulary."""
    engine = engine_on("tp2", replace(OPTIONS, pages=24, speculation=Speculation()))
    requests, tokens = golden_requests()
    done = engine.run(requests)
    assert [sequence.result.token_ids for sequence in done] == tokens
    assert engine.acceptance.drafted > 0


def _assert_a_stuck_step_is_named(engine, request, monkeypatch):
    """The engine's own watchdog, over results that never come."""
    monkeypatch.setattr(engine.watchdog, "seconds", 0.2)
    monkeypatch.setattr("sharding.watchdog.jax.block_until_ready", lambda _: _forever())
    engine.add(request)
    with pytest.raises(StuckStep, match=r"step \d+ has not ended after 0\.2 s"):
        for _ in range(8):
            engine.step()


def _forever():
    threading.Event().wait()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dep8", "layout dep8: the engine has one data rank; must be one of tp1, tp2, tp4, tp8"),
        ("tp3", "layout 'tp3': must be one of"),
    ],
)
def test_layouts_that_the_engine_does_not_run(name, says):
    with pytest.raises(UserError, match=says):
        load(TINY, FLOAT32, layout=name)


def test_what_is_held_whole_is_said(capsys):
    load(TINY, FLOAT32, kernels="reference", layout="tp4")
    assert "layout tp4: wo_a groups = 2: not divisible by 4, whole" in capsys.readouterr().err
