"""What is static about the launches for many rows: the image of x, tiles and their order, the ring
of inputs in shared memory.
"""

from dataclasses import dataclass, replace

from pallas_kernels.linear.fragment_ptx import UNIT

SMS = 132
WORKERS = 3  # warpgroups that multiply 64 weight rows each
THREADS = 128 * (WORKERS + 1)
GROUP = 8  # rows of x of a core matrix
GROUP_BYTES = 2 * GROUP * UNIT  # of a unit of 64 columns
WIDTHS = (8, 16, 24)  # groups of a tile: 192 rows are 96 accumulators a thread
NEAR = 12  # tiles of rows whose tiles of weights run side by side
SPLITS = (1, 2, 4, 8)
CLUSTERED = 128  # blocks of clusters that run at once: GPCs have 16 or 18 multiprocessors
SMEM_BYTES = 226 * 1024


@dataclass(frozen=True)
class Broad:
    """x [rows, k] times matrices of ``outputs`` rows, in one launch, from the image of x: int32
    [units, groups, 8 core matrices, 8 rows, 4]. A tile is three blocks of 64 weight rows and
    ``width`` groups of rows of x. Where tiles are fewer than multiprocessors, ``splits`` blocks, a
    cluster, share the units of one and add their sums in order.
    """

    rows: int
    k: int
    outputs: tuple[int, ...]
    width: int
    splits: int = 1
    wide: bool = False  # float32 outputs

    def __post_init__(self):
        if self.width not in WIDTHS:
            raise ValueError(f"{self.width=} must be one of {WIDTHS}")
        if self.splits not in SPLITS or self.units % self.splits:
            raise ValueError(f"{self.splits=} must be of {SPLITS} and divide {self.units} units")
        if self.splits > 1 and self.tiles * self.splits > SMS:
            raise ValueError(f"{self.splits=} of {self.tiles} tiles must be at most {SMS} blocks")

    @property
    def units(self) -> int:
        return -(-self.k // UNIT)

    @property
    def steps(self) -> int:
        """Units of a block's tile."""
        return self.units // self.splits

    @property
    def groups(self) -> int:
        return -(-self.rows // GROUP)

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """The block of 64 rows each matrix begins with, then their number."""
        firsts = [0]
        for n in self.outputs:
            firsts.append(firsts[-1] - (-n // 64))
        return tuple(firsts)

    @property
    def weight_tiles(self) -> int:
        return -(-self.first_blocks[-1] // WORKERS)

    @property
    def row_tiles(self) -> int:
        return -(-self.groups // self.width)

    @property
    def tiles(self) -> int:
        return self.weight_tiles * self.row_tiles

    @property
    def blocks(self) -> int:
        """Clusters, if there are splits."""
        return min(SMS, self.tiles)

    @property
    def slot_bytes(self) -> int:
        return self.width * GROUP_BYTES

    @property
    def slots(self) -> int:
        return min(16, (SMEM_BYTES - 256) // self.slot_bytes)

    @property
    def pitch(self) -> int:
        """Words from the sums of a row of x to the next one's, in the place of the ring."""
        return 64 * WORKERS + 4

    @property
    def full(self) -> int:
        """Byte offset of the barriers of full slots, behind the ring."""
        return self.slots * self.slot_bytes

    @property
    def empty(self) -> int:
        return self.full + 8 * self.slots

    @property
    def words(self) -> int:
        return (self.empty + 8 * self.slots) // 4


def launches(rows: int, k: int, outputs: tuple[int, ...], wide: bool) -> list[Broad]:
    """All that fit, widest first."""
    fits = []
    for width in reversed(WIDTHS):
        whole = Broad(rows, k, outputs, width, wide=wide)
        for splits in SPLITS:
            clustered = splits == 1 or whole.tiles * splits <= CLUSTERED
            if clustered and whole.units % splits == 0:
                fits.append(replace(whole, splits=splits))
    return fits


def tuned(rows: int, k: int, outputs: tuple[int, ...], wide: bool) -> Broad:
    """The launch of least estimated time."""
    return min(launches(rows, k, outputs, wide), key=_cycles)


def _cycles(s: Broad) -> float:
    """Of a launch: a unit takes the tensor cores 48 a group, but its weights 650 to dequantise;
    about 2000 to fill the ring or store a tile, as much again to add splits.
    """
    unit = max(48 * s.width, 650)
    return -(-s.tiles // s.blocks) * (s.steps * unit + 2000 * (1 + (s.splits > 1)))
