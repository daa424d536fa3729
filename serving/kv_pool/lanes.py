"""Threads that do what may block, so that the engine's loop does not."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_log = logging.getLogger(__name__)


class Lane:
    """Jobs in the order they come, on daemon threads: one that hangs does not keep the process."""

    def __init__(self, name: str, threads: int = 1):
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._began: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable, *given: Any) -> Future:
        """The future of a call; an exception in it is the future's."""
        future: Future = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*given))
            except BaseException as error:
                _log.exception("%s", threading.current_thread().name)
                future.set_exception(error)

        self._jobs.put(job)
        return future

    @property
    def busy_s(self) -> float:
        """How long the job has been running that began first; 0 if none runs."""
        now = time.monotonic()
        return max((now - began for began in list(self._began.values())), default=0.0)

    def close(self, timeout_s: float) -> bool:
        """End after the jobs that wait; False if they do not end in time."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            self._began[number] = time.monotonic()
            job()
            del self._began[number]
