"""Shapes of ``output_projection``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows R of ``heads`` H heads of ``width`` K, in ``groups`` G groups of rank ``rank``."""

    rows: int
    heads: int = 64
    width: int = 512
    groups: int = 8
    rank: int = 1024
    hidden: int = 5120

    def __str__(self) -> str:
        return f"rows={self.rows},heads={self.heads},groups={self.groups}"


CASES = tuple(Case(rows) for rows in (1, 8, 32, 128, 2048))
CORNERS = (
    Case(1, 8, 64, 2, 64, 256),
    Case(0, 8, 64, 2, 64, 256),
    Case(5, 4, 32, 1, 32, 64),
    Case(3, 4, 32, 4, 32, 64),
)
