"""The engine on a thread of its own, and its two bridges to the event loop."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dsv41_jax.process_memory import process_memory
from serving.engine import Engine, Event
from serving.handoff.ticket import LOST
from serving.request import Request
from serving.sequence import Sequence
from serving.server.errors import ApiError
from serving.server.metrics import Metrics, snapshot

_log = logging.getLogger(__name__)
# A step that takes longer than this is given up with the process.
_STOP_S = 20.0


@dataclass(eq=False)
class Choice:
    """A request on its way. Times are ``time.perf_counter``; last_token_at 0 before the first.
    rank: the data rank that it must go to.
    """

    job: "Job"
    index: int
    request: Request
    priority: int
    rank: int | None
    added_at: float
    last_token_at: float = 0.0
    sequence: Sequence | None = None
    open: bool = True

    @property
    def cached_tokens(self) -> int:
        return self.sequence.result.cached_tokens if self.sequence else 0

    @property
    def data_rank(self) -> int:
        return self.sequence.data_rank if self.sequence else 0


@dataclass(eq=False)
class Job:
    """The choices of one HTTP request and the events that came for them; of the event loop alone.

    Iterate over it for (choice, event) until every choice is closed; raises what made it fail.
    """

    worker: "Worker"
    choices: list[Choice] = field(default_factory=list)
    inbox: asyncio.Queue = field(default_factory=asyncio.Queue)
    early: deque[tuple[Choice, Event]] = field(default_factory=deque)
    awaited: set[Choice] = field(default_factory=set)

    async def begun(self) -> bool:
        """Wait until every choice has an event; raises what made the job fail before."""
        while {choice for choice, _ in self.early} != set(self.choices):
            self.early.append(await self._next())
        return True

    async def _next(self) -> tuple[Choice, Event]:
        item = await self.inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def __aiter__(self) -> AsyncIterator[tuple[Choice, Event]]:
        self.awaited.update(self.choices)
        while self.awaited:
            choice, event = self.early.popleft() if self.early else await self._next()
            if choice in self.awaited:
                if event.finished:
                    self.awaited.discard(choice)
                yield choice, event

    def close(self, choice: Choice, reason: str) -> None:
        """End a choice before the engine does."""
        self.awaited.discard(choice)
        self.worker.close(choice, reason)

    def abort(self) -> None:
        """End everything that is still open; its pages are free by the engine's next step."""
        for choice in self.choices:
            self.worker.close(choice, "abort")


class Worker:
    """Starts the engine thread. Every method but those named ``_on_engine`` is for the event loop.

    An exception of the engine fails every job, and all later ones; ``failure`` says why.
    """

    def __init__(self, engine: Engine, metrics: Metrics, *, max_queue: int):
        self.engine, self.metrics = engine, metrics
        self.capacity = len(engine.ranks) * engine.options.slots + max_queue
        self.failure: str | None = None
        self._open: set[Choice] = set()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._choices: dict[Sequence, Choice] = {}  # the engine thread's
        self._stopping = False
        self._thread = threading.Thread(target=self._run_on_engine, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Fail what is open, finish the step under way and end the thread."""
        self.fail_open(ApiError(503, "the server is shutting down"))
        self._commands.put(self._stop_on_engine)
        deadline = time.monotonic() + _STOP_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def submit(
        self, requests: Iterable[Request], priority: int = 0, rank: int | None = None
    ) -> Job:
        """Queue checked requests, on a data rank if one is given; ApiError 429 if too many wait,
        503 after a failure.
        """
        requests = list(requests)
        if self.failure is not None:
            raise ApiError(503, f"the engine has failed: {self.failure}")
        if len(self._open) + len(requests) > self.capacity:
            waiting = f"{len(self._open)} of {self.capacity} places are taken"
            raise ApiError(429, f"too many requests: {waiting}, {len(requests)} are needed")
        job, now = Job(self), time.perf_counter()
        for index, request in enumerate(requests):
            choice = Choice(job, index, request, priority, rank, now)
            job.choices.append(choice)
            self._open.add(choice)
            self._commands.put(partial(self._add_on_engine, choice))
        return job

    def close(self, choice: Choice, reason: str) -> None:
        """End a choice whose end is not known yet."""
        if choice.open:
            self._end(choice, reason)
            self._commands.put(partial(self._abort_on_engine, choice))

    def fail_open(self, error: Exception) -> None:
        """Give up every open choice."""
        for choice in list(self._open):
            self.close(choice, "error")
            choice.job.inbox.put_nowait(error)

    async def call(self, function: Callable[[Engine], Any], timeout_s: float = 5.0) -> Any:
        """What a function returns or raises between two steps; TimeoutError if the engine is
        stuck.
        """
        answer = self._loop.create_future()
        self._commands.put(partial(self._call_on_engine, function, answer))
        return await asyncio.wait_for(answer, timeout_s)

    async def metrics_text(self) -> bytes:
        """The metrics page; after a failure with the figures from before."""
        if self.failure is None:
            try:
                self.metrics.show(await self.call(snapshot))
            except TimeoutError:
                _log.warning("the engine did not answer in time, its metrics are old")
        self.metrics.show_memory(await asyncio.to_thread(process_memory))
        return self.metrics.render()

    def _end(self, choice: Choice, reason: str) -> None:
        choice.open = False
        self._open.discard(choice)
        self.metrics.finished(choice, reason)

    def _deliver(self, batch: list[tuple[Choice, Event]], now: float) -> None:
        for choice, event in batch:
            if not choice.open:
                continue
            self.metrics.token(choice, now)
            if event.finished:
                self._end(choice, event.sequence.result.finish_reason or "error")
            choice.job.inbox.put_nowait((choice, event))

    def _lose(self, choice: Choice, why: str) -> None:
        """A request that two servers share cannot go on; nothing of it was told."""
        if choice.open:
            self._end(choice, "error")
            message = f"the hand-off is lost: {why}"
            choice.job.inbox.put_nowait(ApiError(503, message, code=LOST))

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self.fail_open(ApiError(500, f"the engine has failed: {self.failure}"))

    def _run_on_engine(self) -> None:
        try:
            while not self._stopping:
                self._take_commands_on_engine()
                if not self.engine.idle and not self._stopping:
                    self._step_on_engine()
        except Exception as error:
            _log.exception("the engine has failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _take_commands_on_engine(self) -> None:
        """Carry out what is queued; waits for a command while there is nothing to step."""
        if self.engine.idle:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step_on_engine(self) -> None:
        batch = []
        for event in self.engine.step():
            batch.append((self._choices[event.sequence], event))
            if event.finished:
                del self._choices[event.sequence]
        for sequence in self.engine.failed:
            lost = self._choices.pop(sequence), sequence.result.fault
            self._loop.call_soon_threadsafe(self._lose, *lost)
        if batch:
            self._loop.call_soon_threadsafe(self._deliver, batch, time.perf_counter())

    def _add_on_engine(self, choice: Choice) -> None:
        choice.sequence = self.engine.add_checked(choice.request, choice.priority, choice.rank)
        self._choices[choice.sequence] = choice

    def _abort_on_engine(self, choice: Choice) -> None:
        if choice.sequence is not None and self._choices.pop(choice.sequence, None):
            self.engine.abort(choice.sequence)

    def _call_on_engine(self, function: Callable[[Engine], Any], answer: asyncio.Future) -> None:
        try:
            settle = partial(answer.set_result, function(self.engine))
        except Exception as error:
            settle = partial(answer.set_exception, error)
        self._loop.call_soon_threadsafe(_unless_done, answer, settle)

    def _stop_on_engine(self) -> None:
        self._stopping = True


def _unless_done(future: asyncio.Future, settle: Callable[[], None]) -> None:
    if not future.done():
        settle()
