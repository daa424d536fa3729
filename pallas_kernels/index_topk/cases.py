"""Shapes of ``index_topk`` and ``top_blocks``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """rows R over ``entries`` N places of which the last row sees ``visible``; k entries or
    ``blocks`` blocks are picked.
    """

    rows: int
    entries: int
    visible: int
    k: int = 512
    blocks: int = 2048
    block_size: int = 8

    def __str__(self) -> str:
        return f"rows={self.rows},entries={self.entries},visible={self.visible},k={self.k}"


CASES = tuple(
    Case(rows, entries, entries) for rows in (1, 32, 128) for entries in (4096, 32768, 131072)
)
_small = {"k": 8, "blocks": 5, "block_size": 4}
CORNERS = (
    Case(1, 8, 0, **_small),
    Case(1, 8, 1, **_small),
    Case(3, 5, 5, **_small),
    Case(3, 8, 8, **_small),
    Case(5, 9, 9, **_small),
    Case(5, 37, 37, **_small),
    Case(5, 64, 37, **_small),
    Case(2, 512, 512),
    Case(2, 513, 513),
    Case(2, 1000, 999),
    Case(1, 4095, 4095, blocks=64),
    Case(1, 4097, 4097, blocks=64),
)
