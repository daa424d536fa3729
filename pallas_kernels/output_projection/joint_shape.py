"""The launch of both halves of the output projection for few rows."""

from dataclasses import dataclass

from pallas_kernels.linear.fragment_ptx import UNIT

WARPS = 4  # of a block; two fit a multiprocessor, where fifteen clusters alone have one to a block
THREADS = 32 * WARPS
BLOCKS = 8  # of a cluster
TOKENS = 8  # rows at most: the N side of a product
STRIP = 32  # weight rows of a warp: those of a scale, two products
DEPTH = 4  # units of weights on their way to a warp's registers
PART = 512  # outputs of the first half that a cluster makes
SUMMED = 16  # parts of an output, at most
PAD = 4  # words between the sums of two rows of activations
SMEM_BYTES = 226 * 1024


@dataclass(frozen=True)
class Joint:
    """``rows`` R of ``groups`` G by ``rank`` N outputs of ``k`` inputs each, then ``hidden`` D
    outputs of all G * N.

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

    def __post_init__(self) -> None:
        if not 0 < self.rows <= TOKENS:
            raise ValueError(f"{self.rows=} must be 1 to {TOKENS}")
        if self.rank % PART or self.parts > SUMMED:
            raise ValueError(f"{self.rank=} must be a multiple of {PART}, {SUMMED} in all groups")
        if self.k % (self.warps_k * UNIT * DEPTH):
            raise ValueError(f"{self.k=} must be a multiple of {self.warps_k * UNIT * DEPTH}")
        if self.hidden % (BLOCKS * WARPS * STRIP):
            raise ValueError(f"{self.hidden=} must be a multiple of {BLOCKS * WARPS * STRIP}")

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
        return self.hidden // (BLOCKS * WARPS * STRIP)

    @property
    def pitch(self) -> int:
        return self.block_rows + PAD

    # Places in shared memory, in bytes: inputs, outputs of the first half, sums of its warps.
    @property
    def middle(self) -> int:
        return 2 * TOKENS * self.k

    @property
    def sums(self) -> int:
        return self.middle + 2 * TOKENS * PART

    @property
    def words(self) -> int:
        return self.sums // 4 + self.warps_k * TOKENS * self.pitch


def joint(rows: int, groups: int, rank: int, k: int, hidden: int, *, round: bool) -> Joint | None:
    """The launch for these sizes; None if the kernel has none."""
    fits = (
        0 < rows <= TOKENS
        and groups * rank <= SUMMED * PART
        and rank % PART == 0
        and k % (UNIT * DEPTH * WARPS * STRIP * BLOCKS // PART) == 0
        and hidden % (BLOCKS * WARPS * STRIP) == 0
    )
    made = Joint(rows, groups, rank, k, hidden, round) if fits else None
    return made if made is not None and 4 * made.words <= SMEM_BYTES else None
