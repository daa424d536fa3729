"""Launches whose threads hold eight neighbouring columns of a row each."""

COLUMNS = 8  # of a thread, 16 bytes of bf16
MAX_WIDTH = 6144  # 768 threads leave 80 registers each


class Columns:
    """What follows from the ``width`` of a row, a field of the launch that inherits."""

    width: int

    def check_width(self) -> None:
        if self.width % COLUMNS or not 0 < self.width <= MAX_WIDTH:
            raise ValueError(f"{self.width=} must be a multiple of {COLUMNS} up to {MAX_WIDTH}")

    @property
    def warpgroups(self) -> int:
        return -(-self.width // (128 * COLUMNS))

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def on(self) -> str:
        """The guard of threads that have columns."""
        return "" if self.width == COLUMNS * self.threads else "@on "
