"""Where a follower of a worker's events stands: what is applied, ignored or asked for again."""

import logging
from collections.abc import Callable, Sequence

from serving.kv_events.hashes import page_hashes
from serving.kv_events.wire import (
    END,
    Batch,
    Cleared,
    Event,
    EventError,
    Stored,
    decode,
    sequence_number,
)

_log = logging.getLogger(__name__)
Deliver = Callable[[list[Event]], None]
Frames = Sequence[bytes]


class Follower:
    """Delivers the events of one publisher in order and without a gap, from the first on.

    A publisher that no longer has what is missing, or is another one than before, tells everything
    anew; that begins with Cleared. Malformed messages have no effect; the first of a connection is
    logged.
    """

    def __init__(self, deliver: Deliver, *, rank: int, page_size: int, name: str):
        """rank, page_size: of the publisher. name: of the log line about it."""
        self._deliver, self._rank, self._size, self._name = deliver, rank, page_size, name
        self.next: int | None = None
        self.malformed = self.gaps = 0
        self._complained = self._begun = self._broken = False

    def forget(self) -> None:
        """The publisher is gone, or may be another one: nothing is known of it."""
        if self.next is not None:
            self._deliver([Cleared()])
        self.next, self._complained = None, False

    def live(self, frames: Frames) -> bool:
        """Take a published message [topic, number, payload]; False, and nothing happens, if some
        before it are missing: they must be replayed first.
        """
        number = self._number(frames)
        if number is None:
            return True
        if self.next is None or number > self.next:
            self.gaps += self.next is not None
            return False
        if number == self.next:
            self._apply(number, frames[2])
        return True

    def ask(self) -> int:
        """The number to replay from."""
        self._begun = self._broken = False
        return self.next or 0

    def replayed(self, frames: Frames) -> bool:
        """Take a message [empty, number, payload] of the answer; True with its last. One with a gap
        is of no use, as everything comes under numbers of other messages: nothing is known then.
        """
        number = self._number(frames)
        if number is None:
            self._broken = True
            return False
        if number == END:
            if self._broken:
                self.forget()
            elif self.next is None:
                self.next = 0
            return True
        # What was not asked for must be everything.
        anew = not self._begun and number != self.next and _begins_anew(frames[2])
        self._begun = True
        if anew or number == self.next:
            self._apply(number, frames[2])
        else:
            self._broken = True
        return False

    def _number(self, frames: Frames) -> int | None:
        try:
            if len(frames) != 3:
                raise EventError(f"{len(frames)} frames where 3 are expected")
            return sequence_number(frames[1])
        except EventError as error:
            self._complain(error)
            return None

    def _apply(self, number: int, payload: bytes) -> None:
        self.next = number + 1
        try:
            batch = decode(payload, rank=self._rank, page_size=self._size)
            _check_hashes(batch)
        except EventError as error:
            self._complain(error)
            return
        if batch.events:
            self._deliver(batch.events)

    def _complain(self, error: EventError) -> None:
        self.malformed += 1
        if not self._complained:
            _log.warning("kv events of %s: %s; such messages are ignored", self._name, error)
        self._complained = True


def _begins_anew(payload: bytes) -> bool:
    try:
        events = decode(payload).events
    except EventError:
        return False
    return bool(events) and isinstance(events[0], Cleared)


def _check_hashes(batch: Batch) -> None:
    for event in batch.events:
        if isinstance(event, Stored) and event.hashes != page_hashes(
            event.tokens, event.page_size, event.parent
        ):
            raise EventError("hashes that are not those of the tokens")
