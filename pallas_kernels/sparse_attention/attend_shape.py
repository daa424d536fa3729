"""The shape of a launch of the attention kernel and its places in shared memory."""

from dataclasses import dataclass, fields, replace

WIDTH, ROPE = 512, 64
MAX_HEADS = 64  # M of a wgmma; fewer heads leave rows of it dead
SHIFT = 48  # rows lie in shared memory times 2^-SHIFT, queries times 2^SHIFT
MAX_SCALE_BYTE = 254 - (120 - SHIFT)  # of window rows: 2^55
LATENT_BYTES, WINDOW_BYTES = 288, 528
CONSUMERS, PRODUCERS = 256, 128
THREADS = CONSUMERS + PRODUCERS
# 384 threads are launched with 168 registers each; asking for more than that pool hangs.
CONSUMING_REGISTERS, PRODUCING_REGISTERS = 216, 72
BARRIER_ALL, BARRIER_CONSUMERS, BARRIER_PRODUCERS = 8, 9, 10
QUERY_BYTES = 2 * MAX_HEADS * WIDTH
SMEM_BYTES = 226 * 1024  # of 227: a launch also rounds a static byte of its own up
# Slots multiplied at a time. A list of several tiles takes 64 in two stages: 48 in three were
# slower, 80 in two do not fit.
TILES = (48, 64, 80)
LONG = 64
SMS = 132


@dataclass(frozen=True)
class Attend:
    """``rows`` query rows, ``per_request`` of a request, over lists of ``window`` + ``selected``
    slots. A cluster of ``splits`` blocks shares a row's list, each for all ``heads``; ``groups``
    clusters have so many heads each. ``tile`` slots are multiplied at a time. ring: rows of each of
    ``owners`` rings that hold the window, 0 for rows of the request. ahead: pieces of each further
    array to ask into L2 (``ahead.ask``).
    """

    rows: int
    per_request: int
    heads: int
    window: int
    selected: int
    pages: int  # table entries of a request
    page: int  # rows of a page
    pool_pages: int
    splits: int = 1
    tile: int = LONG
    ring: int = 0
    owners: int = 0
    groups: int = 1
    ahead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads not in (8, 16, 32, 64):
            raise ValueError(f"{self.heads=} must be 8, 16, 32 or 64")
        if self.window < 8 or self.window % 8:
            raise ValueError(f"{self.window=} must be a positive multiple of 8")
        if self.splits not in (1, 2, 4, 8, 16) or self.splits > self.heads:
            raise ValueError(f"{self.splits=} must be 1, 2, 4, 8 or 16, {self.heads=} at most")
        if self.ring and self.ring < self.window_rows:
            raise ValueError(f"{self.ring=} must be at least {self.window_rows=}")
        if self.tile not in TILES:
            raise ValueError(f"{self.tile=} must be one of {TILES}")
        if self.ahead and self.splits == 1:
            raise ValueError(f"{self.ahead=} must be empty where {self.splits=}")

    @property
    def grid(self) -> int:
        """Clusters: of a query row, then of the next."""
        return self.rows * self.groups

    @property
    def share(self) -> int:
        """Slots of one block, a multiple of 8."""
        return -(-(self.window + self.selected) // (8 * self.splits)) * 8

    @property
    def tiles(self) -> int:
        return -(-self.share // self.tile)

    @property
    def eights(self) -> int:
        """Groups of eight slots in a tile."""
        return self.tile // 8

    @property
    def stages(self) -> int:
        return min(2, self.tiles)

    @property
    def window_rows(self) -> int:
        """Stored window rows of a request."""
        return self.window - 1 + self.per_request

    # Places in shared memory, in bytes.
    @property
    def stage_bytes(self) -> int:
        return 2 * WIDTH * self.tile

    @property
    def list(self) -> int:
        return QUERY_BYTES + self.stages * self.stage_bytes

    @property
    def full(self) -> int:
        """Barriers of full and empty stages, then how many slots are used."""
        return self.list + -(-4 * self.tiles * self.tile // 8) * 8

    @property
    def empty(self) -> int:
        return self.full + 8 * self.stages

    @property
    def used(self) -> int:
        return self.empty + 8 * self.stages

    @property
    def words(self) -> int:
        return self.used // 4 + 1

    @property
    def fits(self) -> bool:
        return 4 * self.words <= SMEM_BYTES

    def in_tiles(self) -> "Attend":
        """In the smallest tile that holds a block's whole list, or in several of ``LONG``."""
        whole = [tile for tile in TILES if tile >= self.share]
        return replace(self, tile=whole[0] if whole else LONG)


@dataclass(frozen=True)
class Seesaw(Attend):
    """A row to one block, which takes every ``grid``-th row; in ``seesaw_ptx``."""

    sms: int = SMS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splits * self.groups != 1 or self.tile != LONG or self.window % LONG:
            raise ValueError(
                f"{self=} must have one block a row, tiles of {LONG}, windows of whole ones"
            )

    @property
    def grid(self) -> int:
        return min(self.rows, self.sms)

    @property
    def stages(self) -> int:
        return 2

    @property
    def probabilities(self) -> int:
        """Those of two tiles, each 64 heads of 64 slots in bf16; then m of each head after them."""
        return QUERY_BYTES + self.stages * self.stage_bytes

    @property
    def maxima(self) -> int:
        return self.probabilities + 2 * 2 * MAX_HEADS * self.tile

    @property
    def sums(self) -> int:
        """Of each warpgroup's tiles."""
        return self.maxima + 2 * 4 * MAX_HEADS

    @property
    def list(self) -> int:
        """The lists of three rows, each with how many slots are used, by four warps."""
        return self.sums + 2 * 4 * MAX_HEADS

    @property
    def book_bytes(self) -> int:
        return 4 * self.tiles * self.tile + 16

    @property
    def used(self) -> int:
        return self.list + 4 * self.tiles * self.tile

    @property
    def full(self) -> int:
        return self.list + 3 * self.book_bytes

    @property
    def ready(self) -> int:
        """Barriers of probabilities, behind those of stages."""
        return self.empty + 8 * self.stages

    @property
    def words(self) -> int:
        return self.ready // 4 + 4


def seesaw(s: Attend) -> Seesaw | None:
    """The launch of ``seesaw_ptx`` in place of ``s``, where it fits."""
    if s.splits * s.groups > 1 or s.tiles == 1 or s.window % LONG:
        return None
    there = Seesaw(**{field.name: getattr(s, field.name) for field in fields(s)})
    return there if there.fits else None
