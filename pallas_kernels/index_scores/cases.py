"""Shapes of ``index_scores``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """requests B of rows T over ``pages`` pages of ``page`` entries; the last row sees ``visible``
    entries. candidates: block ids a row, 0 for a layer without them.
    """

    requests: int
    rows: int
    pages: int
    visible: int
    candidates: int = 0
    page: int = 64
    heads: int = 32
    width: int = 128
    block_size: int = 8

    def __str__(self) -> str:
        return (
            f"requests={self.requests},rows={self.rows},visible={self.visible},"
            f"candidates={self.candidates}"
        )


CASES = (
    *(
        Case(requests, 1, context // 64, context, candidates)
        for requests in (1, 32)
        for context in (4096, 32768, 131072)
        for candidates in (0, 2048)
    ),
    Case(1, 512, 512, 32768),
    Case(1, 128, 512, 32768, 2048),
)
_small = {"heads": 4, "width": 32, "page": 8, "block_size": 4}
CORNERS = (
    Case(1, 1, 1, 0, **_small),
    Case(1, 1, 1, 1, **_small),
    Case(2, 3, 3, 17, **_small),
    Case(2, 3, 3, 24, 5, **_small),
    Case(2, 2, 2, 11, 2, heads=4, width=32, page=7, block_size=4),
    Case(1, 2, 2, 100, 3),
)
