"""The launch of both halves of the output projection for few rows."""

from dataclasses import dataclass

from pallas_kernels.linear.fragment_ptx import UNIT

WARPS = 4  # of a block; two fit a multiprocessor, where fifteen clusters alone have one to a block
THREADS = 32 * WARPS
BLOCKS = 8  # of a cluster
TOKENS = 8  # rows at most: the N side of a product
STRIP = 32  # weight rows of a warp: those of a scale, two products
UNIT_BYTES = STRIP * UNIT
TURN = 2  # units of a turn of a loop
DEPTHS = 8, 6, 4  # units of weights that a warp has under way
WIDTH = BLOCKS * WARPS * STRIP  # inputs and outputs are a multiple: eight inputs of each thread
WIDEST = 32 * WIDTH  # and at most: a thread copies scales for one width of either half
PART = 512  # outputs of the first half that a cluster makes
SUMMED = 16  # parts of an output, at most
PAD = 4  # words between the sums of two rows of activations
PIECE = 16  # bytes of a copy
TWO_AT_ONCE = 113 * 1024  # bytes of shared memory of a block, of which a multiprocessor holds two


@dataclass(frozen=True)
class Joint:
    """``rows`` R of ``groups`` G by ``rank`` N outputs of ``k`` inputs each, then ``hidden`` D
    outputs of all G * N; ``depth`` units of weights under way for a warp.

    A cluster makes one of ``parts`` of the first half's outputs, a block an eighth of those; they
    are rounded, to FP8 in groups of 32 (AQ32) if ``round``, and go to all blocks of the cluster. Of
    the second half it takes the columns that are its part, a block an eighth of the outputs, so
    that each output has ``parts`` addends.
    """

    rows: int
    groups: int
    rank: int
    k: int
    hidden: int
    round: bool
    depth: int

    def __post_init__(self) -> None:
        if not 0 < self.rows <= TOKENS:
            raise ValueError(f"{self.rows=} must be 1 to {TOKENS}")
        if self.rank % PART or self.parts > SUMMED:
            raise ValueError(f"{self.rank=} must be a multiple of {PART}, {SUMMED} in all groups")
        if self.k % WIDTH or self.k > WIDEST:
            raise ValueError(f"{self.k=} must be a multiple of {WIDTH} up to {WIDEST}")
        if self.hidden % WIDTH or self.hidden > WIDEST:
            raise ValueError(f"{self.hidden=} must be a multiple of {WIDTH} up to {WIDEST}")
        if self.depth not in DEPTHS:
            raise ValueError(f"{self.depth=} must be one of {DEPTHS}")

    @property
    def outputs(self) -> int:
        """Of the first half."""
        return self.groups * self.rank

    @property
    def parts(self) -> int:
        return self.outputs // PART

    @property
    def block_rows(self) -> int:
        """Weight rows of a block in the first half."""
        return PART // BLOCKS

    @property
    def strips(self) -> int:
        """Warps side by side along them."""
        return self.block_rows // STRIP

    @property
    def warps_k(self) -> int:
        """Warps along the inputs."""
        return WARPS // self.strips

    @property
    def units(self) -> int:
        """Of a warp in the first half."""
        return self.k // self.warps_k // UNIT

    @property
    def tiles(self) -> int:
        """Of 32 weight rows that a warp takes in the second half."""
        return self.hidden // WIDTH

    @property
    def pitch(self) -> int:
        return self.block_rows + PAD

    @property
    def fragment(self) -> int:
        """Bytes of a unit of inputs."""
        return 2 * UNIT * self.rows

    @property
    def warp_scales(self) -> int:
        """Bytes of a warp's scales: two a unit, in the order of units."""
        return 2 * (self.units + PART // UNIT * self.tiles)

    # Places in shared memory, in bytes: inputs, later sums of warps; outputs of the first half,
    # scales, the barrier of those outputs, codes under way.
    @property
    def middle(self) -> int:
        return max(2 * self.rows * self.k, 4 * self.warps_k * TOKENS * self.pitch)

    @property
    def scales(self) -> int:
        return self.middle + 2 * self.rows * PART

    @property
    def barrier(self) -> int:
        return self.scales + WARPS * self.warp_scales

    @property
    def codes(self) -> int:
        return self.barrier + 16

    @property
    def words(self) -> int:
        return (self.codes + WARPS * self.depth * UNIT_BYTES) // 4


def joint(rows: int, groups: int, rank: int, k: int, hidden: int, *, round: bool) -> Joint | None:
    """The launch for these sizes with as much under way as there is room for; None if the kernel
    has none.
    """
    fits = (
        0 < rows <= TOKENS
        and groups * rank <= SUMMED * PART
        and rank % PART == 0
        and k % WIDTH == hidden % WIDTH == 0
        and max(k, hidden) <= WIDEST
    )
    sizes = (Joint(rows, groups, rank, k, hidden, round, depth) for depth in DEPTHS)
    return next((s for s in sizes if 4 * s.words <= TWO_AT_ONCE), None) if fits else None
