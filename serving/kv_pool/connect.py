"""Opens the pool that an engine is told to use."""

import logging
from collections.abc import Sequence

import numpy as np

from dsv41_jax.errors import UserError
from serving.executor import Executor
from serving.handoff.state import state_bytes
from serving.handoff.tier import Accepts, HandoffTier
from serving.kv_pool.counts import Counts
from serving.kv_pool.keys import Namespace
from serving.kv_pool.moves import page_planes
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.pool import KVPool
from serving.kv_pool.shm import SharedMemoryStore, pool_path
from serving.kv_pool.store import ForeignStore, PageStore
from serving.kv_pool.values import Codec
from serving.options import EngineOptions

_log = logging.getLogger(__name__)


class NoStore:
    """In place of a pool that is another's: has nothing, takes nothing."""

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        return [False] * len(keys)

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        return [False] * len(keys)

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def remove(self, keys: Sequence[bytes], *, leased: bool = False) -> list[bool]:
        return [False] * len(keys)

    def close(self) -> None:
        pass


def check_reachable(options: PoolOptions) -> None:
    """UserError if a pool on the network does not answer, or its package is missing: before
    anything large is loaded.
    """
    if options.backend == "mooncake":
        from serving.kv_pool.mooncake import check_master

        check_master(options.address)


def namespace_of(options: EngineOptions, executor: Executor, model: str) -> Namespace:
    """What other engines must have in common with this one to share pages. model: fingerprint of
    its checkpoint.
    """
    numerics = executor.programs.ops.numerics.name
    return Namespace(model, numerics, options.page_size, page_planes(executor.cache.pools))


def open_tier(options: EngineOptions, executor: Executor) -> HandoffTier:
    """The engine's side of its pool. UserError if the pool cannot be had, or not by this engine."""
    programs = executor.programs
    if options.kv_pool is None:
        raise ValueError(f"{options.kv_pool=} must name a pool")
    if programs.shared:
        raise UserError("--kv-pool: a model of several processes cannot use one")
    namespace = namespace_of(options, executor, options.kv_pool.model)
    tier = open_pool(options.kv_pool, namespace, executor.cfg.sliding_window)
    if options.handoff is not None:
        tier.accepts = Accepts.of(options.handoff.form, state_bytes(executor.cache))
    return tier


def open_pool(options: PoolOptions, namespace: Namespace, window: int) -> HandoffTier:
    """The engine's side of a pool; UserError if it cannot be had. One that is there, but was made
    for something else, is left alone: a line in the log, a count, and no page is shared.
    """
    counts, codec = Counts(), Codec(namespace.digest, namespace.page_bytes)
    try:
        store = _store(options, namespace, codec.value_bytes)
    except ForeignStore as error:
        counts.add("foreign_pools")
        _log.warning("kv pool: %s; it is not used", error)
        store = NoStore()
    return HandoffTier(KVPool(store, codec, counts), namespace, options, window, counts)


def _store(options: PoolOptions, namespace: Namespace, value_bytes: int) -> PageStore:
    if options.backend == "shm":
        name = options.name or namespace.digest.hex()[:16]
        path = pool_path(name)
        return SharedMemoryStore(path, options.capacity, value_bytes, lease_s=options.lease_s)
    from serving.kv_pool.mooncake import MooncakeStore

    return MooncakeStore(options.address, value_bytes)
