"""One kind of rows of a compress-and-store launch: its extents and the operands of its code."""

from dataclasses import dataclass

THREADS = 128
VALUES = 16  # of a row, a thread
ROPE = 64
LATENT, KEY = 512, 128  # widths of latents and window rows, and of index keys

WINDOW_WORDS = 132

LATENTS, KEYS, WINDOW = "latents", "keys", "window"


@dataclass(frozen=True)
class Job:
    """``kind`` rows of ``requests`` requests with ``places`` tokens each. ``units`` pages, or rings
    of slots, of ``unit`` rows each are stored to; ``pages`` is the width of the page table.
    """

    kind: str
    requests: int
    places: int
    units: int
    unit: int
    pages: int = 1
    ratio: int = 1
    eps: float = 1e-20
    emit: bool = False  # of window rows, besides the rings

    def __post_init__(self) -> None:
        if self.ratio not in (1, 2):
            raise ValueError(f"{self.ratio=} must be 1 or 2")
        if self.units * self.unit >= 1 << 31 or self.requests * self.places >= 1 << 31:
            raise ValueError(f"{self.units * self.unit=} rows must be fewer than 2^31")
        if self.pages * self.unit >= 1 << 31:
            raise ValueError(f"{self.pages * self.unit=} entries must be fewer than 2^31")

    @property
    def inputs(self) -> tuple[str, ...]:
        paged = ("slots",) if self.kind == WINDOW else ("floors", "table")
        pooled = self.kind == LATENTS and self.ratio == 2
        source = ("u", "g", "before_u", "before_g") if pooled else ("x",)
        return ("starts", "lengths", "weight", "cos", "sin", *source, *paged)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Planes that are written in place, and ``out`` for normed latents or window rows."""
        if self.kind == LATENTS:
            return ("pool", "out")
        if self.kind == KEYS:
            return ("pool", "scales")
        return ("pool", "tags", "out") if self.emit else ("pool", "tags")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def width(self) -> int:
        return KEY if self.kind == KEYS else LATENT

    @property
    def lanes(self) -> int:
        """Threads a row."""
        return self.width // VALUES

    @property
    def groups(self) -> int:
        """Rows a request."""
        return -(-self.places // self.ratio)

    @property
    def rows(self) -> int:
        return self.requests * self.groups

    @property
    def block_rows(self) -> int:
        return THREADS // self.lanes

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)
