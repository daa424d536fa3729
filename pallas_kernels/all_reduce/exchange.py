"""What the ranks of one all-reduce agree on: shape, ways and the layout of their shared memory; and
what they agree on for the gathers between its calls.
"""

from dataclasses import dataclass

SLOTS = 3  # call i clears what call i - 1 read while peers may still write what it reads itself
HALVES = 2  # a gather clears what it has read, while peers may write for the next one
SENTINEL = 0x80008000  # a word that has not arrived: two bf16 -0.0, which no rank ever sends
THREADS = 128
VECTOR = 8  # bf16 that a thread moves at once, 16 bytes
VECTOR_BYTES = 16
MAX_ROWS = 64
MAX_RANKS = 16
RESIDENT = 4 * 132  # blocks that a Hopper GPU surely holds at once
FUSED_ROWS = 32  # 64 in the fused kernel cost more than its goal
FUSED_WIDTH = 5120  # more threads leave too few registers


@dataclass(frozen=True)
class Exchange:
    """The sum of bf16 [rows, width] over ``ranks`` GPUs that reach each other's memory. room: bytes
    that a rank may send to each of the others in one gather.

    Every rank owns ``words`` int32: three slots, the error word, then two halves for gathers. A
    slot of one-shot holds one array for each sender; of two-shot a part for each sender, then the
    sums. A half holds the bytes of each sender.
    """

    ranks: int
    rows: int
    width: int
    timeout_s: float = 5.0
    room: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"{self.ranks=} must be 2 to {MAX_RANKS}")
        if not 0 < self.rows <= MAX_ROWS:
            raise ValueError(f"{self.rows=} must be 1 to {MAX_ROWS}")
        if self.width <= 0 or self.width % VECTOR:
            raise ValueError(f"{self.width=} must be a positive multiple of {VECTOR}")
        if not 0 < self.timeout_s <= 60:
            raise ValueError(f"{self.timeout_s=} must be above 0 and at most 60")
        if self.room < 0 or self.room % VECTOR_BYTES:
            raise ValueError(f"{self.room=} must be a multiple of {VECTOR_BYTES}, or 0")
        if self.grid > RESIDENT:
            raise ValueError(
                f"{self.width=} must be at most {RESIDENT * THREADS * VECTOR // self.rows}"
            )

    @property
    def nbytes(self) -> int:
        return 2 * self.rows * self.width

    @property
    def two_shot(self) -> bool:
        """One-shot sends the whole array to every peer: for two ranks that is the least there is,
        for more it loses once bytes outweigh a second crossing.
        """
        divisible = self.rows * self.width % (VECTOR * self.ranks) == 0
        return self.ranks > 2 and self.rows > 128 // self.ranks and divisible

    @property
    def fuses(self) -> bool:
        """Whether the pass over the streams behind the sum takes it in."""
        few = self.rows <= FUSED_ROWS and self.width <= FUSED_WIDTH
        return few and not self.two_shot

    @property
    def part(self) -> int:
        """Bytes that one rank sends to another in the first crossing."""
        return self.nbytes // self.ranks if self.two_shot else self.nbytes

    @property
    def vectors(self) -> int:
        """Threads that have work."""
        return self.part // (2 * VECTOR)

    @property
    def grid(self) -> int:
        """Blocks of ``THREADS`` threads; all run at once, or ranks could wait for blocks of each
        other that never start.
        """
        return -(-self.vectors // THREADS)

    @property
    def sums(self) -> int:
        """Byte at which the slots of the second crossing begin."""
        return SLOTS * self.ranks * self.part

    @property
    def fault(self) -> int:
        """Byte of the error word: 0, or the sender that did not answer in time, plus 1."""
        return self.sums + (SLOTS * self.nbytes if self.two_shot else 0)

    @property
    def gathers(self) -> int:
        """Byte at which the halves begin."""
        return self.fault + VECTOR_BYTES

    @property
    def words(self) -> int:
        return (self.gathers + HALVES * self.ranks * self.room) // 4

    @property
    def table_words(self) -> int:
        """int32 of a rank's table: the addresses of all ranks' memory, then its own number."""
        return 2 * self.ranks + 2


@dataclass(frozen=True)
class Gather:
    """``nbytes`` in each of ``rows`` from every rank of an exchange. union: one array of the bits
    that any rank has set, else the rows of all ranks side by side.
    """

    exchange: Exchange
    rows: int
    nbytes: int
    union: bool

    def __post_init__(self) -> None:
        if self.rows < 1 or self.nbytes < 1 or self.nbytes % VECTOR_BYTES:
            raise ValueError(
                f"{self.rows=} x {self.nbytes=} must be rows of whole {VECTOR_BYTES} bytes"
            )
        if self.rows * self.nbytes > self.exchange.room:
            raise ValueError(
                f"{self.rows=} x {self.nbytes=} must fit in {self.exchange.room=} bytes"
            )

    @property
    def vectors(self) -> int:
        return self.rows * self.nbytes // VECTOR_BYTES

    @property
    def grid(self) -> int:
        """Blocks of ``THREADS`` threads; as in ``Exchange``, all run at once."""
        return min(-(-self.vectors // THREADS), RESIDENT)

    @property
    def result(self) -> int:
        """Bytes in each row of the result."""
        return self.nbytes if self.union else self.exchange.ranks * self.nbytes
