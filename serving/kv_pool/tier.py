"""An engine's side of the pool: fetches for its scheduler, pages to store from its device."""

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from serving.kv_pool.counts import Counts, Totals
from serving.kv_pool.fetch import PoolFetch
from serving.kv_pool.keys import Chain, Namespace
from serving.kv_pool.mover import Taken
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.pool import KVPool
from serving.kv_pool.remote import Complete, Waits
from serving.kv_pool.values import HEADER_BYTES, Codec, Verdict
from serving.scheduler import Plan, Scheduler
from serving.sequence import Sequence


class Watcher(Protocol):
    """Is told, on the storing thread, which pages of a data rank's sequences the pool has now."""

    def stored(self, rank: int, chain: Chain, tokens: np.ndarray, index: int) -> None: ...


class PoolTier:
    """``Remote`` over a ``KVPool``. The engine's thread calls it and never waits in it, but in
    ``wait``.
    """

    def __init__(
        self, pool: KVPool, namespace: Namespace, options: PoolOptions, window: int, counts: Counts
    ):
        """window: hits that are no longer are not loaded."""
        self.pool, self.options, self.counts = pool, options, counts
        self._root, self._size, self._window = namespace.digest, namespace.page_size, window
        self._codec: Codec = pool.codec
        self._changed = threading.Event()
        self._backlog = 0
        self._backlog_lock = threading.Lock()
        self.watcher: Watcher | None = None

    def fetch(self, sequence: Sequence, held: int, limit: int) -> PoolFetch:
        fetch = PoolFetch(held, self.counts, self._changed.set)
        if self._hangs:
            self.counts.add("skipped")
            return fetch
        if held < limit:
            self.counts.add("lookups")
            self.counts.add("queried_tokens", (limit - held) * self._size)
            fetch.turn(Waits.LOOKUP, self.options.lookup_s)
        tokens, chain = sequence.prompt, self._chain(sequence)
        self.pool.lookups.submit(self._look_up, fetch, chain, tokens, limit)
        return fetch

    def store(self, ranks: Items[Scheduler], take: Callable[[Items[Complete]], Taken]) -> None:
        """Send complete pages on their way to the pool; they must be taken from the device before
        the next plan gives them to others. take: rows of complete pages, batch by batch.
        """
        items = [item for rank in ranks for item in rank.prefetch.drain(rank.running)]
        if not items:
            return
        if self._backlog >= self.options.backlog:
            self.counts.add("dropped", len(items))
            return
        for batch, rows in take(items):
            self._submit(batch, rows)

    def dispatched(self, plan: Plan) -> None:
        """Count a step."""
        self.counts.add("steps")
        self.counts.add("starved_lookups", Waits.LOOKUP in plan.starved)
        self.counts.add("starved_loads", Waits.LOAD in plan.starved)
        for load in plan.loads:
            self.counts.add("hit_tokens", (load.stop - load.first) * self._size)

    def wait(self, seconds: float) -> None:
        """Until a fetch is over, or so long; the engine has nothing else to do."""
        began = time.monotonic()
        self._changed.wait(seconds)
        self._changed.clear()
        self.counts.add("idle_s", time.monotonic() - began)

    def snapshot(self) -> Totals:
        return self.counts.snapshot()

    def flush(self) -> None:
        """Wait until what was stored so far is in the pool."""
        self.pool.stores.submit(lambda: None).result()

    def close(self) -> None:
        self.pool.close()

    def _submit(self, items: Items[Complete], rows: object) -> None:
        """Put pages into the pool: rows [1, n, page bytes] that are on their way from a device, the
        first of them those of ``items``.
        """
        known = {id(item.sequence): item.sequence for item in items}
        tokens = {key: sequence.tokens_known() for key, sequence in known.items()}
        named = [(self._chain(i.sequence), tokens[id(i.sequence)], i.index) for i in items]
        with self._backlog_lock:
            self._backlog += len(items) * self._codec.page_bytes
        self.pool.stores.submit(self._store, items[0].data_rank, named, rows)

    @property
    def _hangs(self) -> bool:
        """Whether a call of the backend has been under way for longer than anybody waits."""
        batch = max(self.options.batches) * self._codec.value_bytes
        longest = self.options.load_s + batch / self.options.least_rate
        lanes = self.pool.lookups.busy_s, self.pool.loads.busy_s
        return lanes[0] > self.options.lookup_s or lanes[1] > longest

    def _chain(self, sequence: Sequence) -> Chain:
        if sequence.chain is None:
            sequence.chain = Chain(self._root, self._size)
        return sequence.chain

    def _look_up(self, fetch: PoolFetch, chain: Chain, tokens: np.ndarray, limit: int) -> None:
        """On the lookup thread: find what follows, begin to load it, then renew what is before."""
        keys = chain.keys(tokens, limit)
        if fetch.open:
            found = _leading(self.pool.checked.lookup(keys[fetch.first :]))
            stop = fetch.first + found
            bytes_found = found * self._codec.value_bytes
            seconds = self.options.load_s + bytes_found / self.options.least_rate
            if not found or stop * self._size <= self._window:
                fetch.finish()
            elif fetch.turn(Waits.LOAD, seconds):
                self.pool.loads.submit(self._load, fetch, keys[:stop])
        if not fetch.first:
            fetch.missing = ()
            return
        kept = self.pool.checked.lease(keys[: fetch.first])
        if kept is not None:
            self.counts.add("refreshed", sum(kept))
            fetch.missing = [index for index, there in enumerate(kept) if not there]

    def _load(self, fetch: PoolFetch, keys: list[bytes]) -> None:
        """On a loading thread: the next batch; the one after it queues behind other requests."""
        if not fetch.open:
            return
        wanted = keys[fetch.stop :][: max(self.options.batches)]
        batch = self.options.batch(len(wanted))
        rows = np.zeros((batch, self._codec.value_bytes), np.uint8)
        verdicts = self.pool.checked.get(wanted, rows[: len(wanted)])
        good = _leading([verdict is Verdict.GOOD for verdict in verdicts])
        if fetch.arrived(rows, good):
            self.counts.add("loaded", good)
            if good < len(wanted) or fetch.stop == len(keys):
                fetch.finish()
            else:
                self.pool.loads.submit(self._load, fetch, keys)

    def _store(self, rank: int, named: list[tuple[Chain, np.ndarray, int]], pages: object) -> None:
        """On the storing thread."""
        try:
            keys = [chain.keys(tokens, index + 1)[index] for chain, tokens, index in named]
            rows = np.empty((len(keys), self._codec.value_bytes), np.uint8)
            rows[:, HEADER_BYTES:] = np.asarray(pages)[0, : len(keys)]
            stored = self.pool.checked.put(keys, rows)
            if self.watcher is not None:
                for page, there in zip(named, stored, strict=True):
                    if there:
                        self.watcher.stored(rank, *page)
        finally:
            with self._backlog_lock:
                self._backlog -= len(named) * self._codec.page_bytes


def _leading(flags: Items[bool]) -> int:
    """How many are true before the first that is not."""
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))
