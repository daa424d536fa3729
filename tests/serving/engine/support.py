"""Engines that share executables, and what the oracle says of a finished sequence."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import Cache
from serving.engine import Engine, Event
from serving.options import EngineOptions
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import Request, Result
from serving.scheduler import Plan, Scheduler
from serving.sequence import Sequence as Running
from serving.sequence import Stage
from tests.oracle import Oracle, log_softmax
from tests.tolerances import ACROSS_BUCKETS_ABS, REPLAY_LOGITS_ABS

PAGE, WINDOW, SLOTS = 16, 16, 4
TIE = 1e-6  # scores of order 1 in float32, some units in the last place of a sum
# The server's tests use them, too: the two folders' programs are the same.
OPTIONS = EngineOptions(
    slots=SLOTS,
    pages=24,
    page_size=PAGE,
    max_tokens=128,
    prefill=((1, 64), (4, 16)),
    decode=(SLOTS,),
    prompt_logprobs=False,
)


class Tied(AssertionError):
    """Scores at the edge of a selection are too close for float32."""


class Engines:
    """Makes engines over one model; a program is compiled once for all of them."""

    def __init__(self, model, ops, tokenizer, grammars):
        self.model, self.ops, self.tokenizer = model, ops, tokenizer
        self.grammars = grammars
        self._executables: dict = {}

    def make(
        self, *, pool: int | None = None, chunk: int | None = None, **options: object
    ) -> Engine:
        """pool: pages that the host hands out; the device has as many as ever. chunk: most prompt
        rows of a request a step, in whatever bucket holds them.
        """
        made = self.model, self.ops, replace(OPTIONS, **options), self.tokenizer
        engine = Engine(*made, grammars=self.grammars)
        engine.executor.programs.executables = self._executables
        engine.warm_up()
        limits = engine.ranks[0].limits
        if chunk is not None:
            limits = replace(limits, prefill=((SLOTS if chunk <= 16 else 1, chunk),))
        pages = PagePool(pool or OPTIONS.pages)
        engine.ranks[0] = Scheduler(limits, pages, PrefixCache(pages, PAGE), engine.kv_pool)
        return engine


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 500, length).tolist())


def ask(tokens: Iterable[int], new: int = 6, **options) -> Request:
    return Request(tuple(map(int, tokens)), new, logprobs=4, **options)


def drain(engine: Engine, limit: int = 2000) -> list[Event]:
    """Steps to the end, the invariants checked after each."""
    events = []
    for _ in range(limit):
        if engine.idle:
            return events
        events += engine.step()
        engine.check()
    raise AssertionError("no end")


def run(engine: Engine, requests: Sequence[Request], *, apart: int = 0) -> list[Running]:
    """The sequences of the requests, each added ``apart`` steps after the one before it."""
    sequences = []
    for request in requests:
        sequences.append(engine.add(request))
        for _ in range(apart):
            engine.step()
            engine.check()
    drain(engine)
    return sequences


def solo(engine: Engine, request: Request) -> Result:
    """The request alone and cold."""
    engine.ranks[0].cache.clear()
    [sequence] = run(engine, [request])
    engine.ranks[0].cache.clear()
    return sequence.result


def assert_same(got: Result, want: Result) -> None:
    """Equal tokens and finish; log probabilities within the bound across buckets."""
    assert got.token_ids == want.token_ids
    assert got.finish_reason == want.finish_reason
    a, b = ([token.logprob for token in result.logprobs] for result in (got, want))
    np.testing.assert_allclose(a, b, rtol=0, atol=ACROSS_BUCKETS_ABS)


def assert_oracle(
    oracle: Oracle, sequence: Running, *, hits: Sequence[int] | None = None, replay: bool = True
) -> None:
    """Greedy tokens and their four best log probabilities are those of the oracle fed with the same
    tokens; Tied if that cannot be said. hits: by default what the engine says it adopted, written
    by a cold request.
    """
    result = sequence.result
    if hits is None:
        hits = (result.cached_tokens,) if result.cached_tokens else ()
    fed = [*sequence.request.prompt, *result.token_ids[:-1]]
    logits = oracle.logits(fed, sequence.length, hits=hits, replay=replay)
    if oracle.margin <= TIE:
        raise Tied("float32 cannot tell what is selected: take another prompt")
    np.testing.assert_array_equal(result.token_ids, logits.argmax(-1))
    want = log_softmax(logits)
    for row, token in zip(want, result.logprobs, strict=True):
        ids, values = zip(*token.top, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], rtol=0, atol=REPLAY_LOGITS_ABS)
        np.testing.assert_allclose(
            values, np.sort(row)[: -len(ids) - 1 : -1], atol=REPLAY_LOGITS_ABS
        )


def assert_nothing_leaks(engine: Engine) -> None:
    """Idle, no page held but by the cache, none at all once that is cleared."""
    assert engine.idle
    for rank in engine.ranks:
        assert rank.pool.pages - rank.pool.free == len(rank.cache)
        rank.cache.clear()
        rank.check()
        assert rank.pool.free == rank.pool.pages and len(rank.cache) == 0


@dataclass
class Log:
    """Plans of an engine, as they were made."""

    plans: list[Plan]

    @property
    def preempted(self) -> list[Stage]:
        return [s.resume_to for plan in self.plans for s in plan.preempt]


def recorded(engine: Engine, plan: Callable[..., Plan] = Scheduler.plan) -> Log:
    """Keep the plans of an engine's first rank from now on; ``plan`` makes them."""
    log = Log([])

    def keep(scheduler: Scheduler, *given: Any, **named: Any) -> Plan:
        log.plans.append(plan(scheduler, *given, **named))
        return log.plans[-1]

    engine.ranks[0].plan = MethodType(keep, engine.ranks[0])
    return log


def everyone_makes_way(when: Callable[[Scheduler], bool]) -> Callable[..., Plan]:
    """Plans that, when told, do nothing but preempt all that runs."""

    def plan(scheduler: Scheduler, *given: Any, **named: Any) -> Plan:
        if not scheduler.running or not when(scheduler):
            return Scheduler.plan(scheduler, *given, **named)
        made = Plan()
        for sequence in list(scheduler.running):
            scheduler._preempt(made, sequence)
        return made

    return plan


def each(count: int) -> Callable[[Scheduler], bool]:
    """True at every ``count``-th call; below 3 nothing could be decoded in between."""
    calls = itertools.count(1)
    return lambda _: next(calls) % count == 0


def between_chunks() -> Callable[[Scheduler], bool]:
    """True once after each chunk that is not a prompt's last."""
    seen = set()

    def when(scheduler: Scheduler) -> bool:
        places = {(s.arrival, s.computed) for s in scheduler.running if s.stage is Stage.PREFILL}
        new = places - seen
        seen.update(new)
        return bool(new)

    return when


def free_pages(engine: Engine) -> list[int]:
    pool = engine.ranks[0].pool
    return [page for page in range(pool.pages) if not pool.holders(page)]


def poison(engine: Engine, pages: Sequence[int], slots: Sequence[int]) -> None:
    """NaN or 0xFF in everything that free pages and free slots hold; the tags of rings stay, as a
    request leaves them when it ends.
    """
    cache = engine.executor.cache
    private = {name: _poisoned(getattr(cache, name), slots) for name in _private_rows(cache)}
    engine.executor.cache = replace(cache, pools=_poisoned(cache.pools, pages), **private)


def _private_rows(cache: Cache) -> list[str]:
    return [name for name in vars(cache) if name not in ("pools", "history", "last_token")]


def _poisoned(tree, places: Sequence[int]):
    def fill(path: tuple, leaf: jax.Array) -> jax.Array:
        if jax.tree_util.keystr(path).endswith(".tags"):
            return leaf
        host = np.array(leaf)
        bits = host.view(np.uint8).reshape(*host.shape, host.dtype.itemsize)
        bits[list(places)] = 0xFF
        return jnp.asarray(host)

    return jax.tree_util.tree_map_with_path(fill, tree)


def page_bits(engine: Engine, pages: Sequence[int]) -> list[bytes]:
    """The bytes of some pages in every pool."""
    leaves = jax.tree.leaves(engine.executor.cache.pools)
    return [np.asarray(leaf)[list(pages)].tobytes() for leaf in leaves]
