"""Dynamo's SelectionService as the policy: in this process, over events that we pass on to it.

It follows one publisher a data rank. These are sockets of ours, so that it hears what was checked,
also what was replayed, and of every pool page for each rank that loads from that pool. Every data
rank is a worker of its own there, so that ranks can be left out.
"""

import asyncio
import importlib
import logging
import os
import time
from array import array
from collections.abc import Awaitable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv41_jax.errors import UserError
from serving.kv_events.sockets import zmq_module
from serving.kv_events.wire import (
    POOL,
    Batch,
    Cleared,
    Event,
    Removed,
    Stored,
    encode,
    sequence_bytes,
)
from serving.router.announcement import Announcement
from serving.router.policy import NoRank, Offer, Placed, Prompt, offered
from serving.routing.score import Overlap, Target

MISSING_EXTRA = "--policy dynamo: the extra [route] is not installed"
_log = logging.getLogger(__name__)
_SUBSCRIBED_S = 10.0
# Of a large pool, told at a time.
_PAGES = 1000


def dynamo_module() -> Any:
    """Dynamo's native module; UserError if it cannot be imported."""
    # It tells of every selection, on standard output.
    os.environ.setdefault("DYN_LOG", "error")
    try:
        return importlib.import_module("dynamo._core")
    except ImportError as error:
        raise UserError(f"{MISSING_EXTRA} ({error})") from None


class _Channel:
    """Our publisher of one rank's events."""

    def __init__(self, rank: int):
        self._rank, self._next = rank, 0
        zmq = zmq_module()
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # what is dropped would never be told again
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    async def subscribed(self) -> None:
        """Wait until somebody listens; UserError if nobody does."""
        until = time.monotonic() + _SUBSCRIBED_S
        while not self._socket.poll(0):
            if time.monotonic() > until:
                raise UserError("Dynamo does not listen to the events of a worker")
            await asyncio.sleep(0.005)

    def send(self, events: Sequence[Event]) -> None:
        payload = encode(Batch(time.time(), list(events), self._rank))
        self._socket.send_multipart([b"", sequence_bytes(self._next), payload])
        self._next += 1

    def close(self) -> None:
        self._socket.close()


@dataclass
class _PoolPages:
    """What lies in a pool, so that ranks which come later hear of it: parent and tokens by hash, a
    page behind its parent. put: by whom.
    """

    page_size: int
    pages: dict[int, tuple[int | None, array]] = field(default_factory=dict)
    put: dict[int, Target] = field(default_factory=dict)

    def store(self, target: Target, event: Stored) -> None:
        parent, size = event.parent, event.page_size
        for index, page in enumerate(event.hashes):
            self.pages[page] = parent, array("i", event.tokens[index * size : (index + 1) * size])
            self.put[page] = target
            parent = page

    def remove(self, hashes: Sequence[int]) -> None:
        for page in hashes:
            self.pages.pop(page, None)
            self.put.pop(page, None)

    def stored(self, hashes: Iterable[int]) -> list[Event]:
        """Those of the pages that are still there."""
        there = [(page, *self.pages[page]) for page in hashes if page in self.pages]
        return [
            Stored([page], parent, tokens.tolist(), self.page_size, None, POOL)
            for page, parent, tokens in there
        ]


@dataclass
class _Booked:
    """A reservation. tokens: generated since its last block of output."""

    target: Target
    tokens: int = 0


class DynamoPolicy:
    """``Policy`` over a SelectionService."""

    looks = True
    waiting = 0

    def __init__(self) -> None:
        module = dynamo_module()
        self._failure = module.SelectionServiceError
        self._service = module.SelectionService(indexer_threads=1)
        self._model, self._page_size = "", 1
        self._numbers: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}
        self._channels: dict[Target, _Channel] = {}
        self._pool_of: dict[Target, str] = {}
        self._pools: dict[str, _PoolPages] = {}
        self._booked: dict[Hashable, _Booked] = {}
        self._tasks: set[asyncio.Task] = set()

    async def join(self, targets: Sequence[Target], said: Announcement, pool: str | None) -> None:
        self._model, self._page_size = said.model, said.page_size
        for target in targets:
            number = self._numbers.setdefault(target, len(self._numbers))
            self._targets[number] = target
            channel = self._channels[target] = _Channel(target.rank)
            await self._service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": said.model,
                    "endpoint": target.worker,
                    "block_size": said.page_size,
                    "data_parallel_start_rank": target.rank,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": said.chunk,
                    "total_kv_blocks": said.pages,
                    "kv_events_endpoints": {target.rank: channel.address},
                }
            )
            await channel.subscribed()
            if pool is not None:
                self._pool_of[target] = pool
                pages = self._pools.setdefault(pool, _PoolPages(said.page_size))
                await self._tell_all(target, channel, pages)

    async def leave(self, targets: Sequence[Target]) -> None:
        for target in targets:
            if channel := self._channels.get(target):
                try:
                    self.events(target, [Cleared()])
                    await self._settled(self._service.delete_worker(self._numbers[target]))
                finally:
                    channel.close()
                    del self._channels[target]
                    self._pool_of.pop(target, None)
        gone = set(targets)
        for key in [key for key, found in self._booked.items() if found.target in gone]:
            del self._booked[key]

    def events(self, target: Target, events: Sequence[Event]) -> None:
        pool = self._pool_of.get(target)
        for event in events:
            if pool is None or (not isinstance(event, Cleared) and event.medium != POOL):
                self._channels[target].send([event])
            elif isinstance(event, Cleared):
                self._begin_anew(target, pool)
            else:
                pages = self._pools[pool]
                if isinstance(event, Stored):
                    pages.store(target, event)
                else:
                    pages.remove(event.hashes)
                self._tell(pool, event)

    def _begin_anew(self, target: Target, pool: str) -> None:
        """Nobody would tell of the end of what the rank has put into the pool."""
        pages = self._pools[pool]
        gone = [page for page, owner in pages.put.items() if owner == target]
        pages.remove(gone)
        for start in range(0, len(gone), _PAGES):
            self._tell(pool, Removed(gone[start : start + _PAGES], POOL))
        channel = self._channels[target]
        channel.send([Cleared()])
        self._later(self._tell_all(target, channel, pages))

    async def _tell_all(self, target: Target, channel: _Channel, pages: _PoolPages) -> None:
        """A rank of what lies in its pool, with time for others in between. What comes meanwhile is
        told again: its parent may not have been told before.
        """
        told: set[int] = set()
        while rest := [page for page in pages.pages if page not in told]:
            for start in range(0, len(rest), _PAGES):
                if self._channels.get(target) is not channel:
                    return
                if known := pages.stored(rest[start : start + _PAGES]):
                    channel.send(known)
                await asyncio.sleep(0)
            told.update(rest)

    def _tell(self, pool: str, event: Event) -> None:
        """All ranks that load from the pool."""
        for target, name in self._pool_of.items():
            if name == pool:
                self._channels[target].send([event])

    async def place(self, key: Hashable, prompt: Prompt, offer: Offer) -> Placed:
        chosen = asyncio.ensure_future(
            self._service.select_and_reserve(
                {
                    "model_name": self._model,
                    "token_ids": list(prompt.tokens),
                    "selection_id": str(key),
                    "allowed_worker_ids": [self._numbers[target] for target in offered(offer)],
                }
            )
        )
        try:
            found = await asyncio.shield(chosen)
        except asyncio.CancelledError:
            chosen.add_done_callback(
                lambda _: self._later(self._service.free_reservation(str(key)))
            )
            raise
        except self._failure as error:
            raise NoRank(str(error)) from None
        target = self._targets[found["worker_id"]]
        self._booked[key] = _Booked(target)
        overlap = found["overlap"]
        return Placed(key, target, prompt, Overlap(overlap["gpu"], overlap["cpu"]))

    def prefilled(self, key: Hashable) -> None:
        if key in self._booked:
            self._later(self._service.prefill_complete(str(key)))

    def grown(self, key: Hashable, tokens: int) -> None:
        booked = self._booked.get(key)
        if booked is None:
            return
        booked.tokens += tokens
        while booked.tokens >= self._page_size:
            booked.tokens -= self._page_size
            try:
                self._service.add_output_block(str(key))
            except self._failure as error:
                self._report(error)

    def freed(self, key: Hashable) -> None:
        if self._booked.pop(key, None):
            self._later(self._service.free_reservation(str(key)))

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._service.shutdown_async()
        for channel in self._channels.values():
            channel.close()

    def _later(self, answer: Awaitable) -> None:
        """Not waited for: who tells it has something else to do."""
        task = asyncio.ensure_future(self._settled(answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settled(self, answer: Awaitable) -> None:
        try:
            await answer
        except self._failure as error:
            self._report(error)

    def _report(self, error: Any) -> None:
        """A reservation may be gone with its rank, a rank never have been there."""
        if error.kind != "not_found":
            _log.warning("Dynamo: %s", error)
