"""Where a request goes and when that is decided, and whether ranks share a pool."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from serving.routing.affinity import Affinity
from serving.routing.queue import Patience, Placed, Queue
from serving.routing.score import NOTHING, Board, Overlap, Target
from serving.simulate.instance import Job

Overlaps = Mapping[Target, Overlap]
Choice = Callable[[Board, Affinity, Job, int, Overlaps], Target]


class Router(Protocol):
    """Who places requests; see ``Queue``."""

    wake_at: float

    def __len__(self) -> int: ...

    def add(self, key: Job, prompt: int, look: Callable[[], Overlaps], now: float) -> None: ...

    def place(self, now: float) -> list[Placed]: ...

    def prefilled(self, key: Job, now: float) -> None: ...

    def freed(self, key: Job) -> None: ...


class Early:
    """Every request goes to a rank as it comes."""

    def __init__(self, board: Board, homes: Affinity, choice: Choice, looks: bool):
        self._board, self._homes, self._choice, self._looks = board, homes, choice, looks
        self._placed: list[Placed] = []
        self.wake_at = inf

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, key: Job, prompt: int, look: Callable[[], Overlaps], now: float) -> None:
        overlaps = look() if self._looks else {}
        target = self._choice(self._board, self._homes, key, prompt, overlaps)
        overlap = overlaps.get(target, NOTHING)
        self._board.book(key, target, prompt, overlap)
        self._placed.append(Placed(key, target, overlap))

    def place(self, now: float) -> list[Placed]:
        placed, self._placed = self._placed, []
        return placed

    def prefilled(self, key: Job, now: float) -> None:
        self._board.prefilled(key)

    def freed(self, key: Job) -> None:
        self._board.freed(key)


@dataclass(frozen=True)
class Policy:
    """pool: what a rank computed can be loaded by all. choice: where a request goes as it comes;
    None: it waits until a rank is about to need it. looks: whether placing asks what the ranks
    have.
    """

    pool: bool
    choice: Choice | None
    looks: bool = False

    def router(self, board: Board, homes: Affinity, step: int) -> Router:
        """step: rows of a rank's largest dispatch."""
        if self.choice is None:
            return Queue(board, Patience(step))
        return Early(board, homes, self.choice, self.looks)


def _home(board: Board, homes: Affinity, job: Job, prompt: int, overlaps: Overlaps) -> Target:
    return homes.choose(job.session, board.loads)


def _least_work(board: Board, homes: Affinity, job: Job, prompt: int, overlaps: Overlaps) -> Target:
    return board.choose(prompt, overlaps)


def _in_turn(board: Board, homes: Affinity, job: Job, prompt: int, overlaps: Overlaps) -> Target:
    return list(board.loads)[job.sequence.arrival % len(board.loads)]


POLICIES = {
    "affinity": Policy(False, _home),
    "pool_affinity": Policy(True, _home),
    "workload_aware": Policy(False, _least_work, looks=True),
    "pool_early_binding": Policy(True, _least_work, looks=True),
    "pool_workload_aware": Policy(True, None, looks=True),
    "round_robin": Policy(False, _in_turn),
}
