"""Shapes of the hyper-connection ops."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows R of ``streams`` S streams of ``width`` D."""

    rows: int
    streams: int = 4
    width: int = 5120
    iters: int = 20

    @property
    def mixes(self) -> int:
        return (2 + self.streams) * self.streams

    def __str__(self) -> str:
        return f"rows={self.rows},streams={self.streams},width={self.width}"


CASES = tuple(Case(rows) for rows in (1, 8, 32, 128, 2048))
CORNERS = (
    Case(1, width=256),
    Case(0, width=256),
    Case(37, width=256),
    Case(3, streams=2, width=96),
)
