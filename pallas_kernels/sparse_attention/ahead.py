"""What the next launch reads, asked into L2 by one that leaves memory idle: results do not depend
on it.
"""

from collections.abc import Sequence

from jax import Array

PIECE = 4096  # bytes that a thread asks for at once
# Bytes of a launch. In steps on an H200 the output projection of one row takes 20.5 us, by itself
# 24.4, and six rows 21.9; 34 MiB gain it nothing more and cost attention 0.2 us
# (``serving/baselines/nvidia-h200-kernels*.json``).
MOST = 20 << 20


def pieces(ahead: Sequence[Array]) -> tuple[int, ...]:
    """How many whole pieces of each array a launch asks for, in their order."""
    left, counts = MOST, []
    for array in ahead:
        counts.append(min(left, array.size * array.dtype.itemsize) // PIECE)
        left -= counts[-1] * PIECE
    return tuple(counts)


def ask(
    counts: Sequence[int], bases: Sequence[str], index: str, stride: int, at: str, d: str, p: str
) -> list[str]:
    """PTX that asks for ``counts`` pieces from the addresses in ``bases``: those numbered ``index``
    (a 32-bit register or operand), ``index`` + ``stride`` and so on; ``at`` (32 bits), ``d`` (64)
    and ``p`` are registers to spare.
    """
    lines, first = [], 0
    for count, base in zip(counts, bases, strict=True):
        # Numbers below 0 wrap and are too many.
        for start in range(-first % stride - (stride if first % stride else 0), count, stride):
            lines += [
                f"add.s32 {at}, {index}, {start}; setp.lt.u32 {p}, {at}, {count};",
                f"mul.wide.u32 {d}, {at}, {PIECE}; add.s64 {d}, {d}, {base};",
                f"@{p} cp.async.bulk.prefetch.L2.global [{d}], {PIECE};",
            ]
        first += count
    return lines
