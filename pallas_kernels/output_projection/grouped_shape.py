"""The launch of the grouped projection: how weights and rows are divided over blocks and warps."""

from dataclasses import dataclass, replace

WARPS = 8
THREADS = 32 * WARPS
STRIP = 32  # weight rows of a warp: one row of scale blocks
CHUNK = 128  # columns of K that a warp takes at a time
TOKENS = 8  # rows of a group: the N side of a product
MAX_ROWS = 256  # of a launch; more tiles of rows cost more than XLA's dequantised copy (estimated)
TILES, SPLITS = (256, 128, 64, 32), (1, 2, 4, 8)
MAX_GROUPS = 8  # groups of rows of a launch's tile
DEPTH = 2  # chunks of weights on their way to a warp's registers
BLOCKS = 128  # at once: 132 multiprocessors in groups of 16 or 18 hold as many in clusters
SMEM_BYTES = 227 * 1024
FEW_ROWS = 8  # need so little memory for activations that a block can have more of K


@dataclass(frozen=True)
class Grouped:
    """``rows`` R of ``groups`` G by ``rank`` N outputs of ``k`` inputs each. A cluster of
    ``splits`` blocks shares ``tile`` weight rows, each along its part of K; ``round``: outputs are
    rounded to FP8 in groups of 32 (AQ32). ``early``: the first weights are read before the kernel
    ahead has ended.
    """

    rows: int
    groups: int
    rank: int
    k: int
    tile: int
    splits: int
    round: bool
    early: bool = False

    def __post_init__(self) -> None:
        if self.tile not in TILES or self.rank % self.tile:
            raise ValueError(f"{self.tile=} must be 32, 64, 128 or 256 and divide {self.rank=}")
        if self.splits not in SPLITS:
            raise ValueError(f"{self.splits=} must be 1, 2, 4 or 8")
        if self.k % (self.splits * self.warps_k * CHUNK):
            raise ValueError(f"{self.k=} must be a multiple of {CHUNK} for each of its parts")
        if self.chunks > DEPTH and self.chunks % DEPTH:
            raise ValueError(f"{self.chunks=} of a warp must be up to {DEPTH} or a multiple of it")
        if self.rows < 1:
            raise ValueError(f"{self.rows=} must be positive")

    @property
    def token_groups(self) -> int:
        """Groups of eight rows of a tile."""
        return min(MAX_GROUPS, -(-self.rows // TOKENS))

    @property
    def tokens(self) -> int:
        return TOKENS * self.token_groups

    @property
    def token_tiles(self) -> int:
        return -(-self.rows // self.tokens)

    @property
    def slabs(self) -> int:
        return self.groups * self.rank // self.tile

    @property
    def blocks(self) -> int:
        """That share one tile of rows among them."""
        return self.slabs * self.splits

    @property
    def strips(self) -> int:
        """Warps side by side along the weight rows."""
        return self.tile // STRIP

    @property
    def warps_k(self) -> int:
        """Warps along K."""
        return WARPS // self.strips

    @property
    def part(self) -> int:
        """Columns of K of a block."""
        return self.k // self.splits

    @property
    def chunks(self) -> int:
        """Of a warp."""
        return self.part // self.warps_k // CHUNK

    @property
    def depth(self) -> int:
        return min(DEPTH, self.chunks)

    @property
    def addends(self) -> int:
        """Sums that make one output."""
        return self.splits * self.warps_k

    @property
    def pitch(self) -> int:
        """Words of a row's sums: consecutive rows lie four banks apart."""
        return self.tile + 4

    # Places in shared memory, in bytes: rows of activations, then sums [warps_k, tokens, pitch].
    @property
    def sums(self) -> int:
        return 2 * self.tokens * self.part

    @property
    def words(self) -> int:
        return self.sums // 4 + self.warps_k * self.tokens * self.pitch


def launch(rows: int, groups: int, rank: int, k: int, *, round: bool) -> Grouped | None:
    """The launch for these sizes; None if the kernel has none.

    How many parts K has, and with it a row's bits, does not depend on ``rows``: as in the launch
    with the largest tile, then the fewest splits, that fills the GPU, else in the one with most
    blocks. ``FEW_ROWS`` rows have the smallest tile and the fewest splits with as many parts.
    """
    fitting = [
        Grouped(rows, groups, rank, k, tile, splits, round)
        for tile in TILES
        for splits in SPLITS
        if _fits(rank, k, tile, splits)
    ]
    fitting = [s for s in fitting if 4 * replace(s, rows=MAX_GROUPS * TOKENS).words <= SMEM_BYTES]
    if not fitting:
        return None
    full = (s for s in fitting if s.blocks >= BLOCKS)
    most = max(fitting, key=lambda s: s.blocks)
    usual = next(full, most)
    if rows > FEW_ROWS:
        return usual
    few = [
        replace(usual, tile=tile, splits=splits)
        for tile in TILES
        for splits in SPLITS
        if _fits(rank, k, tile, splits) and splits * (WARPS * STRIP // tile) == usual.addends
    ]
    return min((s for s in few if 4 * s.words <= SMEM_BYTES), key=lambda s: s.splits)


def _fits(rank: int, k: int, tile: int, splits: int) -> bool:
    chunks, rest = divmod(k, splits * (WARPS * STRIP // tile) * CHUNK)
    return not rank % tile and not rest and (chunks <= DEPTH or not chunks % DEPTH) and chunks > 0
