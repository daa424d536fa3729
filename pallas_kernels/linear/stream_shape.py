"""What is static about a launch for up to 32 rows: how weights are dealt out, how many are on their
way.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from pallas_kernels.linear import skinny_shape
from pallas_kernels.linear.box_ptx import BOX, COLUMNS, GROUP, GROUPS, INPUTS, POWERS, STRIP

ROWS = 32
PITCH = STRIP + 4  # words from a row's sums to the next one's: no bank is asked twice
WARPGROUP = 4  # warps: blocks have one to three of them
MOST = 3 * WARPGROUP
SLOTS = 8  # of a warp, at most
SMEM_BYTES = 226 * 1024
# Clusters that run at once, by their blocks, of which each has a multiprocessor for itself: what
# cudaOccupancyMaxActiveClusters says of an H200.
AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15}
SETTINGS = ("strips", "splits", "sharers")  # that a measurement chooses
IN_FLIGHT = 12 * BOX  # bytes of a multiprocessor, with less it waits for memory


@dataclass(frozen=True)
class Stream:
    """x [rows, k] times matrices of ``outputs`` rows, in one launch.

    A warp takes a strip of 32 rows of one matrix and one of ``splits`` parts of K, its block
    ``strips`` of them; a cluster has the parts of its strips and adds them in their order.
    ``slots`` boxes of 128 columns are on their way to a warp, or waiting for it. ``sharers`` blocks
    of a cluster have the same part of K: each brings some of x to all of them. ``norm``: the eps of
    the RMSNorm of x that goes before, if one does.
    """

    rows: int
    k: int
    outputs: tuple[int, ...]
    strips: int
    splits: int
    slots: int
    sharers: int = 1
    wide: bool = False  # float32 outputs
    norm: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rows <= ROWS:
            raise ValueError(f"{self.rows=} must be 1 to {ROWS}")
        if not 0 < self.strips <= MOST or self.blocks not in AT_ONCE:
            raise ValueError(f"{self.strips=} must be 1 to {MOST}, {self.blocks=} of {[*AT_ONCE]}")
        if self.slots * BOX < 4 * PITCH * self.rows:
            raise ValueError(f"{self.slots=} must hold the sums of {self.rows} rows")

    @property
    def operands(self) -> int:
        """Arrays of the program, in memory."""
        return 1 + 3 * len(self.outputs) + (self.norm is not None)

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.splits * self.sharers

    @property
    def warps(self) -> int:
        """Those without a strip help with x."""
        return -(-self.strips // WARPGROUP) * WARPGROUP

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def first_strips(self) -> tuple[int, ...]:
        """The strip each matrix begins with, then their number."""
        firsts = [0]
        for n in self.outputs:
            firsts.append(firsts[-1] + n // STRIP)
        return tuple(firsts)

    @property
    def grid(self) -> int:
        """Clusters."""
        return -(-self.first_strips[-1] // (self.strips * self.sharers))

    @property
    def boxes(self) -> int:
        """Of a part; the last parts may have fewer columns."""
        return -(-self.k // (COLUMNS * self.splits))

    @property
    def groups(self) -> int:
        """Of columns, of a part."""
        return GROUPS * self.boxes

    @property
    def exact(self) -> bool:
        return self.groups * self.splits * GROUP == self.k

    @property
    def eights(self) -> int:
        """Of rows of x: a product takes eight."""
        return -(-self.rows // 8)

    @property
    def span(self) -> int:
        """Rows of x that quads of threads load side by side: a power of two."""
        return 1 << (self.rows - 1).bit_length()

    @property
    def abreast(self) -> int:
        """Groups of columns of each of these rows that the sharers load at once."""
        return self.sharers * 8 * self.warps // self.span

    @property
    def addends(self) -> int:
        """Of a row's sum of squares."""
        return self.sharers * 8 * self.warps // max(8, self.span)

    # Places in shared memory, in bytes: inputs; what undoes their powers of two, [group][row]; the
    # norm's weight; sums of squares, [addend][row], behind them those of all addends; scales of
    # each warp; its barriers; from the next multiple of 1024 on its slots, later its sums.
    @property
    def powers(self) -> int:
        return INPUTS * self.eights * self.groups

    @property
    def gains(self) -> int:
        return self.powers + POWERS * self.eights * self.groups

    @property
    def squares(self) -> int:
        return self.gains + (self.norm is not None) * 2 * GROUP * self.groups

    @property
    def scales(self) -> int:
        normed = self.norm is not None
        return self.squares + normed * 4 * self.span * (self.addends + 1)

    @property
    def bars(self) -> int:
        return -(-(self.scales + self.strips * self.groups) // 8) * 8

    @property
    def ring(self) -> int:
        """At most: the slots begin at a multiple of 1024, which the other places may not."""
        return self.bars + 8 * self.strips * self.slots + 1016

    @property
    def words(self) -> int:
        return (self.ring + self.strips * self.slots * BOX) // 4


@lru_cache(maxsize=256)
def tuned(rows: int, k: int, outputs: tuple[int, ...], **options: Any) -> Stream | None:
    """The measured setting of the smallest bucket that holds ``rows``, else the launch with the
    lowest estimate; None if there is none.
    """
    found = list(launches(rows, k, outputs, **options))
    fits = [
        entry
        for entry in json.loads(skinny_shape.TUNED.read_text()).get("linear_streamed", [])
        if entry["rows"] >= rows and (entry["k"], tuple(entry["outputs"])) == (k, outputs)
    ]
    if fits:
        best = min(fits, key=lambda entry: entry["rows"])
        setting = tuple(best[name] for name in SETTINGS)
        found = [s for s in found if (s.strips, s.splits, s.sharers) == setting] or found
    return min(found, key=estimate, default=None)


def launches(
    rows: int,
    k: int,
    outputs: tuple[int, ...],
    *,
    wide: bool = False,
    norm: float | None = None,
) -> Iterator[Stream]:
    """Every number of parts and sharers with as few strips a block as all of them at once allow,
    and in whole warpgroups; as many slots as fit.
    """
    if not 0 < rows <= ROWS or not 0 < k <= skinny_shape.MAX_K:
        return
    if k % GROUP or any(n % STRIP for n in outputs):
        return
    strips, least = sum(outputs) // STRIP, -(-4 * PITCH * rows // BOX)
    for splits, sharers in product(AT_ONCE, repeat=2):
        if (splits > 1 and COLUMNS * splits > k) or splits * sharers not in AT_ONCE:
            continue
        fewest = -(-strips // (AT_ONCE[splits * sharers] * sharers))
        most = min(SLOTS, max(least, -(-k // (COLUMNS * splits))))
        for count in sorted({min(fewest, MOST), WARPGROUP, 2 * WARPGROUP, MOST}):
            for slots in range(most, least - 1, -1):
                s = Stream(rows, k, outputs, count, splits, slots, sharers, wide, norm)
                if 4 * s.words <= SMEM_BYTES:
                    yield s
                    break


def estimate(s: Stream) -> float:
    """Boxes that a multiprocessor takes one after the other, and what goes before and after, in
    their time.
    """
    side_by_side = max(1, min(SMEM_BYTES // (4 * s.words), s.grid // AT_ONCE[s.blocks]))
    waves = -(-s.grid // (AT_ONCE[s.blocks] * side_by_side))
    flying = side_by_side * s.strips * min(s.slots, s.boxes) * BOX
    boxes = waves * side_by_side * s.strips * s.boxes * max(1.0, IN_FLIGHT / flying)
    loads = s.rows * s.groups / (64 * s.sharers)
    return boxes + (0.5 + s.rows / 8) * s.boxes + 8 * waves / side_by_side + 2.5 * s.blocks + loads
