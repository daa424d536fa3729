"""What a data rank has told so far: numbered messages, and the pages that it holds after them."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from serving.kv_events.hashes import page_hash
from serving.kv_events.wire import DEVICE, POOL, Batch, Cleared, Event, Removed, Stored, encode
from serving.prefix_cache import ROOT

# Beside its payload; for the bound of what is kept.
_MESSAGE_BYTES = 200


@dataclass(frozen=True)
class Inserted:
    """A new node of the prefix cache, below ``parent``: a page of int32 ids."""

    node: int
    parent: int
    tokens: bytes


@dataclass(frozen=True)
class Evicted:
    """A node of the prefix cache is gone."""

    node: int


@dataclass(frozen=True)
class Pooled:
    """The page ``name``, a hash, was put into the pool."""

    name: int
    parent: int | None
    tokens: bytes


Change = Inserted | Evicted | Pooled
Message = tuple[int, bytes]


@dataclass(frozen=True)
class _Page:
    parent: int | None
    tokens: bytes


@dataclass
class _Told:
    """Events of pages that come and go; those that follow each other share one."""

    page_size: int
    events: list[Event] = field(default_factory=list)

    def stored(self, medium: str, name: int, page: _Page) -> None:
        tokens = np.frombuffer(page.tokens, np.int32).tolist()
        last = self.events[-1] if self.events else None
        if isinstance(last, Stored) and (last.medium, last.hashes[-1]) == (medium, page.parent):
            last.hashes.append(name)
            last.tokens.extend(tokens)
        else:
            new = Stored([name], page.parent, tokens, self.page_size, None, medium)
            self.events.append(new)

    def removed(self, medium: str, name: int) -> None:
        last = self.events[-1] if self.events else None
        if isinstance(last, Removed) and last.medium == medium:
            last.hashes.append(name)
        else:
            self.events.append(Removed([name], medium))


class EventLog:
    """The messages of a data rank. One thread appends, others ask for what was told since.

    Message 0 is Cleared. Of the pool, which does not tell what it evicts, the ``pool_pages`` pages
    are taken to be there that were put last.
    """

    def __init__(
        self,
        rank: int,
        page_size: int,
        *,
        pool_pages: int,
        kept_bytes: int = 32 * 2**20,
        most: int = 1024,
    ):
        """page_size: tokens. kept_bytes: of the newest messages, to be told again one by one.
        most: changes that a message tells.
        """
        self.rank, self.page_size, self.most = rank, page_size, most
        self._pool_pages, self._kept_bytes = pool_pages, kept_bytes
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._names: dict[int, int | None] = {ROOT: None}
        self._held: dict[str, dict[int, _Page]] = {DEVICE: {}, POOL: {}}
        self.next = 0
        self._keep([Cleared()])

    def append(self, changes: Iterable[Change]) -> Message | None:
        """The message that tells at most ``most`` changes; None if there is nothing to tell."""
        told = _Told(self.page_size)
        with self._lock:
            for change in changes:
                self._take(change, told)
            return self._keep(told.events) if told.events else None

    def since(self, start: int) -> Iterator[Message]:
        """The messages from ``start`` on. If they are no longer kept, or ``start`` was never
        reached, Cleared and all pages under the last numbers, so that ``next`` comes after them.
        """
        with self._lock:
            first = self.next - len(self._kept)
            if first <= start <= self.next:
                return zip(range(start, self.next), self._from(start - first), strict=True)
            pages = [(m, *item) for m, held in self._held.items() for item in held.items()]
            return self._everything(pages, self.next)

    def _from(self, index: int) -> list[bytes]:
        return list(islice(self._kept, index, None))

    def _everything(self, pages: list[tuple[str, int, _Page]], after: int) -> Iterator[Message]:
        """Messages up to number ``after`` - 1: no more than were needed to tell these pages."""
        starts = range(0, max(len(pages), 1), self.most)
        for number, start in enumerate(starts, after - len(starts)):
            told = _Told(self.page_size, [] if start else [Cleared()])
            for medium, name, page in pages[start : start + self.most]:
                told.stored(medium, name, page)
            yield number, encode(Batch(time.time(), told.events, self.rank))

    def _take(self, change: Change, told: _Told) -> None:
        match change:
            case Inserted(node, parent, tokens):
                page = _Page(self._names[parent], tokens)
                name = page_hash(page.parent, tokens)
                self._names[node] = name
                self._held[DEVICE][name] = page
                told.stored(DEVICE, name, page)
            case Evicted(node):
                name = self._names.pop(node)
                assert name is not None
                del self._held[DEVICE][name]
                told.removed(DEVICE, name)
            case Pooled(name, parent, tokens):
                self._pooled(name, _Page(parent, tokens), told)

    def _pooled(self, name: int, page: _Page, told: _Told) -> None:
        held = self._held[POOL]
        if held.pop(name, None) is None:
            told.stored(POOL, name, page)
        held[name] = page
        if len(held) > self._pool_pages:
            oldest = next(iter(held))
            del held[oldest]
            told.removed(POOL, oldest)

    def _keep(self, events: list[Event]) -> Message:
        payload = encode(Batch(time.time(), events, self.rank))
        self._kept.append(payload)
        self._bytes += len(payload) + _MESSAGE_BYTES
        while self._bytes > self._kept_bytes:
            self._bytes -= len(self._kept.popleft()) + _MESSAGE_BYTES
        number, self.next = self.next, self.next + 1
        return number, payload
