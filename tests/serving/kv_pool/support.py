"""A pool in a dictionary that can be told to fail, hang, lose or damage."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

WAIT_S = 60.0


class DictStore:
    """``PageStore`` without bounds. fail: what every call raises. gates: calls of a name wait for
    their event.
    """

    def __init__(self):
        self.values: dict[bytes, np.ndarray] = {}
        self.calls: list[tuple[str, int]] = []
        self.fail: Exception | None = None
        self.gates: dict[str, threading.Event] = {}

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        self._called("lookup", keys)
        return [key in self.values for key in keys]

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        self._called("lease", keys)
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        self._called("get", keys)
        for key, row in zip(keys, rows, strict=True):
            if key in self.values:
                row[:] = self.values[key]
        return [key in self.values for key in keys]

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        self._called("put", keys)
        for key, row in zip(keys, rows, strict=True):
            self.values.setdefault(key, row.copy())
        return [True] * len(keys)

    def remove(self, keys: Sequence[bytes], *, leased: bool = False) -> list[bool]:
        self._called("remove", keys)
        return [self.values.pop(key, None) is not None for key in keys]

    def close(self) -> None:
        self._called("close", ())

    def shut(self, name: str) -> threading.Event:
        """Calls of ``name`` hang until the event is set."""
        self.gates[name] = threading.Event()
        return self.gates[name]

    def _called(self, name: str, keys: Sequence[bytes]) -> None:
        self.calls.append((name, len(keys)))
        if name in self.gates:
            assert self.gates[name].wait(WAIT_S)
        if self.fail:
            raise self.fail


def eventually(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
