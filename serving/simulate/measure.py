"""What a simulation counts, and the figures made from it."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 99)


@dataclass
class Occupancy:
    """Ranks that have nothing in the current step, and ranks with a request that found no room in
    it, over time from ``since`` on.

    idle_while_queued: rank-seconds of the first while there is one of the second; any: seconds in
    which both exist; movable: rank-seconds of the fewer of the two.
    """

    ranks: int
    since: float
    idle_while_queued: float = 0.0
    any: float = 0.0
    movable: float = 0.0
    busy: float = 0.0
    _working: list[bool] = field(default_factory=list)
    _queued: list[bool] = field(default_factory=list)
    _counts: tuple[int, int] = (0, 0)
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._working, self._queued = [False] * self.ranks, [False] * self.ranks

    def change(self, now: float, rank: int, *, works: bool, queues: bool) -> None:
        """A rank's state from now on."""
        self.advance(now)
        working, queued = self._counts
        working += works - self._working[rank]
        queued += queues - self._queued[rank]
        self._working[rank], self._queued[rank] = works, queues
        self._counts = working, queued

    def advance(self, now: float) -> None:
        """Nothing has changed up to now."""
        seconds = max(now - max(self._now, self.since), 0.0)
        self._now = now
        working, queued = self._counts
        idle = self.ranks - working
        self.busy += seconds * working
        if idle and queued:
            self.idle_while_queued += seconds * idle
            self.any += seconds
            self.movable += seconds * min(idle, queued)


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
    events: int = 0

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
        "idle_while_queued_any": occupied.any / seconds,
        "idle_while_queued_movable": occupied.movable / seconds / occupied.ranks,
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
