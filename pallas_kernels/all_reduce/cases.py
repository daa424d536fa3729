"""Shapes of the all-reduce that its tests and ``sharding.bench`` share; it needs several GPUs."""

from dataclasses import dataclass

GOALS_US = {1: 4.0, 8: 4.0, 64: 6.0}  # of a sum on two H200s, beside other work
NORM_GOAL_US = 2.0  # what the pass over the streams may take more with the sum inside
PARTS = ("sum", "norm", "gather")


@dataclass(frozen=True)
class Case:
    """rows of one decode step. part: the sum alone, fused with expansion, collapse and norm, or
    made of a gather.
    """

    rows: int
    part: str = "sum"
    width: int = 5120

    @property
    def goal_us(self) -> float:
        """Microseconds that a call may add to a layer."""
        return NORM_GOAL_US if self.part == "norm" else GOALS_US[self.rows]

    def __str__(self) -> str:
        return f"part={self.part},rows={self.rows},width={self.width}"


CASES = tuple(Case(rows, part) for part in PARTS for rows in GOALS_US)
