"""What is static about a launch of the score kernel."""

from dataclasses import dataclass

HEADS, WIDTH, TILE = 32, 128, 64
MAX_ROWS = 6
# Placed as bf16 bits, an E2M1 code is 2^-126 of its value. Keys carry 2^-SHIFT, queries 2^SHIFT.
SHIFT = 32
MAX_SCALE_BYTE = 254 - (126 - SHIFT)


@dataclass(frozen=True)
class Scores:
    """A launch over ``requests`` of ``rows`` query rows and ``pages`` table entries each.

    blocks: candidate blocks of 8 keys a row, 0 for the whole context. ``tile_rows`` query rows
    share a tile of keys; ``splits`` blocks of threads share a request. round_list: places of the
    list of key groups that is looked up at a time.
    """

    requests: int
    rows: int
    pages: int
    page: int  # entries
    pool_pages: int
    blocks: int = 0
    sharing: int = 1  # consecutive requests that share a row of the table
    splits: int = 1
    warpgroups: int = 4
    depth: int = 3  # tiles in flight a warpgroup
    round_list: int = 2048

    def __post_init__(self) -> None:
        if self.page < 8 or self.page & (self.page - 1):
            raise ValueError(f"{self.page=} must be a power of two and at least 8")
        if self.blocks and self.rows != 1:
            raise ValueError(f"{self.rows=} must be 1 with candidates: each row has its own")

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def tile_rows(self) -> int:
        return min(self.rows, MAX_ROWS)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def entries(self) -> int:
        return self.pages * self.page

    @property
    def outputs(self) -> int:
        """Scores of a row."""
        return 8 * self.blocks if self.blocks else self.entries

    @property
    def group(self) -> int:
        """Keys that lie side by side in the pool."""
        return 8 if self.blocks else min(self.page, TILE)

    @property
    def columns(self) -> int:
        return HEADS * self.tile_rows

    # Places in shared memory, in bytes.
    @property
    def weights(self) -> int:
        return 2 * WIDTH * self.columns

    @property
    def list(self) -> int:
        return self.weights + 2 * self.columns

    @property
    def words(self) -> int:
        return self.list // 4 + 2 * self.round_list
