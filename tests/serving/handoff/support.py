"""Two engines with a pool between them, one of which begins what the other one goes on with."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from serving.engine import Engine
from serving.handoff.leaving import Departures
from serving.handoff.record import value_keys
from serving.handoff.ticket import Ticket
from serving.kv_pool.connect import open_tier
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.shm import pool_path
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import Request
from serving.scheduler import Scheduler
from serving.sequence import Sequence

WAIT_S = 60.0
POOL = PoolOptions(
    "shm", "tiny", capacity=4_000_000, lookup_s=WAIT_S, load_s=WAIT_S, batches=(1, 4)
)


def join(engine: Engine, pool: PoolOptions) -> None:
    """Give an engine another pool, a scheduler for it, and nothing that leaves."""
    assert engine.options.handoff is not None
    engine.kv_pool = open_tier(replace(engine.options, kv_pool=pool), engine.executor)
    form = engine.options.handoff.form
    engine.departures = Departures(engine.kv_pool, form, engine.executor)
    size = engine.options.page_size
    for number, rank in enumerate(engine.ranks):
        pages = PagePool(engine.options.pages)
        cache = PrefixCache(pages, size)
        engine.ranks[number] = Scheduler(rank.limits, pages, cache, engine.kv_pool)


def new_pool(name: str) -> Path:
    """The path of a pool that is not there yet."""
    path = pool_path(name)
    path.unlink(missing_ok=True)
    return path


def to_leave(request: Request) -> Request:
    """The request as a router sends it to the engine that begins it."""
    fewest = min(request.min_tokens, 1)
    return replace(request, hands_off=True, max_new_tokens=1, min_tokens=fewest)


def to_go_on(request: Request, begun: Sequence) -> Request:
    """And to the one that goes on with it."""
    assert begun.left is not None, begun.result
    return replace(request, ticket=begun.left)


def stepped(engine: Engine, limit: int = 100_000) -> list[Sequence]:
    """Step until nothing is left: the sequences that failed."""
    failed = []
    for _ in range(limit):
        if engine.idle:
            return failed
        engine.step()
        engine.check()
        failed += engine.failed
    raise AssertionError("no end")


def begun(engine: Engine, requests: Iterable[Request]) -> list[Sequence]:
    """The sequences of requests that have left an engine."""
    sequences = [engine.add(to_leave(request)) for request in requests]
    assert stepped(engine) == []
    return sequences


def gone_on(engine: Engine, requests: Iterable[Request], left: list[Sequence]) -> list[Sequence]:
    pairs = zip(requests, left, strict=True)
    sequences = [engine.add(to_go_on(request, before)) for request, before in pairs]
    assert stepped(engine) == []
    return sequences


def values_of(engine: Engine, ticket: Ticket, *, tail: bool) -> list[bytes]:
    """Keys of what is left, the incomplete page first."""
    assert engine.kv_pool is not None
    codec = engine.kv_pool.pool.codec
    return value_keys(codec.root, ticket, codec.page_bytes, tail=tail)
