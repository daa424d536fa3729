"""What the pool did, counted by whoever did it."""

import threading
from dataclasses import dataclass, field, fields


@dataclass
class Totals:
    """Figures since the engine started. Pages unless said otherwise.

    queried_tokens, hit_tokens: prompt tokens asked for in the pool and taken from it. lookups:
    requests that asked; skipped: those that did not, as the pool did not answer. lookup_s, load_s:
    summed over requests. late_lookups, late_loads: requests that gave up waiting. lost: found by a
    lookup, gone when they were fetched. late: fetched after their request had given up. refused: no
    room in the pool. dropped: not stored, as too many waited to be. errors: calls of the backend
    that failed. foreign_pools: backends made for something else, which are not used. steps:
    dispatched; starved_lookups, starved_loads: those of them with room for a request that waited
    for a lookup, or for a load. idle_s: time with nothing to run but such waiting. handoffs_left,
    handoffs_taken, handoffs_lost: requests left to other engines, taken over from them, or begun by
    them in vain; handoff_bytes: beside complete pages, of those that were left.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    lookups: int = 0
    skipped: int = 0
    late_lookups: int = 0
    late_loads: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    loaded: int = 0
    lost: int = 0
    corrupt: int = 0
    foreign: int = 0
    late: int = 0
    refreshed: int = 0
    stored: int = 0
    refused: int = 0
    dropped: int = 0
    errors: int = 0
    foreign_pools: int = 0
    steps: int = 0
    starved_lookups: int = 0
    starved_loads: int = 0
    idle_s: float = 0.0
    handoffs_left: int = 0
    handoffs_taken: int = 0
    handoffs_lost: int = 0
    handoff_bytes: int = 0


@dataclass
class Counts:
    """Totals that several threads add to."""

    totals: Totals = field(default_factory=Totals)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            setattr(self.totals, name, getattr(self.totals, name) + amount)

    def snapshot(self) -> Totals:
        with self._lock:
            return Totals(**{f.name: getattr(self.totals, f.name) for f in fields(Totals)})
