"""Tensor ranks whose arithmetic differs decide alike: drafts, tokens, how many are accepted, and
all that a host on each of them would dispatch.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.cache import Cache, CacheShape
from dsv41_jax.checkpoint.random_model import RandomModel
from dsv41_jax.checkpoint.save import save_released
from dsv41_jax.ops import Ops
from serving.batch import neutral_decode, neutral_sampling
from serving.buckets import Bucket
from serving.engine import Engine
from serving.options import EngineOptions
from serving.programs import Programs
from serving.request import Request
from serving.speculative import Speculation
from tests.conftest import GOLDENS
from tests.dsv41_jax.test_gradients import SMALL
from tests.sharding.devices.support import Placed

RANKS, SIZE = 4, 1e-3
PLACES, PAGES, PAGE, LENGTH = 4, 8, 16, 5
# With all others out of reach, nearly every second draft of these is right.
EITHER = (5, 9)
BIAS = tuple((token, 100.0) for token in EITHER)
DISTURBED = "linear", "linears", "normed_linears", "output_projection", "moe_experts"
DISTURBED += ("gathered_linear",)


@pytest.fixture(scope="module")
def placed(tmp_path_factory) -> Placed:
    """A random model of five layers and one draft stage on four tensor ranks."""
    target = tmp_path_factory.mktemp("small") / "checkpoint"
    tokenizer = GOLDENS / "tiny_ckpt" / "tokenizer.json"
    save_released(RandomModel(SMALL, 3), SMALL, target, tokenizer_file=tokenizer)
    return Placed.of(f"tp{RANKS}", target)


def disturbed(ops: Ops) -> Ops:
    """Operations whose results are off by up to SIZE on every rank but the first."""

    def off(function: Any, *arguments: Any, **options: Any) -> Any:
        rank = jax.lax.axis_index("model")

        def moved(y: jax.Array) -> jax.Array:
            noise = jax.random.uniform(jax.random.key(rank), y.shape, y.dtype, -SIZE, SIZE)
            return y + jnp.where(rank > 0, noise, 0)

        return jax.tree.map(moved, function(*arguments, **options))

    return replace(ops, **{name: partial(off, getattr(ops, name)) for name in DISTURBED})


def by_rank(tree: Any) -> list[Any]:
    """What each device holds, as host arrays."""

    def part(leaf: Any, rank: int) -> np.ndarray:
        return np.asarray(leaf.addressable_shards[rank].data if hasattr(leaf, "sharding") else leaf)

    return [jax.tree.map(partial(part, rank=rank), tree) for rank in range(RANKS)]


def alike(tree: Any) -> bool:
    first, *others = [[a.tobytes() for a in jax.tree.leaves(part)] for part in by_rank(tree)]
    return all(other == first for other in others)


def guesses(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.choice(EITHER, (count, LENGTH)).astype(np.int32)


class Blocks:
    """Requests of one token each, drafted for and verified."""

    def __init__(self, placed: Placed, ops: Ops):
        self.programs = Programs(
            placed.model,
            ops,
            CacheShape(PLACES, PLACES * PAGES, PAGE),
            logprobs=2,
            max_bias_ids=len(BIAS),
            speculation=Speculation(),
            placement=placed.placement,
        )
        self.buckets = {
            name: Bucket(PLACES, rows, PAGES)
            for name, rows in (("draft", LENGTH), ("verify", 1 + LENGTH))
        }
        for name, bucket in self.buckets.items():
            self.programs.compile(name, bucket)
        pages = np.arange(PLACES * PAGES, dtype=np.int32).reshape(PLACES, PAGES)
        self.batch = replace(
            neutral_decode(PLACES, PAGES, 1),
            slot=np.arange(PLACES, dtype=np.int32),
            active=np.ones(PLACES, bool),
            page_table=pages,
            last_position=np.full(PLACES, PAGES * PAGE - 1, np.int32),
        )
        self.sampling = neutral_sampling(PLACES, 1, len(BIAS), SMALL.vocab_size)
        self.sampling.temperature[:] = [0, 0, 1, 1]
        self.sampling.rules.bias_ids[:], self.sampling.rules.bias[:] = zip(*BIAS, strict=True)
        self.sampling.rules.frequency[:] = 0.3

    def run(self, steps: int) -> tuple[Cache, list[bool], set[int]]:
        """The cache, whether the ranks were alike in each step, and tokens a step."""
        cache, rng, same, counts = self.programs.new_cache(), np.random.default_rng(0), [], set()
        allowed = np.full(PLACES, LENGTH, np.int32)
        for step in range(steps):
            made = self.programs("draft", self.buckets["draft"], cache, self.batch)
            ids = made.ids if step % 2 else guesses(rng, PLACES)
            inputs = self.batch, self.sampling, ids, allowed
            cache, verified = self.programs("verify", self.buckets["verify"], cache, *inputs)
            same.append(alike((made, verified)))
            counts |= set(np.asarray(verified.count).tolist())
        return cache, same, counts


def test_blocks_are_alike(placed):
    """Sampled or not; the streams of the ranks drift apart in what they cache."""
    cache, same, counts = Blocks(placed, disturbed(placed.ops)).run(24)
    assert all(same) and len(counts) > 3
    assert alike((cache.position, cache.last_token, cache.history, cache.counts))
    assert not alike(cache.windows) and not alike(cache.drafts)


@pytest.mark.slow
def test_without_one_rank_that_decides_they_are_not(placed):
    _, same, _ = Blocks(placed, replace(disturbed(placed.ops), agree=lambda values: values)).run(24)
    assert not all(same)


@dataclass(frozen=True)
class Call:
    """A program's call: its inputs after the cache, and what it made on each rank."""

    name: str
    bucket: Bucket
    inputs: list[np.ndarray]
    made: list[Any]


class Leader:
    """The programs of an engine, every second draft a guess; keeps all calls."""

    def __init__(self, engine: Engine):
        self.programs, self.calls = engine.executor.programs, []
        self.rng = np.random.default_rng(1)
        engine.executor.programs = self

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["programs"], name)

    def __call__(self, name: str, bucket: Bucket, cache: Cache, *inputs: Any) -> Any:
        out = self.programs(name, bucket, cache, *inputs)
        made = out if name == "draft" else out[1] if isinstance(out, tuple) else None
        assert alike(made), (name, len(self.calls))
        if name == "draft" and len(self.calls) % 2:
            out = made = replace(out, ids=guesses(self.rng, bucket.requests))
        self.calls.append(Call(name, bucket, _host(inputs), by_rank(made)))
        return out


class Follower:
    """The programs of an engine that reads another rank: it must ask for what the leader did."""

    def __init__(self, engine: Engine, leader: Leader, rank: int):
        self.programs, self.leader, self.rank, self.done = leader.programs, leader, rank, 0
        engine.executor.programs = self

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["programs"], name)

    def __call__(self, name: str, bucket: Bucket, cache: Cache, *inputs: Any) -> Any:
        call = self.leader.calls[self.done]
        self.done += 1
        assert (name, bucket) == (call.name, call.bucket)
        for mine, its in zip(_host(inputs), call.inputs, strict=True):
            np.testing.assert_array_equal(mine, its)
        made = call.made[self.rank]
        return made if name == "draft" else cache if made is None else (cache, made)


def _host(inputs: Any) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(inputs)]


def _request(rng: np.random.Generator) -> Request:
    hot = bool(rng.integers(2))
    return Request(
        tuple(rng.integers(3, 500, rng.integers(1, 40)).tolist()),
        int(rng.integers(1, 70)),
        temperature=float(hot),
        seed=int(rng.integers(1 << 20)),
        frequency_penalty=0.3,
        logit_bias=BIAS if rng.integers(4) else (),
        stop_ids=(int(rng.choice(EITHER)),) if rng.integers(6) == 0 else (),
        speculative=bool(rng.integers(8)),
    )


@pytest.mark.slow
def test_a_thousand_steps_of_hosts_that_read_different_ranks(placed):
    """Four engines on the results of one: plans, buckets and inputs are equal to the end."""
    options = EngineOptions(
        slots=PLACES,
        pages=PLACES * PAGES,
        page_size=PAGE,
        max_tokens=PAGES * PAGE,
        prefill=((1, 32), (PLACES, 16)),
        decode=(2, PLACES),
        logprobs=2,
        prompt_logprobs=False,
        max_stop_ids=1,
        max_bias_ids=len(BIAS),
        speculation=Speculation(max_batch=3),
    )
    shared = placed.model, disturbed(placed.ops), options, None
    first = Engine(*shared, placement=placed.placement)
    first.warm_up()
    leader = Leader(first)
    engines = [first]
    for rank in range(1, RANKS):
        engines.append(Engine(*shared, placement=placed.placement))
        Follower(engines[-1], leader, rank)
    rng, steps = np.random.default_rng(2), 0
    while steps < 1000:
        if rng.random() < 0.07:
            request = _request(rng)
            for engine in engines:
                engine.add(request)
        for engine in engines:
            engine.step()
        for engine in engines[1:]:
            assert engine.executor.programs.done == len(leader.calls)
            assert vars(engine.acceptance) == vars(first.acceptance)
        steps = sum(call.name == "verify" for call in leader.calls)
    assert first.acceptance.accepted > 300
    assert {c.bucket.rows for c in leader.calls if c.name == "verify"} == {1, 1 + LENGTH}
    assert {c.bucket.requests for c in leader.calls if c.name == "verify"} == {2, PLACES}
    assert not alike(first.executor.cache.windows)
