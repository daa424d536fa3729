"""Dynamo's SelectionService follows a publisher of ours: what is cached where, and what it lost."""

import asyncio
import os
import time

import numpy as np
import pytest

from serving.kv_events.hashes import page_hashes
from serving.kv_events.log import EventLog, Evicted, Inserted, Pooled
from serving.kv_events.publisher import Publisher
from serving.kv_events.sockets import Endpoint
from tests.serving.kv_events.support import WAIT_S

# It tells of every event, on standard output.
os.environ.setdefault("DYN_LOG", "error")
pytest.importorskip("zmq", reason="the extra [route] is not installed")
dynamo = pytest.importorskip("dynamo._core", reason="the extra [route] is not installed")

SIZE, PAGES, RANKS = 16, 10, 2
TOKENS = list(range(100, 100 + SIZE * PAGES))
NAMES = page_hashes(TOKENS, SIZE)
# A worker number for each data rank: only those of one rank may have a replay endpoint.
WORKERS = (7, 8)


def tokens(index: int) -> bytes:
    return np.array(TOKENS[index * SIZE : (index + 1) * SIZE], np.int32).tobytes()


def cached(index: int) -> Inserted:
    return Inserted(index + 1, index, tokens(index))


def pooled(index: int) -> Pooled:
    return Pooled(NAMES[index], NAMES[index - 1] if index else None, tokens(index))


async def follow(service, publisher: Publisher, rank: int) -> None:
    await service.upsert_worker(
        {
            "worker_id": WORKERS[rank],
            "model_name": "m",
            "endpoint": "http://127.0.0.1:1",
            "block_size": SIZE,
            "data_parallel_start_rank": rank,
            "data_parallel_size": 1,
            "max_num_batched_tokens": 512,
            "total_kv_blocks": 100,
            "kv_events_endpoints": {rank: publisher.endpoints[rank]},
            "replay_endpoint": publisher.replay_endpoints[rank],
        }
    )


async def overlaps(service) -> dict[int, tuple[int, int]]:
    """Leading pages of the prompt on the device of each rank, and in the pool behind them."""
    query = {"model_name": "m", "token_ids": TOKENS, "block_size": SIZE}
    found = await service.overlap_scores(query)
    return {
        worker["dp_rank"]: (worker["device_blocks"], worker["host_pinned_extension_blocks"])
        for worker in found["workers"]
    }


async def becomes(service, expected: dict[int, tuple[int, int]]) -> None:
    until = time.monotonic() + WAIT_S
    while (found := await overlaps(service)) != expected:
        assert time.monotonic() < until, f"{found}, not {expected}"
        await asyncio.sleep(0.01)


async def subscribed(service, publisher: Publisher, rank: int) -> None:
    """Its subscription takes a while to arrive: it is there when it has heard of the first page."""
    until = time.monotonic() + WAIT_S
    while not (await overlaps(service))[rank][0]:
        assert time.monotonic() < until
        publisher.put(rank, Inserted(99, 0, bytes(4 * SIZE)))
        publisher.put(rank, Evicted(99))
        await asyncio.sleep(0.05)


async def follows(publisher: Publisher) -> None:
    """A rank with cached pages is found by who comes late; the other one gets some later."""
    service = dynamo.SelectionService(indexer_threads=1)
    for index in range(3):
        publisher.put(1, cached(index))
    publisher.put(0, cached(0))
    for rank in range(RANKS):
        await follow(service, publisher, rank)
        await subscribed(service, publisher, rank)
    await becomes(service, {0: (1, 0), 1: (3, 0)})
    publisher._logs[1].append([cached(3)])  # and not sent
    publisher.put(1, cached(4))
    await becomes(service, {0: (1, 0), 1: (5, 0)})
    for index in range(7):
        publisher.put(0, pooled(index))
    await becomes(service, {0: (1, 6), 1: (5, 0)})
    query = {"model_name": "m", "token_ids": TOKENS, "block_size": SIZE}
    chosen = await service.select(query)
    assert (chosen["worker_id"], chosen["dp_rank"]) == (WORKERS[0], 0)
    for index in (4, 3, 2):
        publisher.put(1, Evicted(index + 1))
    await becomes(service, {0: (1, 6), 1: (2, 0)})
    service.shutdown()


@pytest.mark.parametrize("kept_bytes", [2**20, 1])
def test_it_knows_what_every_rank_holds(kept_bytes):
    """kept_bytes 1: what it lost is not told again message by message, but as everything."""
    logs = [EventLog(r, SIZE, pool_pages=9, kept_bytes=kept_bytes, most=2) for r in range(RANKS)]
    publisher = Publisher(Endpoint("127.0.0.1", 0), logs)
    publisher.start()
    try:
        asyncio.run(follows(publisher))
    finally:
        publisher.close()
