"""Data ranks that share a pool: pages that one rank computed, loaded by all of them at once, and
requests that one rank begins and another one goes on with.
"""

import os
from dataclasses import replace

import pytest

from serving.handoff.options import HandoffOptions
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.shm import pool_path
from serving.request import Request
from tests.sharding.devices.check_engine import (
    OPTIONS,
    assert_tokens,
    drained,
    engine_on,
    golden_requests,
)

PATIENT = PoolOptions(
    "shm", "tiny", capacity=4_000_000, name=f"devices-{os.getpid()}", lookup_s=60, load_s=60
)


@pytest.fixture(autouse=True)
def removed():
    yield
    pool_path(str(PATIENT.name)).unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dep2", "tp2xdp2"])
def test_ranks_load_what_one_of_them_stored(name):
    pool = replace(PATIENT, batches=(1, 4))
    engine = engine_on(name, replace(OPTIONS, prefix_cache=True, kv_pool=pool))
    assert engine.kv_pool is not None
    [request], [tokens] = golden_requests(["p96.hit80"])
    first = engine.add(Request(request.prompt[:81], 1))
    drained(engine)
    engine.kv_pool.flush()
    assert engine.kv_pool.snapshot().stored == 5 and first.data_rank == 0
    for rank in engine.ranks:
        rank.cache.clear()
    sequences = [engine.add(request) for _ in engine.ranks]
    assert [sequence.data_rank for sequence in sequences] == [0, 1]
    drained(engine)
    assert_tokens(sequences, [tokens] * 2)
    assert [sequence.result.pool_tokens for sequence in sequences] == [80, 80]
    assert_nothing_left(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dep2", "tp2xdp2"])
def test_requests_go_from_one_rank_to_another(name):
    pool = replace(PATIENT, batches=(1, 4))
    options = replace(OPTIONS, prefix_cache=True, kv_pool=pool, handoff=HandoffOptions())
    engine = engine_on(name, options)
    requests, tokens = golden_requests(["p96", "p5", "p37"])
    numbered = list(enumerate(requests))
    begun = [
        engine.add(replace(request, hands_off=True, max_new_tokens=1), data_rank=i % 2)
        for i, request in numbered
    ]
    drained(engine)
    sequences = [
        engine.add(replace(request, ticket=begun[i].left), data_rank=1 - i % 2)
        for i, request in numbered
    ]
    drained(engine)
    assert_tokens(sequences, tokens)
    assert [sequence.data_rank for sequence in sequences] == [1, 0, 1]
    assert not any(sequence.result.encoder_rows for sequence in sequences)
    assert_nothing_left(engine)


def assert_nothing_left(engine):
    assert engine.compiles.count == 0
    for rank in engine.ranks:
        rank.cache.clear()
        rank.check()
        assert rank.pool.free == rank.pool.pages
    engine.close()
