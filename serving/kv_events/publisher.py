"""Publishes what the caches of an engine hold, a pair of ZMQ sockets for each data rank."""

import logging
import queue
import threading
from collections.abc import Sequence
from functools import partial
from socket import socketpair
from typing import Any

from serving.engine import Engine
from serving.kv_events.hooks import DeviceWatch, PoolWatch
from serving.kv_events.log import Change, EventLog
from serving.kv_events.sockets import Endpoint, zmq_module
from serving.kv_events.wire import END, EventError, sequence_bytes, sequence_number

# Of a pool whose size is not known here; each is some 500 bytes of memory.
_MOST_POOLED = 2**17
_log = logging.getLogger(__name__)


class Publisher:
    """Two threads: one sends changes as messages, one answers who missed some. An engine, and its
    pool, only put changes into a queue.
    """

    def __init__(self, endpoint: Endpoint, logs: Sequence[EventLog]):
        """Data rank r publishes on port + 2 r and replays on the next one, or on free ports.
        UserError if pyzmq is missing or a port cannot be had.
        """
        self._zmq = zmq_module()
        self._logs = list(logs)
        self._live: list[Any] = []
        self._replays: list[Any] = []
        try:
            for rank in range(len(self._logs)):
                self._live.append(endpoint.bind("PUB", 2 * rank))
                self._replays.append(endpoint.bind("ROUTER", 2 * rank + 1))
        except Exception:
            self._close_sockets()
            raise
        self.endpoints = [_address(sock) for sock in self._live]
        self.replay_endpoints = [_address(sock) for sock in self._replays]
        self._changes: queue.SimpleQueue[tuple[int, Change] | None] = queue.SimpleQueue()
        self._stop, self._stopped = socketpair()
        self._open = True
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            for name, run in (("kv-publish", self._publish), ("kv-replay", self._replay))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, rank: int, change: Change) -> None:
        """Queue a change; any thread may."""
        if self._open:
            self._changes.put((rank, change))

    def close(self) -> None:
        """Send what is queued and end the threads."""
        self._open = False
        self._changes.put(None)
        self._stop.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._stopped.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in (*self._live, *self._replays):
            sock.close()

    def _guarded(self, run: Any) -> None:
        """A fault ends the events, not the engine, and lets no queue grow."""
        try:
            run()
        except Exception:
            self._open = False
            _log.exception("kv events: no more of them are published")

    def _publish(self) -> None:
        going, most = True, min(log.most for log in self._logs)
        while going:
            taken = [self._changes.get()]
            while len(taken) < most and not self._changes.empty():
                taken.append(self._changes.get())
            going = None not in taken
            for rank, (log, sock) in enumerate(zip(self._logs, self._live, strict=True)):
                mine = [item[1] for item in taken if item is not None and item[0] == rank]
                if message := log.append(mine):
                    sock.send_multipart([b"", sequence_bytes(message[0]), message[1]])

    def _replay(self) -> None:
        poller = self._zmq.Poller()
        for source in (*self._replays, self._stopped):
            poller.register(source, self._zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped.fileno() in ready:
                return
            for log, sock in zip(self._logs, self._replays, strict=True):
                if sock in ready:
                    self._answer(log, sock)

    def _answer(self, log: EventLog, sock: Any) -> None:
        """Send what an asker [identity, empty, number] wants, and the end."""
        frames = sock.recv_multipart()
        try:
            if len(frames) != 3:
                raise EventError(f"{len(frames)} frames where 3 are expected")
            start = sequence_number(frames[2])
        except EventError as error:
            _log.warning("kv events: a replay was asked for with %s", error)
            return
        for number, payload in log.since(start):
            sock.send_multipart([*frames[:2], sequence_bytes(number), payload])
        sock.send_multipart([*frames[:2], sequence_bytes(END), b""])


def publisher_of(engine: Engine, endpoint: Endpoint) -> Publisher:
    """Tells what the engine's caches hold, which must be empty; not started."""
    size, pool, most = engine.options.page_size, engine.kv_pool, _MOST_POOLED
    if pool is not None and pool.options.backend == "shm":
        most = min(most, pool.options.capacity // pool.pool.codec.value_bytes)
    ranks = range(len(engine.ranks))
    publisher = Publisher(endpoint, [EventLog(rank, size, pool_pages=most) for rank in ranks])
    for rank, scheduler in enumerate(engine.ranks):
        if len(scheduler.cache):
            raise ValueError(f"{len(scheduler.cache)=} must be 0")
        scheduler.cache.watcher = DeviceWatch(partial(publisher.put, rank))
    if pool is not None:
        pool.watcher = PoolWatch(publisher.put, size)
    return publisher


def _address(sock: Any) -> str:
    return sock.last_endpoint.rstrip(b"\0").decode()
