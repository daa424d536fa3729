"""What is static about the launches for many rows: parts, rings in shared memory, the choice."""

from dataclasses import dataclass

from pallas_kernels.mhc import products_ptx
from pallas_kernels.mhc.products_ptx import MIXES

SMS = 132
TILE = 64  # rows of a product
SEGMENTS = 16  # of K, whose sums are added by pairs, whatever the parts
PARTS = (4, 8, 16)
TILES = (1, 2, 4)
CHUNK = 256  # columns of a slot: 512 bytes of a row are asked for at once
DEEP = 16  # columns of a product
PRODUCT_BYTES = 2 * DEEP * 3 * MIXES  # of three planes of fn
BROUGHT = 2  # slots of the planes
MOST_SLOTS = 12
SMEM_BYTES = 226 * 1024


@dataclass(frozen=True)
class Broad:
    """Launches over ``rows`` of ``k`` columns: blocks of ``tiles`` times 64 rows sum one of
    ``parts`` of K, in slots of ``chunk`` columns.
    """

    rows: int
    k: int
    tiles: int
    parts: int
    iters: int
    eps: float
    norm_eps: float
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        products_ptx.check(self.k, self.iters)
        if self.tiles not in TILES:
            raise ValueError(f"{self.tiles=} must be one of {TILES}")
        if self.parts not in PARTS:
            raise ValueError(f"{self.parts=} must be one of {PARTS}")
        if self.chunk not in (64, 128, 256):
            raise ValueError(f"{self.chunk=} must be 64, 128 or 256")

    @property
    def workers(self) -> int:
        """Warpgroups that multiply; one more brings the rows."""
        return min(self.tiles, 2)

    @property
    def own(self) -> int:
        """Tiles of a worker."""
        return self.tiles // self.workers

    @property
    def threads(self) -> int:
        return 128 * (self.workers + 1)

    @property
    def tile(self) -> int:
        return TILE * self.tiles

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def padded(self) -> int:
        """Rows that sums are stored of."""
        return self.blocks * self.tile

    @property
    def segments(self) -> int:
        """Of a part."""
        return SEGMENTS // self.parts

    @property
    def chunks(self) -> int:
        """Of a segment."""
        return self.k // SEGMENTS // self.chunk

    # Shared memory: slots of rows, of planes, then barriers of full and of empty slots of each.
    @property
    def row_bytes(self) -> int:
        return 2 * self.chunk

    @property
    def slot_bytes(self) -> int:
        return TILE * self.row_bytes

    @property
    def plane_bytes(self) -> int:
        return self.chunk // DEEP * PRODUCT_BYTES

    @property
    def slots(self) -> int:
        left = SMEM_BYTES - 512 - BROUGHT * self.plane_bytes
        return min(MOST_SLOTS, left // self.slot_bytes)

    @property
    def planes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def full(self) -> int:
        return self.planes + BROUGHT * self.plane_bytes

    @property
    def empty(self) -> int:
        return self.full + 8 * self.slots

    @property
    def brought(self) -> int:
        return self.empty + 8 * self.slots

    @property
    def used(self) -> int:
        return self.brought + 8 * BROUGHT

    @property
    def words(self) -> int:
        return (self.used + 8 * BROUGHT) // 4


def tuned(rows: int, k: int, *, iters: int, eps: float, norm_eps: float) -> Broad:
    """The launch of least estimated time."""
    launches = [
        Broad(rows, k, tiles, parts, iters, eps, norm_eps) for tiles in TILES for parts in PARTS
    ]
    return min(launches, key=_bytes)


def _bytes(s: Broad) -> float:
    """That a multiprocessor takes in, for each column of K; four stand for what a block's start and
    end cost.
    """
    return -(-s.blocks * s.parts // SMS) * ((2 * s.tile + 6 * MIXES) / s.parts + 4)
