"""The policy that keeps requests in the router until a rank is about to need them."""

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from serving.kv_events.wire import Event
from serving.router.announcement import Announcement
from serving.router.policy import NoRank, Offer, Placed, Prompt
from serving.router.residency import Pages
from serving.routing.queue import Patience, Queue
from serving.routing.score import Board, Overlap, Target, Weights

# Ranks come and go without a word to the queue; while somebody waits it looks so often.
_PULSE_S = 0.05


@dataclass(frozen=True)
class _Waiting:
    prompt: Prompt
    offer: Offer
    answer: asyncio.Future[Placed]


class QueuedPolicy:
    """``OwnPolicy``'s costs with late binding: a request waits unbound while every rank has work
    for its next step.
    """

    looks = True

    def __init__(self, weights: Weights, patience: Patience | None = None):
        self.board, self.pages = Board(weights), Pages()
        self.queue = Queue(self.board, patience)
        self._page_size = 1
        self._waiting: dict[Hashable, _Waiting] = {}
        self._pulse: asyncio.TimerHandle | None = None
        self._refuses_at = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def join(self, targets: Sequence[Target], said: Announcement, pool: str | None) -> None:
        self._page_size = said.page_size
        self.queue.patience = replace(self.queue.patience, step=said.chunk)
        self.board.join(targets)
        for target in targets:
            self.pages.join(target, pool)
        self._go_on()

    async def leave(self, targets: Sequence[Target]) -> None:
        self.queue.leave(set(targets))
        for target in targets:
            self.pages.leave(target)
        self._go_on()

    def events(self, target: Target, events: Sequence[Event]) -> None:
        self.pages.apply(target, events)

    async def place(self, key: Hashable, prompt: Prompt, offer: Offer) -> Placed:
        waiting = _Waiting(prompt, offer, asyncio.get_running_loop().create_future())
        self._waiting[key] = waiting

        def look() -> dict[Target, Overlap]:
            return self.pages.overlaps(prompt.hashes, self._page_size, offer())

        self.queue.add(key, len(prompt.tokens), look, time.monotonic(), prompt.priority)
        self._go_on()
        try:
            return await waiting.answer
        except BaseException:
            self._waiting.pop(key, None)
            self.freed(key)
            raise

    def prefilled(self, key: Hashable) -> None:
        self.queue.prefilled(key, time.monotonic())
        self._go_on()

    def grown(self, key: Hashable, tokens: int) -> None:
        self.board.grown(key, tokens)

    def freed(self, key: Hashable) -> None:
        self.queue.freed(key)
        self._go_on()

    async def close(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()

    def _refuse(self) -> None:
        """Those that have nowhere to go."""
        for key, found in list(self._waiting.items()):
            if not found.offer() and not found.answer.done():
                del self._waiting[key]
                self.queue.freed(key)
                found.answer.set_exception(NoRank("none is left"))

    def _go_on(self) -> None:
        """Send who may go, refuse who has nowhere to go, and come again while anybody waits."""
        if self._pulse is not None:
            self._pulse.cancel()
            self._pulse = None
        if not self._waiting:
            return
        now = time.monotonic()
        for sent in self.queue.place(now):
            found = self._waiting.pop(sent.key)
            if not found.answer.done():
                placed = Placed(sent.key, sent.target, found.prompt, sent.overlap)
                found.answer.set_result(placed)
        if now >= self._refuses_at:
            self._refuses_at = now + _PULSE_S
            self._refuse()
        if self._waiting:
            seconds = min(_PULSE_S, max(self.queue.wake_at - now, 0.001))
            self._pulse = asyncio.get_running_loop().call_later(seconds, self._go_on)
