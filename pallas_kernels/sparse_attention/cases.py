"""Shapes of ``sparse_attention``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """requests B of rows T from position ``start``; a window of ``window`` rows and ``selected``
    global entries, of which ``chosen`` exist (the others are -1). selected 0: no global pool.
    """

    requests: int
    rows: int
    start: int
    selected: int = 512
    chosen: int = 512
    window: int = 128
    heads: int = 64
    width: int = 512
    rope: int = 64
    page: int = 64

    def __str__(self) -> str:
        return (
            f"requests={self.requests},rows={self.rows},start={self.start},selected={self.selected}"
        )


CASES = (
    *(Case(requests, 1, 4096, selected) for requests in (1, 8, 32, 128) for selected in (0, 512)),
    Case(1, 128, 4096),
    Case(1, 2048, 4096),
    Case(32, 6, 4096),
)
_small = {"window": 16, "heads": 4, "width": 32, "rope": 16, "page": 8}
CORNERS = (
    Case(1, 1, 0, 0, 0, **_small),
    Case(1, 1, 0, 8, 0, **_small),
    Case(2, 3, 5, 8, 3, **_small),
    Case(2, 7, 16, 8, 8, **_small),
    Case(1, 20, 14, 0, 0, **_small),
    Case(1, 2, 100, 48, 48, **_small),
    Case(1, 2, 100, 49, 49, **_small),
    Case(1, 2, 300, 130, 70, **_small),
)
