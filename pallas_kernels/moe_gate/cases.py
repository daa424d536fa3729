"""Shapes of ``moe_gate``: backbone and draft routers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    rows: int
    experts: int = 384
    top_k: int = 6
    hidden: int = 5120
    scale: float = 1.5

    def __str__(self) -> str:
        return f"rows={self.rows},experts={self.experts},top_k={self.top_k}"


CASES = (
    *(Case(rows) for rows in (1, 8, 32, 128, 2048)),
    *(Case(rows, experts=128, top_k=3) for rows in (5, 160)),
)
CORNERS = (
    Case(1, 8, 2, 256),
    Case(0, 8, 2, 256),
    Case(37, 8, 8, 64),
    Case(5, 384, 6, 32),
    Case(5, 128, 3, 32),
)
