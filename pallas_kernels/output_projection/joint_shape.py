"""The launch of both halves of the output projection for few rows."""

from dataclasses import dataclass

from pallas_kernels.linear.fragment_ptx import FRAGMENT, UNIT

WARPS = 8  # of a block that multiply; each has one more that asks for its weights
SIDES = 4  # of them side by side along the outputs of the second half
WORKERS = 32 * WARPS
THREADS = 2 * WORKERS
BLOCKS = 8  # of a part, which wait for one another, so that these have to start together
TOKENS = 8  # rows at most: the N side of a product
STRIP = 32  # weight rows of a warp: those of a scale, two products
COLUMNS = 256  # of a strip's weights that come together
SLOTS = 2  # of such weights on their way to a warp, or waiting for it
PART = 512  # outputs of the first half that eight blocks make together
SUMMED = 16  # parts of an output, at most: 128 blocks
POWERS = 4 * 2 * TOKENS  # bytes of a unit's powers of two, [32-column group][row]
PAD = 4  # words between the sums of two rows of activations
SMEM_BYTES = 226 * 1024


@dataclass(frozen=True)
class Joint:
    """``rows`` R of ``groups`` G by ``rank`` N outputs of ``k`` inputs each, then ``hidden`` D
    outputs of all G * N.

    Eight blocks make one of ``parts`` of the first half's outputs, each an eighth of those; they
    are rounded, to FP8 in groups of 32 (AQ32) if ``round``, and go to all eight. Of the second half
    these take the columns that are their part, a block an eighth of the outputs, so that each
    output has ``parts`` addends.
    """

    rows: int
    groups: int
    rank: int
    k: int
    hidden: int
    round: bool

    def __post_init__(self) -> None:
        if not 0 < self.rows <= TOKENS:
            raise ValueError(f"{self.rows=} must be 1 to {TOKENS}")
        if self.rank % PART or self.parts > SUMMED:
            raise ValueError(f"{self.rank=} must be a multiple of {PART}, {SUMMED} in all groups")
        if self.k % (self.warps_k * COLUMNS):
            raise ValueError(f"{self.k=} must be a multiple of {self.warps_k * COLUMNS}")
        if self.hidden % (BLOCKS * SIDES * STRIP):
            raise ValueError(f"{self.hidden=} must be a multiple of {BLOCKS * SIDES * STRIP}")
        if self.rows * self.hidden > 16 * self.k:
            raise ValueError(f"{self.rows=} of {self.hidden=} must be at most 16 times {self.k=}")

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
    def block_outputs(self) -> int:
        """Of the second half."""
        return self.hidden // BLOCKS

    @property
    def first_slots(self) -> int:
        """Of a warp in the first half; those of the second follow."""
        return self.k // self.warps_k // COLUMNS

    @property
    def all_slots(self) -> int:
        return self.first_slots + self.tiles

    @property
    def fours(self) -> int:
        """Of rows: a product takes four, each for either 32 columns of a unit."""
        return -(-self.rows // 4)

    @property
    def tiles(self) -> int:
        """Of 32 weight rows that a warp takes in the second half."""
        return self.hidden // (BLOCKS * SIDES * STRIP)

    @property
    def pitch(self) -> int:
        return self.block_rows + PAD

    @property
    def part_bytes(self) -> int:
        """What the blocks of a part exchange: inputs of the second half and what undoes their
        powers of two.
        """
        return (FRAGMENT + POWERS) * (PART // UNIT)

    # Places in shared memory, in bytes: inputs, later sums of the second half; outputs of the
    # first, what undoes the powers of two of either, as many zeros as a unit's inputs, sums of the
    # first half's warps, scales of each warp, its barriers, its slots.
    @property
    def middle(self) -> int:
        return FRAGMENT * (self.k // UNIT)

    @property
    def powers(self) -> int:
        return self.middle + FRAGMENT * (PART // UNIT)

    @property
    def zeros(self) -> int:
        return self.powers + POWERS * (self.k + PART) // UNIT

    @property
    def sums(self) -> int:
        return self.zeros + FRAGMENT

    @property
    def scales(self) -> int:
        return self.sums + 4 * self.warps_k * TOKENS * self.pitch

    @property
    def warp_scales(self) -> int:
        """Bytes of a warp's: eight a slot."""
        return COLUMNS // 32 * self.all_slots

    @property
    def bars(self) -> int:
        return self.scales + WARPS * self.warp_scales

    @property
    def ring(self) -> int:
        return -(-(self.bars + 16 * WARPS * SLOTS) // 128) * 128

    @property
    def words(self) -> int:
        return (self.ring + WARPS * SLOTS * STRIP * COLUMNS) // 4


def joint(rows: int, groups: int, rank: int, k: int, hidden: int, *, round: bool) -> Joint | None:
    """The launch for these sizes; None if the kernel has none."""
    fits = (
        0 < rows <= TOKENS
        and groups * rank <= SUMMED * PART
        and rank % PART == 0
        and k % (COLUMNS * WARPS * STRIP * BLOCKS // PART) == 0
        and hidden % (BLOCKS * SIDES * STRIP) == 0
        and rows * hidden <= 16 * k
    )
    made = Joint(rows, groups, rank, k, hidden, round) if fits else None
    return made if made is not None and 4 * made.words <= SMEM_BYTES else None
