"""How a rank is chosen for a request: by the least cost, or in turn."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from serving.kv_events.wire import Event
from serving.router.announcement import Announcement
from serving.router.residency import Pages
from serving.routing.score import NOTHING, Board, Overlap, Target, Weights

POLICIES = ("auto", "dynamo", "own", "round-robin")
# The ranks that a request may go to, now.
Offer = Callable[[], Sequence[Target]]


@dataclass(frozen=True)
class Prompt:
    """tokens: all prompts of a request, one behind the other. hashes: of the pages of the first one
    that need not be computed if they are cached; its last token always is. page_size: tokens.
    priority: of the request, smaller goes first where requests wait.
    """

    tokens: Sequence[int] = ()
    hashes: Sequence[int] = ()
    page_size: int = 1
    priority: int = 0


UNKNOWN = Prompt()


@dataclass(frozen=True, eq=False)
class Placed:
    """Where a request goes. overlap: tokens of its prompt that were thought to be there."""

    key: Hashable
    target: Target
    prompt: Prompt = UNKNOWN
    overlap: Overlap = NOTHING

    @property
    def last_page(self) -> int | None:
        """The last whole page that has to be computed; None if none has to."""
        covered = len(self.prompt.hashes) * self.prompt.page_size
        return self.prompt.hashes[-1] if self.overlap.cached < covered else None


class NoRank(Exception):
    """The ranks that were offered have left meanwhile."""


class Policy(Protocol):
    """Chooses ranks and remembers what they have taken on. looks: at tokens and events. waiting:
    requests that have no rank yet.

    A request that was placed is ``prefilled`` with its first token, ``grown`` by later ones and
    ``freed`` at its end; all three ignore a request whose rank has left.
    """

    looks: bool

    @property
    def waiting(self) -> int: ...

    async def join(self, targets: Sequence[Target], said: Announcement, pool: str | None) -> None:
        """Ranks of a worker that may get requests from now on. pool: what they load from."""
        ...

    async def leave(self, targets: Sequence[Target]) -> None: ...

    def events(self, target: Target, events: Sequence[Event]) -> None:
        """What a rank tells of its cache."""
        ...

    async def place(self, key: Hashable, prompt: Prompt, offer: Offer) -> Placed:
        """Book a request on one of the ranks on offer; NoRank if there is none."""
        ...

    def prefilled(self, key: Hashable) -> None: ...

    def grown(self, key: Hashable, tokens: int) -> None: ...

    def freed(self, key: Hashable) -> None: ...

    async def close(self) -> None: ...


def offered(offer: Offer) -> Sequence[Target]:
    """The ranks on offer; NoRank if there is none."""
    targets = offer()
    if not targets:
        raise NoRank("no rank takes requests")
    return targets


class OwnPolicy:
    """Dynamo's formula on our own books."""

    looks = True
    waiting = 0

    def __init__(self, weights: Weights):
        self.board, self.pages = Board(weights), Pages()
        self._page_size = 1

    async def join(self, targets: Sequence[Target], said: Announcement, pool: str | None) -> None:
        self._page_size = said.page_size
        self.board.join(targets)
        for target in targets:
            self.pages.join(target, pool)

    async def leave(self, targets: Sequence[Target]) -> None:
        self.board.leave(targets)
        for target in targets:
            self.pages.leave(target)

    def events(self, target: Target, events: Iterable[Event]) -> None:
        self.pages.apply(target, events)

    async def place(self, key: Hashable, prompt: Prompt, offer: Offer) -> Placed:
        overlaps = self.pages.overlaps(prompt.hashes, self._page_size, offered(offer))
        target = self.board.choose(len(prompt.tokens), overlaps)
        self.board.book(key, target, len(prompt.tokens), overlaps[target])
        return Placed(key, target, prompt, overlaps[target])

    def prefilled(self, key: Hashable) -> None:
        self.board.prefilled(key)

    def grown(self, key: Hashable, tokens: int) -> None:
        self.board.grown(key, tokens)

    def freed(self, key: Hashable) -> None:
        self.board.freed(key)

    async def close(self) -> None: ...


class RoundRobin:
    """One rank after the other, whatever it holds."""

    looks = False
    waiting = 0

    def __init__(self) -> None:
        self._used: dict[Target, int] = {}
        self._clock = 0

    async def join(self, targets: Sequence[Target], said: Announcement, pool: str | None) -> None:
        self._used |= dict.fromkeys(targets, 0)

    async def leave(self, targets: Sequence[Target]) -> None:
        for target in targets:
            self._used.pop(target, None)

    def events(self, target: Target, events: Sequence[Event]) -> None: ...

    async def place(self, key: Hashable, prompt: Prompt, offer: Offer) -> Placed:
        target = min(offered(offer), key=lambda one: self._used[one])
        self._clock += 1
        self._used[target] = self._clock
        return Placed(key, target, prompt)

    def prefilled(self, key: Hashable) -> None: ...

    def grown(self, key: Hashable, tokens: int) -> None: ...

    def freed(self, key: Hashable) -> None: ...

    async def close(self) -> None: ...
