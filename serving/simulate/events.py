"""The simulated clock."""

import heapq
from collections.abc import Callable
from itertools import count


class Events:
    """Calls in the order of their times, those of one time as they were asked for. now: seconds;
    past: calls done.
    """

    def __init__(self) -> None:
        self.now, self.past = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Do it then, or now if that is past."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._numbers), call))

    def step(self, until: float) -> bool:
        """Do what comes next; False if nothing does up to ``until``."""
        if not self._queue or self._queue[0][0] > until:
            return False
        self.now, _, call = heapq.heappop(self._queue)
        self.past += 1
        call()
        return True
