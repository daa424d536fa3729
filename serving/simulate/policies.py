"""Where a request goes, and whether ranks share a pool."""

from collections.abc import Callable
from dataclasses import dataclass

from serving.routing.affinity import Affinity
from serving.routing.score import Board, Overlap, Target
from serving.simulate.sessions import Session


@dataclass(frozen=True)
class Asked:
    """A request to place: its number, its prompt's tokens, and what of it the ranks have, if the
    policy looks.
    """

    number: int
    session: Session
    prompt: int
    overlaps: dict[Target, Overlap]


@dataclass(frozen=True)
class Policy:
    """pool: what a rank computed can be loaded by all. looks: whether placing asks what the ranks
    have.
    """

    pool: bool
    place: Callable[[Board, Affinity, Asked], Target]
    looks: bool = False


def _home(board: Board, homes: Affinity, asked: Asked) -> Target:
    return homes.choose(asked.session, board.loads)


def _least_work(board: Board, homes: Affinity, asked: Asked) -> Target:
    return board.choose(asked.prompt, asked.overlaps)


def _in_turn(board: Board, homes: Affinity, asked: Asked) -> Target:
    return list(board.loads)[asked.number % len(board.loads)]


POLICIES = {
    "affinity": Policy(False, _home),
    "pool_affinity": Policy(True, _home),
    "workload_aware": Policy(False, _least_work, looks=True),
    "pool_workload_aware": Policy(True, _least_work, looks=True),
    "round_robin": Policy(False, _in_turn),
}
