"""What a router knows of a worker's caches, rebuilt from events."""

import threading
import time
from collections.abc import Callable
from typing import Any

from serving.kv_events.log import Inserted
from serving.kv_events.wire import DEVICE, POOL, Cleared, Event, Removed, Stored

WAIT_S = 60.0


class Mirror:
    """Hashes by medium. strict: nothing may be told twice."""

    def __init__(self):
        self.held: dict[str, set[int]] = {DEVICE: set(), POOL: set()}
        self.strict = True
        self._lock = threading.Lock()

    def deliver(self, events: list[Event]) -> None:
        with self._lock:
            for event in events:
                self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Stored():
                held = self.held[event.medium]
                assert not self.strict or held.isdisjoint(event.hashes), "told twice"
                held.update(event.hashes)
            case Removed():
                held = self.held[event.medium]
                assert not self.strict or held.issuperset(event.hashes), "removed twice"
                held.difference_update(event.hashes)
            case Cleared():
                for held in self.held.values():
                    held.clear()

    @property
    def state(self) -> dict[str, set[int]]:
        with self._lock:
            return {medium: set(held) for medium, held in self.held.items()}


def inserted(node: int, parent: int, *tokens: int) -> Inserted:
    """A new node of the prefix cache."""
    return Inserted(node, parent, b"".join(token.to_bytes(4, "little") for token in tokens))


def wait_for(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
