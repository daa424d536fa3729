"""An engine's side of the pool that also hands requests through it."""

import secrets
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from serving.handoff.fetch import HandedFetch
from serving.handoff.options import WINDOWS
from serving.handoff.record import (
    BadRecord,
    Record,
    joined,
    largest_record,
    prompt_digest,
    split,
    value_keys,
)
from serving.handoff.ticket import NAME_BYTES, Ticket
from serving.kv_pool.fetch import PoolFetch
from serving.kv_pool.keys import Chain
from serving.kv_pool.remote import Complete, Waits
from serving.kv_pool.tier import PoolTier
from serving.kv_pool.values import HEADER_BYTES, Verdict
from serving.sequence import Sequence


@dataclass(frozen=True)
class Accepts:
    """Records that an engine can go on with. state: least bytes of one; most: of a record."""

    form: str
    state: int
    most: int

    @classmethod
    def of(cls, form: str, state: tuple[int, int]) -> "Accepts":
        """state: ``state_bytes`` of the engine's cache."""
        total, drafts = state
        least = total - drafts if form == WINDOWS else 0
        # The engine that began may draft where this one does not.
        return cls(form, least, largest_record(2 * total))


class HandoffTier(PoolTier):
    """``PoolTier`` whose fetches of requests with a ticket are ``HandedFetch``."""

    accepts: Accepts | None = None

    def fetch(self, sequence: Sequence, held: int, limit: int) -> PoolFetch:
        ticket = sequence.request.ticket
        if ticket is None:
            return super().fetch(sequence, held, limit)
        fetch = HandedFetch(held, limit, sequence.length, self.counts, self._changed.set)
        sequence.handed = fetch
        if self._hangs:
            self.counts.add("skipped")
            fetch.why = "the pool does not answer"
            return fetch
        fetch.turn(Waits.LOOKUP, self.options.lookup_s)
        self.pool.lookups.submit(self._find, fetch, sequence, self._chain(sequence), limit)
        return fetch

    def used(self, sequence: Sequence, *, lost: bool = False) -> None:
        """A request with a ticket goes on here, or is ``lost``: its hand-off is of no use now."""
        ticket = sequence.request.ticket
        assert ticket is not None
        self.counts.add("handoffs_lost" if lost else "handoffs_taken")
        self.pool.stores.submit(self.forget, sequence, ticket)

    def missing(self, sequence: Sequence, chain: Chain) -> list[int]:
        """Complete pages of a prompt that the pool lacks; the others are leased. Blocks."""
        keys = chain.keys(sequence.prompt, sequence.length // self._size)
        there = self.pool.checked.lookup(keys)
        return [index for index, found in enumerate(there) if not found]

    def store_pages(self, items: Items[Complete], rows: object) -> None:
        """As ``store`` does, however many bytes wait to be stored."""
        self._submit(items, rows)

    def wake(self) -> None:
        """End ``wait``: there is something to do."""
        self._changed.set()

    def chain_of(self, sequence: Sequence) -> Chain:
        """The keys of a sequence's pages, for any thread."""
        return self._chain(sequence)

    def leave(self, sequence: Sequence, record: Record, tail: np.ndarray | None) -> Ticket | None:
        """Store a record and the incomplete page uint8 [page_bytes] under a new name; None if the
        pool did not take them. Blocks.
        """
        data, name = record.pack(), secrets.token_bytes(NAME_BYTES)
        ticket = Ticket(name, data.size, sequence.request.seed)
        rows = split(data, self._codec.page_bytes)
        if tail is not None:
            first = np.zeros((1, self._codec.value_bytes), np.uint8)
            first[0, HEADER_BYTES:] = tail
            rows = np.concatenate([first, rows])
        keys = self._values(ticket, tail=tail is not None)
        if all(self.pool.checked.put(keys, rows)) and all(self.pool.checked.lease(keys) or [False]):
            self.counts.add("handoffs_left")
            self.counts.add("handoff_bytes", rows.nbytes)
            return ticket
        self.pool.checked.remove(keys, leased=True)
        return None

    def forget(self, sequence: Sequence, ticket: Ticket) -> None:
        """Remove what was left; nobody will go on with it. Blocks."""
        self.pool.checked.remove(self._values(ticket, tail=self._has_tail(sequence)), leased=True)

    def patience_s(self, sequence: Sequence, record_bytes: int) -> float:
        """How long a hand-off of a sequence may take to be stored."""
        waiting = self.options.backlog + 2 * record_bytes
        waiting += sequence.length // self._size * self._codec.value_bytes
        return self.options.lookup_s + self.options.load_s + waiting / self.options.least_rate

    def _has_tail(self, sequence: Sequence) -> bool:
        return bool(sequence.length % self._size)

    def _values(self, ticket: Ticket, *, tail: bool) -> list[bytes]:
        return value_keys(self._root, ticket, self._codec.page_bytes, tail=tail)

    def _find(self, fetch: HandedFetch, sequence: Sequence, chain: Chain, limit: int) -> None:
        """On the lookup thread: everything must be there."""
        ticket, accepts = sequence.request.ticket, self.accepts
        assert ticket is not None and accepts is not None
        if not fetch.open:
            return
        if ticket.size > accepts.most:
            self._give_up(fetch, f"a record of {ticket.size} bytes is none of this engine's")
            return
        pages = chain.keys(sequence.prompt, limit)
        values = self._values(ticket, tail=self._has_tail(sequence))
        wanted = [*pages[fetch.first :], *values]
        there = self.pool.checked.lookup(wanted)
        if not all(there):
            self._give_up(fetch, f"{len(wanted) - sum(there)} of {len(wanted)} values are gone")
            return
        seconds = self.options.load_s
        seconds += len(wanted) * self._codec.value_bytes / self.options.least_rate
        if fetch.turn(Waits.LOAD, seconds):
            self.pool.loads.submit(self._load_record, fetch, sequence, values, pages)

    def _load_record(
        self, fetch: HandedFetch, sequence: Sequence, values: list[bytes], pages: list[bytes]
    ) -> None:
        """On a loading thread: the record, then the pages as those of any request."""
        rows = np.zeros((len(values), self._codec.value_bytes), np.uint8)
        verdicts = self.pool.checked.get(values, rows)
        bad = [verdict.value for verdict in verdicts if verdict is not Verdict.GOOD]
        try:
            if bad:
                raise BadRecord(f"{len(bad)} of {len(values)} values are {bad[0]}")
            tail = self._has_tail(sequence)
            record = Record.unpack(joined(rows[1:] if tail else rows))
            self._check(record, sequence)
        except BadRecord as error:
            self._give_up(fetch, str(error))
            return
        if tail:
            fetch.tail = np.zeros((self.options.batch(1), self._codec.value_bytes), np.uint8)
            fetch.tail[0] = rows[0]
        fetch.record = record
        if fetch.stop == len(pages):
            fetch.finish()
        else:
            self._load(fetch, pages)

    def _check(self, record: Record, sequence: Sequence) -> None:
        assert self.accepts is not None
        if record.form != self.accepts.form:
            raise BadRecord(f"it has form {record.form}, this engine takes {self.accepts.form}")
        if record.state.size < self.accepts.state:
            raise BadRecord(f"its state has {record.state.size} bytes, not {self.accepts.state}")
        if record.prompt != prompt_digest(sequence.prompt):
            raise BadRecord("it is of another prompt")

    def _give_up(self, fetch: HandedFetch, why: str) -> None:
        fetch.why = why
        fetch.finish()
