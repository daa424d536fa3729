"""Pages beyond the device, as the scheduler sees them: no clock, no arrays.

A pool of pages, real or simulated, is a ``Remote``. Whether a fetch is over is its own business: it
may find, load, fail or give up at any time, and the scheduler takes what is there.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from serving.sequence import Sequence


class Waits(Enum):
    """What a request waits for before it may start."""

    LOOKUP = "lookup"
    LOAD = "load"


@dataclass(frozen=True)
class Block:
    """Pages first, first + 1, ... of a prompt: rows [n, ...], of which the first ``count`` are
    pages.
    """

    first: int
    count: int
    rows: Any


class Fetch(Protocol):
    """A request's prompt pages from ``first`` on, on their way.

    waits: None once it is over. stop: pages first .. stop - 1 are here. missing: pages below
    ``first`` that the pool turned out to lack, None while that is not known.
    """

    @property
    def first(self) -> int: ...

    @property
    def waits(self) -> Waits | None: ...

    @property
    def stop(self) -> int: ...

    @property
    def missing(self) -> Items[int] | None: ...

    def take(self) -> list[Block]:
        """What has come, in order; it is the caller's from now on."""
        ...

    def cancel(self) -> None:
        """Nobody will take it."""
        ...


class Remote(Protocol):
    """A pool of pages that other engines fill, too."""

    def fetch(self, sequence: "Sequence", held: int, limit: int) -> Fetch:
        """Begin to look up and load pages held .. limit - 1 of a prompt; of those before, which the
        device holds, only the leases are renewed.
        """
        ...


@dataclass(frozen=True)
class Load:
    """Pages first .. stop - 1 of a sequence that a step writes to the device before anything
    else.
    """

    sequence: "Sequence"
    first: int
    stop: int
    blocks: list[Block]

    @property
    def data_rank(self) -> int:
        return self.sequence.data_rank


@dataclass(frozen=True)
class Complete:
    """A page that a sequence filled and the pool may lack: page ``index`` of its tokens."""

    sequence: "Sequence"
    index: int
    page: int

    @property
    def data_rank(self) -> int:
        return self.sequence.data_rank


class Prefetch:
    """The scheduler's dealings with a pool."""

    def __init__(self, remote: Remote | None, page_size: int, window: int):
        self._remote, self._size, self._window = remote, page_size, window
        self._complete: list[Complete] = []

    @property
    def drained(self) -> bool:
        """Whether every page to store was taken: the next plan may give it to another sequence."""
        return not self._complete

    def wanted(self, sequence: "Sequence") -> bool:
        """Whether the pool has not been asked for a request's prompt and could help."""
        if self._remote is None or sequence.fetch is not None:
            return False
        pages = sequence.prompt_pages(self._size)
        return sequence.request.ticket is not None or pages * self._size > self._window

    def begin(self, sequence: "Sequence", held: int) -> None:
        """Ask for what follows the ``held`` first pages of a prompt."""
        assert self._remote is not None
        limit = sequence.prompt_pages(self._size)
        sequence.fetch = self._remote.fetch(sequence, held, limit)

    def waits(self, sequence: "Sequence", held: Callable[["Sequence"], int]) -> Waits | None:
        """What a request must wait for. It asks once more if pages that the device ``held`` are
        gone since, without which those that came are of no use.
        """
        fetch = sequence.fetch
        if fetch is None or (waits := fetch.waits) is not None:
            return None if fetch is None else waits
        if sequence.refetched or held(sequence) >= fetch.first:
            return None
        sequence.refetched = True
        fetch.cancel()
        # A request that cannot compute what it misses does not count on the device any more.
        self.begin(sequence, held(sequence) if sequence.request.ticket is None else 0)
        return sequence.fetch.waits if sequence.fetch is not None else None

    def stop(self, sequence: "Sequence", held: int) -> int:
        """How many first pages of its prompt a request has, ``held`` on the device and what
        came.
        """
        fetch = sequence.fetch
        return max(held, fetch.stop) if fetch is not None and fetch.first <= held else held

    def start(self, sequence: "Sequence", held: int, hit: int) -> Load | None:
        """A request begins with a hit of ``hit`` tokens, ``held`` pages of it from the device: what
        is to be loaded. What came and is of no use is let go.
        """
        blocks = sequence.fetch.take() if sequence.fetch is not None else []
        sequence.stored = hit // self._size
        stop = -(-hit // self._size)
        return Load(sequence, held, stop, blocks) if stop > held else None

    def filled(self, sequence: "Sequence", index: int, page: int) -> None:
        """A page of known tokens is complete and cached."""
        if self._remote is not None and index >= sequence.stored:
            sequence.stored = index + 1
            self._complete.append(Complete(sequence, index, page))

    def drain(self, running: Items["Sequence"]) -> list[Complete]:
        """Pages to store: those completed since, and what the pool lost and a request still has."""
        taken, self._complete = self._complete, []
        for sequence in running:
            if sequence.fetch is not None and sequence.fetch.missing is not None:
                held = sequence.hit // self._size
                again = [index for index in sequence.fetch.missing if index < held]
                taken += [Complete(sequence, i, sequence.pages[i]) for i in again]
                sequence.fetch = None
        return taken

    def forget(self, sequence: "Sequence") -> None:
        """A request has ended or made way."""
        if sequence.fetch is not None:
            sequence.fetch.cancel()
            sequence.fetch = None
