"""The pool on the simulated clock: which pages are there and when they come."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from serving.kv_pool.remote import Block, Waits
from serving.sequence import Sequence as Running


class Clock(Protocol):
    """Simulated seconds, and calls at a later time."""

    @property
    def now(self) -> float: ...

    def at(self, time: float, call: Callable[[], None]) -> None: ...


def page_key(parent: bytes, piece: memoryview) -> bytes:
    """The key of a page of int32 ids behind the page with key ``parent``, b"" for none."""
    return hashlib.blake2b(piece, digest_size=16, key=parent).digest()


class Keys:
    """The keys of one growing sequence of ids; ``kv_pool.keys.Chain`` for one thread."""

    def __init__(self, page_size: int):
        self._bytes = 4 * page_size
        self._keys: list[bytes] = []

    def keys(self, tokens: np.ndarray, count: int) -> list[bytes]:
        """Keys of the first ``count`` pages of int32 ``tokens``, which begin as in earlier
        calls.
        """
        data, step = memoryview(tokens).cast("B"), self._bytes
        for index in range(len(self._keys), count):
            parent = self._keys[-1] if index else b""
            piece = data[index * step : (index + 1) * step]
            self._keys.append(page_key(parent, piece))
        return self._keys[:count]


class Everything:
    """What a pool without limits would have."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are there."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def put(self, keys: Sequence[bytes]) -> None:
        self._keys.update(keys)


class LeastRecent:
    """A model of the pool's capacity, in pages: what was used longest ago makes room, ends of
    prefixes before their beginnings, as in ``kv_pool``.
    """

    def __init__(self, pages: int):
        self._pages = pages
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are there."""
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys of a prefix are there; they are used now."""
        there = [key in self._keys for key in keys]
        for key, held in zip(reversed(keys), reversed(there), strict=True):
            if held:
                self._keys.move_to_end(key)
        return there

    def put(self, keys: Sequence[bytes]) -> None:
        """Keys of a prefix are there, and used now."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._pages:
            self._keys.popitem(last=False)


class Arrival:
    """``Fetch`` that is over at a known time."""

    def __init__(self, clock: Clock, first: int, stop: int, looked_up: float, over: float):
        self.first, self.stop = first, stop
        self.missing: Sequence[int] | None = None
        self._clock, self._looked_up, self._over = clock, looked_up, over

    @property
    def waits(self) -> Waits | None:
        now = self._clock.now
        if now >= self._over:
            return None
        return Waits.LOOKUP if now < self._looked_up else Waits.LOAD

    def take(self) -> list[Block]:
        return [Block(self.first, self.stop - self.first, None)]

    def cancel(self) -> None:
        self._over = 0.0


class Link:
    """``Remote`` of one data rank: a lookup, then one load after the other."""

    def __init__(
        self,
        clock: Clock,
        index: LeastRecent,
        *,
        lookup_s: float,
        page_s: float,
        least_pages: int,
        ready: Callable[[], None],
    ):
        """page_s: of a page on the link. least_pages: shorter hits are not loaded. ready: called
        when a request need not wait any more.
        """
        self._clock, self._index, self._ready = clock, index, ready
        self._lookup_s, self._page_s, self._least = lookup_s, page_s, least_pages
        self._free = 0.0

    def fetch(self, sequence: Running, held: int, limit: int) -> Arrival:
        keys = keys_of(sequence).keys(sequence.prompt, limit)
        now, stop = self._clock.now, held + self._index.find(keys[held:])
        looked_up = over = now + self._lookup_s if held < limit else now
        if stop > held and stop >= self._least:
            over = self._free = max(looked_up, self._free) + (stop - held) * self._page_s
            self._index.lease(keys[:stop])
        else:
            stop = held
        fetch = Arrival(self._clock, held, stop, looked_up, over)
        fetch.missing = [i for i, there in enumerate(self._index.lease(keys[:held])) if not there]
        if over > now:
            self._clock.at(over, self._ready)
        return fetch


def keys_of(sequence: Running) -> Keys:
    """Those that a simulated request was given."""
    assert isinstance(sequence.chain, Keys)
    return sequence.chain
