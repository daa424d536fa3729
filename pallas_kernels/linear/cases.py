"""Shapes of ``linear``: the matrices of the release and small corners."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """weight: ``fp8`` (``Fp8Blocks``), ``fp4`` (``Fp4Rows``) or ``plain``."""

    matrix: str
    rows: int
    n: int
    k: int
    weight: str = "fp8"

    def __str__(self) -> str:
        return f"matrix={self.matrix},rows={self.rows}"


MATRICES = {
    "wq_a": (1280, 5120, "fp8"),
    "wq_b": (32768, 1280, "fp8"),
    "wkv": (512, 5120, "fp8"),
    "wo_b": (5120, 8192, "fp8"),
    "indexer_wq_b": (4096, 1280, "fp8"),
    "engram_wkv": (25600, 6144, "fp8"),
    "weights_proj": (32, 5120, "plain"),
    "compressor": (512, 5120, "plain"),
    "head": (129280, 5120, "plain"),
}
CASES = tuple(
    Case(name, rows, n, k, weight)
    for name, (n, k, weight) in MATRICES.items()
    for rows in (1, 32, 128)
)
CORNERS = (
    Case("one_row", 1, 32, 32),
    Case("no_row", 0, 32, 64),
    Case("odd_rows", 7, 96, 160),
    Case("fp4", 5, 40, 64, "fp4"),
    Case("plain", 3, 17, 23, "plain"),
    Case("release_wkv", 2, 512, 5120),
)
