"""The table of a shared-memory pool: NumPy arrays that all processes see.

Every process keeps an index of its own, brought up to date from a log of changed slots. Nothing in
the arrays points anywhere: whatever process dies wherever, what it leaves behind is at worst a slot
that nobody finds until it is written over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.kv_pool.keys import KEY_BYTES

EMPTY, WRITING, READY = 0, 1, 2
# A writer that has not finished by then has died, or will find its slot taken.
WRITER_S = 10.0
# A lease further ahead than any can be is damage, not a lease.
LONGEST_LEASE_S = 3600.0
_CANDIDATES = 1024
_FIELDS = {
    "key": (np.uint8, KEY_BYTES),
    "state": (np.int64, 1),
    "generation": (np.int64, 1),
    "used": (np.int64, 1),
    "lease": (np.float64, 1),
    "since": (np.float64, 1),
    "log": (np.int64, 1),
}
ENTRY_BYTES = sum(np.dtype(dtype).itemsize * count for dtype, count in _FIELDS.values())


@dataclass(frozen=True)
class Claim:
    """A slot that a writer fills, until another generation takes it."""

    slot: int
    generation: int


class Table:
    """Slots by key, the least recently used given up first. The caller holds the pool's lock.

    used: the tick of the last use. lease: monotonic time up to which a slot is kept. since: when
    its writer began. log: a ring of the slots that changed last, ``changes[0]`` in all.
    """

    def __init__(self, memory: memoryview, slots: int, tick: np.ndarray, changes: np.ndarray):
        """memory: ``slots * ENTRY_BYTES`` bytes. tick, changes: int64 [1], shared, too."""
        self.slots, self._tick, self._changes = slots, tick, changes
        offset, arrays = 0, {}
        for name, (dtype, count) in _FIELDS.items():
            array = np.frombuffer(memory, dtype, slots * count, offset)
            arrays[name] = array.reshape(slots, count) if count > 1 else array
            offset += array.nbytes
        self.key, self.state, self.log = arrays["key"], arrays["state"], arrays["log"]
        self.generation, self.used = arrays["generation"], arrays["used"]
        self.lease, self.since = arrays["lease"], arrays["since"]
        self._index: dict[bytes, int] = {}
        self._seen = -slots - 1
        self._candidates: list[tuple[int, int]] = []

    def find(self, keys: Sequence[bytes], states: tuple[int, ...] = (READY,)) -> np.ndarray:
        """int64 [N]: the slot of each key, -1 where it is not in one of ``states``."""
        self._catch_up()
        slots = np.array([self._index.get(key, -1) for key in keys], np.int64)
        wanted = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
        same = (self.key[slots] == wanted).all(axis=-1) & np.isin(self.state[slots], states)
        return np.where(same, slots, -1)

    def touch(self, slots: np.ndarray, until: float) -> None:
        """Mark slots, in the order of a prefix, as used and leased; -1 is skipped. The first
        becomes the newest, so that prefixes shrink from their ends.
        """
        there = slots >= 0
        order = np.arange(len(slots), 0, -1)
        self.used[slots[there]] = self._tick[0] + order[there]
        self.lease[slots[there]] = np.maximum(self.lease[slots[there]], until)
        self._tick[0] += len(slots) + 1

    def claim(self, key: bytes, now: float) -> Claim | None:
        """A slot for a new key: an empty one or that used longest ago; None if all are in use."""
        slot = self._victim(now)
        if slot is None:
            return None
        self.state[slot] = WRITING
        self.generation[slot] += 1
        self.key[slot], self.since[slot] = np.frombuffer(key, np.uint8), now
        self.lease[slot] = 0
        self._changed(slot)
        return Claim(slot, int(self.generation[slot]))

    def commit(self, claims: Sequence[Claim | None]) -> list[bool]:
        """Make written slots, in the order of a prefix, visible; False where another took it."""
        slots = np.full(len(claims), -1, np.int64)
        for index, claim in enumerate(claims):
            if claim is not None and self.holds(claim) and self.state[claim.slot] == WRITING:
                slots[index] = claim.slot
        self.state[slots[slots >= 0]] = READY
        self.touch(slots, 0.0)
        return (slots >= 0).tolist()

    def holds(self, claim: Claim) -> bool:
        return int(self.generation[claim.slot]) == claim.generation

    def drop(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self.state[slot] = EMPTY
            self.generation[slot] += 1
            self._changed(slot)

    def abandoned(self, keys: Sequence[bytes], now: float) -> np.ndarray:
        """The slots that a writer of these keys took and, by now dead, has not filled."""
        slots = self.find(keys, (WRITING,))
        slots = slots[slots >= 0]
        return slots[np.abs(now - self.since[slots]) >= WRITER_S]

    @property
    def ready(self) -> int:
        return int((self.state == READY).sum())

    def _victim(self, now: float) -> int | None:
        """Candidates are looked for once for many claims; each is looked at again."""
        for _ in range(2):
            while self._candidates:
                slot, used = self._candidates.pop()
                if self.used[slot] == used and self._may_go(np.array([slot]), now)[0]:
                    return slot
            open_to = np.flatnonzero(self._may_go(np.arange(self.slots), now))
            empty = self.state[open_to] != READY
            age = np.where(empty, np.iinfo(np.int64).min, self.used[open_to])
            if len(age) > _CANDIDATES:
                oldest = np.argpartition(age, _CANDIDATES)[:_CANDIDATES]
                open_to, age = open_to[oldest], age[oldest]
            newest_first = open_to[np.argsort(-age.astype(np.float64), kind="stable")]
            self._candidates = [(int(s), int(self.used[s])) for s in newest_first]
        return None

    def _may_go(self, slots: np.ndarray, now: float) -> np.ndarray:
        """Which slots may be taken: whatever is neither being written nor leased."""
        state, lease = self.state[slots], self.lease[slots]
        kept = (state == READY) & (lease > now) & (lease <= now + LONGEST_LEASE_S)
        writing = (state == WRITING) & (np.abs(now - self.since[slots]) < WRITER_S)
        return ~(kept | writing)

    def _changed(self, slot: int) -> None:
        self.log[self._changes[0] % self.slots] = slot
        self._changes[0] += 1

    def _catch_up(self) -> None:
        """Bring the index up to what all processes changed; a damaged log is no harm, since whoever
        finds a slot compares its key.
        """
        changes = int(self._changes[0])
        if not 0 <= changes - self._seen <= self.slots:
            self._index, changed = {}, np.flatnonzero(self.state != EMPTY)
        else:
            changed = self.log[np.arange(self._seen, changes) % self.slots]
        for slot in changed.tolist():
            if 0 <= slot < self.slots:
                self._index[self.key[slot].tobytes()] = slot
        if len(self._index) > 2 * self.slots + _CANDIDATES:
            self._index = {k: s for k, s in self._index.items() if self.key[s].tobytes() == k}
        self._seen = changes
