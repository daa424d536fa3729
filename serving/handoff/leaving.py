"""Requests that leave an engine for another one: their last event waits until the pool has them."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.handoff.options import WINDOWS
from serving.handoff.record import Record, prompt_digest
from serving.handoff.ticket import Ticket
from serving.handoff.tier import HandoffTier
from serving.kv_pool.keys import Chain
from serving.kv_pool.remote import Complete
from serving.scheduler import Scheduler
from serving.sequence import Sequence, Stage

if TYPE_CHECKING:
    from serving.engine import Event
    from serving.executor import Executor


@dataclass(eq=False)
class Leaving:
    """A request on its way out. Its pages are held until it is ``over``, the slot is another's.

    state, tail: rows on their way from the device. missing: complete pages that the pool lacks,
    None while that is not known; added: they are on their way, too. ticket: None if it failed, and
    why. given_up: nobody waits for it any more.
    """

    sequence: Sequence
    rank: Scheduler
    slot: int
    deadline: float
    event: "Event | None" = None
    state: Any = None
    tail: Any = None
    missing: list[int] | None = None
    added: bool = False
    ticket: Ticket | None = None
    why: str = "the pool has no room, or does not answer"
    over: bool = False
    given_up: bool = False


class Departures:
    """The engine's thread calls the public methods: ``hold`` for a request with its only token,
    ``send`` before the next plan, ``settle`` with a step's events.
    """

    def __init__(self, tier: HandoffTier, form: str, executor: "Executor"):
        self._tier, self._form, self._executor = tier, form, executor
        self._new: list[Leaving] = []
        self._leaving: dict[Sequence, Leaving] = {}

    @property
    def busy(self) -> bool:
        return bool(self._leaving)

    def of(self, rank: Scheduler) -> list[Sequence]:
        """Those whose pages of a data rank are held."""
        return [leaving.sequence for leaving in self._leaving.values() if leaving.rank is rank]

    def hold(self, rank: Scheduler, sequence: Sequence) -> None:
        """Release a sequence, but keep its pages; its state is read before the next plan."""
        slot, pages = sequence.slot, list(sequence.pages)
        rank.pool.share(pages)
        rank.release(sequence)
        sequence.pages, sequence.stage = pages, Stage.LEAVING
        leaving = Leaving(sequence, rank, slot, time.monotonic() + self._patience(sequence))
        self._leaving[sequence] = leaving
        if slot < 0:
            leaving.over, leaving.why = True, "it was preempted with its token on the way"
        else:
            self._new.append(leaving)

    def send(self) -> None:
        """Read from the device what the pool is to have."""
        for leaving in self._new:
            sequence, number = leaving.sequence, leaving.sequence.data_rank
            size = leaving.rank.limits.page_size
            if self._form == WINDOWS:
                place = number, leaving.slot, sequence.length
                leaving.state = self._executor.take_state(*place)
            if sequence.length % size:
                index = sequence.length // size
                last = Complete(sequence, index, sequence.pages[index])
                [(_, leaving.tail)] = self._executor.take_pages([last])
            chain = self._tier.chain_of(sequence)
            self._tier.pool.stores.submit(self._look, leaving, chain)
        self._new.clear()
        for leaving in self._leaving.values():
            if leaving.missing and not leaving.added:
                self._add(leaving, leaving.missing)

    def settle(self, events: Iterable["Event"]) -> tuple[list["Event"], list[Sequence]]:
        """The events that may be told now, and sequences that failed."""
        told, failed = [], []
        for event in events:
            if leaving := self._leaving.get(event.sequence):
                leaving.event = event
            else:
                told.append(event)
        for leaving in list(self._leaving.values()):
            over, sequence = leaving.over, leaving.sequence
            if not over:
                if time.monotonic() < leaving.deadline:
                    continue
                leaving.why = "the pool took too long"
            sequence.left = leaving.ticket if over else None
            self._end(leaving)
            if sequence.left is None:
                sequence.result.finish_reason, sequence.result.fault = "error", leaving.why
                failed.append(sequence)
            else:
                assert leaving.event is not None
                told.append(leaving.event)
        return told, failed

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants it any more."""
        self._end(self._leaving[sequence])

    def _end(self, leaving: Leaving) -> None:
        sequence = leaving.sequence
        del self._leaving[sequence]
        if leaving in self._new:
            self._new.remove(leaving)
        leaving.given_up = True
        if leaving.ticket is not None and sequence.left is None:
            self._tier.pool.stores.submit(self._tier.forget, sequence, leaving.ticket)
        leaving.rank.pool.give_back(sequence.pages)
        sequence.pages, sequence.stage = [], Stage.DONE

    def _add(self, leaving: Leaving, missing: list[int]) -> None:
        """Also send pages that were cached here and are gone there."""
        sequence = leaving.sequence
        items = [Complete(sequence, index, sequence.pages[index]) for index in missing]
        for batch, rows in self._executor.take_pages(items):
            self._tier.store_pages(batch, rows)
        leaving.added = True
        self._tier.pool.stores.submit(self._look, leaving, self._tier.chain_of(sequence))

    def _patience(self, sequence: Sequence) -> float:
        accepts = self._tier.accepts
        return self._tier.patience_s(sequence, accepts.most if accepts else 0)

    def _look(self, leaving: Leaving, chain: Chain) -> None:
        """On the storing thread, behind what the request has stored so far."""
        if leaving.given_up:
            return
        looked_again = leaving.added
        missing = self._tier.missing(leaving.sequence, chain)
        if not missing:
            self._leave(leaving)
        leaving.missing = missing
        leaving.over = not missing or looked_again
        self._tier.wake()

    def _leave(self, leaving: Leaving) -> None:
        sequence = leaving.sequence
        state = np.zeros(0, np.uint8) if leaving.state is None else np.asarray(leaving.state)[0]
        tail = None if leaving.tail is None else np.asarray(leaving.tail)[0, 0]
        token = sequence.result.logprobs[-1]
        record = Record(self._form, prompt_digest(sequence.prompt), token, state)
        ticket = self._tier.leave(sequence, record, tail)
        leaving.ticket = ticket
        if ticket is not None and leaving.given_up:
            self._tier.forget(sequence, ticket)
