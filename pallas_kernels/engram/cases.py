"""Shapes of the Engram ops."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows R of ``streams`` S streams of ``hidden`` D; ``columns`` C table rows of ``width`` N a
    token out of ``table`` rows.
    """

    rows: int
    hidden: int = 5120
    streams: int = 4
    columns: int = 24
    width: int = 256
    table: int = 1 << 20

    def __str__(self) -> str:
        return f"rows={self.rows},hidden={self.hidden},columns={self.columns}"


CASES = tuple(Case(rows) for rows in (1, 8, 32, 128, 2048))
CORNERS = (
    Case(1, 256, 4, 6, 64, 397),
    Case(0, 256, 4, 6, 64, 397),
    Case(37, 64, 2, 6, 32, 60),
    Case(3, 5120, 4, 24, 256, 1000),
)
