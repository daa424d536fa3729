"""What a simulation counts, and the figures made from it."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 99)


@dataclass
class Occupancy:
    """The share of time one rank idles while another queues, from ``since`` on.

    A rank idles while it has no rows in a step of its worker: none is under way, or one of other
    ranks alone. It queues while it has a request that could have run and found no room in the step
    that was planned last; what comes during a step and begins with the next one does not queue, but
    what the router holds back does, for it could be on any rank. idle_while_queued is the sum over
    ranks of the seconds in which one idles and another queues or the router holds a request.
    idle_while_waiting counts those that came during a step, too, on whatever rank.
    """

    ranks: int
    since: float
    idle_while_queued: float = 0.0
    idle_while_waiting: float = 0.0
    busy: float = 0.0
    _working: list[bool] = field(default_factory=list)
    _queued: list[bool] = field(default_factory=list)
    _waiting: list[bool] = field(default_factory=list)
    _counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    _held: bool = False
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._working, self._queued = [False] * self.ranks, [False] * self.ranks
        self._waiting = [False] * self.ranks

    def change(self, now: float, rank: int, *, works: bool, queues: bool, waits: bool) -> None:
        """A rank's state from now on."""
        self.advance(now)
        working, queued, waiting, both = self._counts
        both += (queues and not works) - (self._queued[rank] and not self._working[rank])
        working += works - self._working[rank]
        queued += queues - self._queued[rank]
        waiting += waits - self._waiting[rank]
        self._working[rank], self._queued[rank], self._waiting[rank] = works, queues, waits
        self._counts = working, queued, waiting, both

    def hold(self, now: float, *, holds: bool) -> None:
        """Whether the router holds requests back from now on."""
        self.advance(now)
        self._held = holds

    def advance(self, now: float) -> None:
        """Nothing has changed up to now."""
        seconds = max(now - max(self._now, self.since), 0.0)
        self._now = now
        working, queued, waiting, both = self._counts
        idle = self.ranks - working
        self.busy += seconds * working
        if queued > 1 or self._held:
            self.idle_while_queued += seconds * idle
        elif queued:
            self.idle_while_queued += seconds * (idle - both)
        if waiting or self._held:
            self.idle_while_waiting += seconds * idle


@dataclass
class Columns:
    """One entry for every request whose first token fell into the window; counts are tokens. hit:
    not computed; known: what a pool without limits would have had; loaded: of the hit, what came
    from the pool.
    """

    ttft_s: array = field(default_factory=lambda: array("d"))
    prompt: array = field(default_factory=lambda: array("q"))
    hit: array = field(default_factory=lambda: array("q"))
    known: array = field(default_factory=lambda: array("q"))
    loaded: array = field(default_factory=lambda: array("q"))


@dataclass
class Record:
    """A simulation from ``since`` on. gaps_s: between tokens of a user; finished, output: requests
    that ended and their tokens.
    """

    since: float
    until: float
    occupancy: Occupancy
    requests: Columns = field(default_factory=Columns)
    gaps_s: array = field(default_factory=lambda: array("d"))
    finished: int = 0
    output: int = 0

    def counts(self, now: float) -> bool:
        return self.since <= now <= self.until


def figures(record: Record, gpus: int) -> dict[str, Any]:
    """The numbers of a row; None where nothing was seen."""
    seconds = record.until - record.since
    seen, occupied = record.requests, record.occupancy
    prompt, hit = sum(seen.prompt), sum(seen.hit)
    gaps = _percentiles("itl", record.gaps_s, "ms", 1e3)
    mean_gap = float(np.mean(record.gaps_s)) if record.gaps_s else None
    made = sum(seen.prompt) + record.output
    return {
        "requests": len(seen.prompt),
        "hit_rate": _share(hit, prompt),
        "hit_rate_infinite_pool": _share(sum(seen.known), prompt),
        "pool_share": _share(sum(seen.loaded), prompt),
        **_percentiles("ttft", seen.ttft_s, "s"),
        "ttft_mean_s": float(np.mean(seen.ttft_s)) if seen.ttft_s else None,
        **gaps,
        "idle_while_queued": occupied.idle_while_queued / seconds / occupied.ranks,
        "idle_while_waiting": occupied.idle_while_waiting / seconds / occupied.ranks,
        "busy": occupied.busy / seconds / occupied.ranks,
        "requests_per_s": record.finished / seconds,
        "prompt_tokens": _share(prompt, len(seen.prompt)),
        "computed_tokens_per_s_gpu": (prompt - hit) / seconds / gpus,
        "output_tokens_per_s_gpu": record.output / seconds / gpus,
        "tokens_per_s_gpu": made / seconds / gpus,
        "tokens_per_s_user": 1 / mean_gap if mean_gap else None,
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentiles(name: str, values: Iterable[float], unit: str, scale: float = 1.0) -> dict:
    values = np.asarray(values)
    found = np.percentile(values, _PERCENTILES) * scale if values.size else [None] * 3
    keys = [f"{name}_p{each}_{unit}" for each in _PERCENTILES]
    return {key: None if v is None else float(v) for key, v in zip(keys, found, strict=True)}
