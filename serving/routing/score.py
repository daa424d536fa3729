"""What it would cost a data rank to take a request: Dynamo's formula, in plain Python.

cost = prefill * max(queued + prompt - credit, 0) / block + decode * (active + prompt) / block

credit: prompt tokens that the rank has cached, and at a discount those that it can load from the
pool. queued: what the requests before it cost it in the same count. active: tokens that its
requests hold until they are done.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Weights:
    """pool_credit: what a token in the pool is worth, 1 being one on the device. decode 0 is for
    workers that only prefill. block: tokens that count as one unit of cost.
    """

    prefill: float = 1.0
    decode: float = 1.0
    pool_credit: float = 0.75
    block: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.pool_credit <= 1:
            raise ValueError(f"pool_credit={self.pool_credit} must be between 0 and 1")
        if self.prefill < 0 or self.decode < 0 or self.prefill + self.decode == 0:
            weights = f"prefill={self.prefill} and decode={self.decode}"
            raise ValueError(f"{weights} must be at least 0 and not both 0")
        if self.block < 1:
            raise ValueError(f"block={self.block} must be at least 1")


class Target(NamedTuple):
    """A data rank of a worker."""

    worker: str
    rank: int


@dataclass(frozen=True)
class Overlap:
    """Tokens of a prompt that need not be computed: ``cached`` lie on the device, and its first
    ``pooled`` are there or in the pool.
    """

    cached: int = 0
    pooled: int = 0

    def credit(self, pool_credit: float) -> float:
        """Cached tokens, the others of the pool at a discount."""
        return self.cached + pool_credit * max(self.pooled - self.cached, 0)


NOTHING = Overlap()


@dataclass
class Load:
    """What a rank has taken on: tokens still to prefill (less their credit), tokens held, requests,
    and when it was last chosen.
    """

    prefill: float = 0.0
    active: int = 0
    requests: int = 0
    chosen: int = 0


@dataclass
class _Booking:
    target: Target
    prefill: float
    active: int


@dataclass
class Board:
    """Loads of the ranks that requests may go to, from what was booked on them.

    A request is booked when it is sent, ``prefilled`` with its first token, ``grown`` by later
    ones, ``freed`` at its end; all of them ignore a request whose rank has left.
    """

    weights: Weights = Weights()
    loads: dict[Target, Load] = field(default_factory=dict)
    _bookings: dict[Hashable, _Booking] = field(default_factory=dict)
    _clock: int = 0

    def join(self, targets: Iterable[Target]) -> None:
        """Ranks that take requests from now on."""
        for target in targets:
            self.loads.setdefault(target, Load())

    def leave(self, targets: Iterable[Target]) -> None:
        """Ranks that take no more, with whatever was booked on them."""
        gone = set(targets)
        for target in gone:
            self.loads.pop(target, None)
        bookings = self._bookings.items()
        self._bookings = {key: found for key, found in bookings if found.target not in gone}

    def cost(self, target: Target, prompt: int, overlap: Overlap = NOTHING) -> float:
        """Blocks of work until the request's first token, and of load beside it afterwards."""
        load, weights = self.loads[target], self.weights
        fresh = max(load.prefill + prompt - overlap.credit(weights.pool_credit), 0)
        work = weights.prefill * fresh + weights.decode * (load.active + prompt)
        return work / weights.block

    def choose(self, prompt: int, overlaps: Mapping[Target, Overlap]) -> Target:
        """The cheapest of ``overlaps``' ranks; among equals the one with the fewest requests on its
        worker, whose ranks step together, then on itself, then the one chosen longest ago.
        ``ValueError`` if none of them takes requests.
        """
        open_to = [target for target in overlaps if target in self.loads]
        if not open_to:
            raise ValueError(f"{len(overlaps)} ranks were offered, one that takes requests must be")

        workers: Counter[str] = Counter()
        for target, load in self.loads.items():
            workers[target.worker] += load.requests

        def order(target: Target) -> tuple[float, int, int, int]:
            load, cost = self.loads[target], self.cost(target, prompt, overlaps[target])
            return cost, workers[target.worker], load.requests, load.chosen

        return min(open_to, key=order)

    def book(self, key: Hashable, target: Target, prompt: int, overlap: Overlap = NOTHING) -> None:
        """A request of ``prompt`` tokens goes to a rank. ``ValueError`` if its key is booked or the
        rank takes none.
        """
        if key in self._bookings or target not in self.loads:
            raise ValueError(f"{key=} must be new and {target=} must take requests")
        work = max(prompt - overlap.credit(self.weights.pool_credit), 0.0)
        self._bookings[key] = _Booking(target, work, prompt)
        self._clock += 1
        load = self.loads[target]
        load.prefill += work
        load.active += prompt
        load.requests += 1
        load.chosen = self._clock

    def prefilled(self, key: Hashable) -> None:
        """Its first token is there."""
        if booking := self._bookings.get(key):
            self.loads[booking.target].prefill -= booking.prefill
            booking.prefill = 0.0

    def grown(self, key: Hashable, tokens: int) -> None:
        """It holds so many tokens more."""
        if booking := self._bookings.get(key):
            booking.active += tokens
            self.loads[booking.target].active += tokens

    def freed(self, key: Hashable) -> None:
        """It has ended, however."""
        if booking := self._bookings.pop(key, None):
            load = self.loads[booking.target]
            load.prefill -= booking.prefill
            load.active -= booking.active
            load.requests -= 1
            if not load.requests:
                load.prefill = 0.0  # what rounding has left

    def check(self) -> None:
        """Loads are the sums of the bookings."""
        for target, load in self.loads.items():
            mine = [found for found in self._bookings.values() if found.target == target]
            assert abs(load.prefill - sum(found.prefill for found in mine)) < 1e-6
            assert load.active == sum(found.active for found in mine)
            assert load.requests == len(mine)
