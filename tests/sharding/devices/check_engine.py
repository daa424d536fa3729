"""The engine on layouts: tokens of the goldens, preemption and prefix hits included."""

import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32, REFERENCE
from serving.engine import Engine
from serving.generate import load
from serving.options import EngineOptions
from serving.programs import Programs
from serving.request import Request
from serving.speculative import Speculation
from sharding.watchdog import StuckStep
from tests.conftest import GOLDENS
from tests.sharding.devices.support import rounded_ops

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


def golden_requests(names=PROMPTS):
    """Requests and their tokens; "p96.hit80" has its first 80 prompt tokens from the cache."""
    requests, tokens = [], []
    with np.load(GOLDENS / "replay_fp32.npz") as file:
        for name in names:
            prompt, _, hit = name.partition(".")
            want = file[f"{prompt}.{hit or 'decoder'}.tokens"].tolist()
            ids = tuple(file[f"{prompt}.input_ids"].tolist())
            requests.append(Request(prompt=ids, max_new_tokens=len(want), stop_ids=()))
            tokens.append(want)
    return requests, tokens


def loaded_on(name, numerics=FLOAT32, **options):
    return load(TINY, numerics, kernels="reference", layout=name, speculation=True, **options)


def engine_on(name, options=OPTIONS, loaded=None):
    loaded = loaded or loaded_on(name)
    engine = Engine(
        loaded.model, loaded.ops, options, placement=loaded.placement, peers=loaded.peers
    )
    engine.warm_up()
    return engine


class Watched:
    """What an engine ran: rows that decode by data rank of each decode step, restored requests."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.decoding, self.restored = engine, [], []
        restore, call = engine.executor._restore, Programs.__call__

        def watch(programs, name, bucket, cache, *inputs):
            if name == "decode":
                active = inputs[0].active.reshape(programs.ranks, bucket.requests)
                self.decoding.append(tuple(active.sum(1).tolist()))
            return call(programs, name, bucket, cache, *inputs)

        monkeypatch.setattr(Programs, "__call__", watch)
        monkeypatch.setattr(
            engine.executor, "_restore", lambda s: (self.restored.append(s), restore(s))
        )


def assert_tokens(sequences, tokens):
    assert [sequence.result.token_ids for sequence in sequences] == tokens


def drained(engine):
    while not engine.idle:
        engine.step()
        engine.check()


def cached_bytes(engine, rank):
    """What each array of the cache holds on the devices of a data rank, which must agree."""
    found = []
    for array in jax.tree.leaves(engine.executor.cache):
        first = array.shape[0] // len(engine.ranks) * rank
        mine = [s for s in array.addressable_shards if (s.index[0].start or 0) == first]
        assert len(mine) == engine.executor.programs.placement.division.layout.tensor
        parts = {np.asarray(shard.data).tobytes() for shard in mine}
        assert len(parts) == 1, "tensor ranks differ in what they cached"
        found.append(parts.pop())
    return found


@pytest.mark.parametrize(
    "name", ["tp2xdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dep2", "dep4"))]
)
def test_data_ranks(name, monkeypatch):
    """Ranks with some, one and no requests; pages run out on one of them."""
    engine = engine_on(name, replace(OPTIONS, pages=9, prefix_cache=True))
    watched = Watched(engine, monkeypatch)
    count = len(engine.ranks)
    names = ["p37", "p5", *["p96"] * (count - 1), "p96", "p5"]
    requests, tokens = golden_requests(names)
    sequences = [engine.add(request) for request in requests]
    assert {sequence.data_rank for sequence in sequences} == set(range(count))
    drained(engine)
    assert_tokens(sequences, tokens)
    assert watched.restored, "no request was preempted: the pools are too large for this test"
    kinds = {min(rows, 2) for step in watched.decoding for rows in step}
    assert kinds == {0, 1, 2}
    _assert_a_hit_beside_a_decoding_rank(engine)
    assert engine.compiles.count == 0
    _assert_a_stuck_step_is_named(engine, requests[0], monkeypatch)


def _assert_a_hit_beside_a_decoding_rank(engine):
    """Its last window is encoded again and replayed; ranks without requests keep every byte."""
    requests, tokens = golden_requests(["p5", "p96.hit80"])
    first = engine.add(requests[0])
    while not first.result.token_ids:
        engine.step()
    second = engine.add(requests[1])
    busy = {first.data_rank, second.data_rank}
    assert len(busy) == 2 and second.result.cached_tokens == 0
    others = {rank: cached_bytes(engine, rank) for rank in range(len(engine.ranks))}
    drained(engine)
    assert_tokens([first, second], tokens)
    assert second.result.cached_tokens == 80
    for rank, before in others.items():
        assert (cached_bytes(engine, rank) == before) == (rank not in busy)
    [request], [want] = golden_requests(["p37.hit32"])
    before = cached_bytes(engine, 1)
    [again] = engine.run([request])
    assert again.data_rank == 0 and again.result.token_ids == want
    assert cached_bytes(engine, 1) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2", "tp8"])
def test_tensor_ranks(name, monkeypatch):
    engine = engine_on(name)
    watched = Watched(engine, monkeypatch)
    requests, tokens = golden_requests()
    assert_tokens(engine.run(requests), tokens)
    assert watched.restored, "no request was preempted: the pool is too large for this test"
    assert engine.compiles.count == 0
    cached_bytes(engine, 0)


@pytest.mark.slow
def test_drafts_change_no_token():
    """Draft experts spread over the ranks, their head split by vocabulary."""
    engine = engine_on("tp2", replace(OPTIONS, pages=24, speculation=Speculation()))
    requests, tokens = golden_requests()
    assert_tokens(engine.run(requests), tokens)
    assert engine.acceptance.drafted > 0


@pytest.mark.slow
def test_peer_to_peer_sums_change_no_bit():
    """Two tensor ranks sum bf16 alike either way; passes over the streams take sums in."""
    found, requests = {}, golden_requests()[0]
    for kind in ("psum", "peer"):
        loaded = loaded_on("tp2", REFERENCE, all_reduce=kind)
        if kind == "psum":
            loaded = replace(loaded, ops=rounded_ops(loaded.placement, REFERENCE))
        engine = engine_on("tp2", loaded=loaded)
        found[kind] = [sequence.result for sequence in engine.run(requests)]
        memories = [engine.executor.programs.memory(*key) for key in OPTIONS.programs(16)]
        rows = {memory.exchange.rows for memory in memories if memory}
        assert rows == (set() if kind == "psum" else {3, 16, 48})
    assert [r.token_ids for r in found["peer"]] == [r.token_ids for r in found["psum"]]
    assert [r.logprobs for r in found["peer"]] == [r.logprobs for r in found["psum"]]


@pytest.mark.slow
def test_engram_tables_on_the_host():
    """One copy for two data ranks of two tensor ranks each."""
    loaded = loaded_on("tp2xdp2", engram="host")
    assert isinstance(loaded.model.layers[1].engram.embed().codes, np.ndarray)
    engine = engine_on("tp2xdp2", loaded=loaded)
    requests, tokens = golden_requests(("p37", "p5", "p96", "p5"))
    assert_tokens(engine.run(requests), tokens)
    assert engine.compiles.count == 0


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
        ("dep16", "layout dep16: needs 16 devices, 8 cpu are here"),
        ("tp3", "layout 'tp3': must be one of"),
    ],
)
def test_layouts_that_the_engine_does_not_run(name, says):
    with pytest.raises(UserError, match=says):
        load(TINY, FLOAT32, layout=name)


def test_what_is_held_whole_is_said(capsys):
    load(TINY, FLOAT32, kernels="reference", layout="tp4")
    assert "layout tp4: wo_a groups = 2: not divisible by 4, whole" in capsys.readouterr().err
