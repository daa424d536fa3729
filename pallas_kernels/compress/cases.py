"""Shapes of ``pool_pairs``: groups of two tokens that close in a chunk."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    groups: int
    width: int = 512

    def __str__(self) -> str:
        return f"groups={self.groups},width={self.width}"


CASES = tuple(Case(groups) for groups in (1, 16, 64, 1024))
CORNERS = (Case(0, 64), Case(1, 64), Case(19, 64), Case(3, 512))
