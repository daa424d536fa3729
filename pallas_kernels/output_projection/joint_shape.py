"""The launch of both halves of the output projection for few rows."""

from dataclasses import dataclass

from pallas_kernels.linear.box_ptx import BOX, COLUMNS, GROUP, GROUPS, INPUTS, POWERS, STRIP

WARPS = 8  # of a block
SIDES = 4  # of them side by side along the outputs of the second half
THREADS = 32 * WARPS
BLOCKS = 8  # of a part, which wait for one another, so that these have to start together
TOKENS = 8  # rows at most: the N side of a product
SLOTS = 4  # of boxes on their way to a warp, or waiting for it
PART = 512  # outputs of the first half that eight blocks make together
SUMMED = 16  # parts of an output, at most: 128 blocks
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
    def tiles(self) -> int:
        """Of 32 weight rows that a warp takes in the second half."""
        return self.block_outputs // (SIDES * STRIP)

    @property
    def first_boxes(self) -> int:
        """Of a warp in the first half; those of the second follow."""
        return self.k // (self.warps_k * COLUMNS)

    @property
    def tile_boxes(self) -> int:
        return PART * SIDES // (WARPS * COLUMNS)

    @property
    def all_boxes(self) -> int:
        return self.first_boxes + self.tiles * self.tile_boxes

    @property
    def span(self) -> int:
        """Rows that quads of threads load side by side: a power of two."""
        return 1 << (self.rows - 1).bit_length()

    @property
    def abreast(self) -> int:
        """Groups of columns of each of these rows that the block loads at once."""
        return THREADS // 4 // self.span

    @property
    def pitch(self) -> int:
        return self.block_rows + PAD

    @property
    def put_pitch(self) -> int:
        return self.block_outputs + PAD

    @property
    def part_bytes(self) -> int:
        """What the blocks of a part exchange: inputs of the second half and what undoes their
        powers of two.
        """
        return (INPUTS + POWERS) * (PART // GROUP)

    # Places in shared memory, in bytes: inputs, later sums of the second half; what undoes their
    # powers of two; what blocks exchange; sums of the first half's warps; scales of each warp; its
    # barriers; from the next multiple of 1024 on its slots.
    @property
    def powers(self) -> int:
        return INPUTS * (self.k // GROUP)

    @property
    def middle(self) -> int:
        return self.powers + POWERS * (self.k // GROUP)

    @property
    def sums(self) -> int:
        return self.middle + self.part_bytes

    @property
    def scales(self) -> int:
        return self.sums + 4 * self.warps_k * TOKENS * self.pitch

    @property
    def warp_scales(self) -> int:
        """Bytes of a warp's."""
        return GROUPS * self.all_boxes

    @property
    def bars(self) -> int:
        return self.scales + WARPS * self.warp_scales

    @property
    def ring(self) -> int:
        """At most: the slots begin at a multiple of 1024, which the other places may not."""
        return self.bars + 8 * WARPS * SLOTS + 1016

    @property
    def words(self) -> int:
        return (self.ring + WARPS * SLOTS * BOX) // 4

    @property
    def fits(self) -> bool:
        """Whether there is as much shared memory, and room for sums where inputs were."""
        sums = 4 * WARPS // SIDES * self.rows * self.put_pitch
        return sums <= self.powers and 4 * self.words <= SMEM_BYTES


def joint(rows: int, groups: int, rank: int, k: int, hidden: int, *, round: bool) -> Joint | None:
    """The launch for these sizes; None if the kernel has none."""
    fits = (
        0 < rows <= TOKENS
        and groups * rank <= SUMMED * PART
        and rank % PART == 0
        and k % (COLUMNS * WARPS * STRIP * BLOCKS // PART) == 0
        and hidden % (BLOCKS * SIDES * STRIP) == 0
    )
    made = Joint(rows, groups, rank, k, hidden, round) if fits else None
    return made if made is not None and made.fits else None
