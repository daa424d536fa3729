"""What is static about a launch for few rows: tiles of weight rows, K splits, loads in flight."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pallas_kernels.linear.fragment_ptx import FRAGMENT, UNIT

ROWS = 128  # more run the kernel for many rows
SMS = 132
WARPS = 4
THREADS = 32 * WARPS
TOKENS = (8, 16, 32, 64)  # rows of x that a block multiplies
SPLITS = (1, 2, 4, 8)
NORMED = 10  # tiles of a unit in flight, at most, where a norm of several loads takes registers
UNITS = 16  # of a split, at most where 8 splits do
MAX_K = 16384  # 32 units of 64 rows of x would not fit in shared memory; of 32 rows they do
SMEM_BYTES = 226 * 1024
SETTINGS = ("tokens", "tiles", "splits", "depth")  # that a measurement chooses
TUNED = Path(__file__).parents[1] / "tuned" / "nvidia-h200.json"


@dataclass(frozen=True)
class Skinny:
    """x [rows, k] times matrices of ``outputs`` rows, in one launch.

    A warp takes 16 * ``tiles`` rows of one matrix, its block ``tokens`` rows of x and one of
    ``splits`` parts of K; the splits of a tile are a cluster and are added in their order.
    ``depth`` units of 64 columns are on their way to registers. ``early``: weights are loaded
    before the kernel ahead has ended, so no kernel that may still run can write them. ``norm``: the
    eps of the RMSNorm of x that goes before, if one does.
    """

    rows: int
    k: int
    outputs: tuple[int, ...]
    tokens: int
    tiles: int
    splits: int
    depth: int
    wide: bool = False  # float32 outputs
    early: bool = False
    norm: float | None = None

    def __post_init__(self):
        if self.tokens not in TOKENS or self.tiles not in (1, 2):
            raise ValueError(f"{self.tokens=} must be one of {TOKENS}, {self.tiles=} 1 or 2")
        if self.splits not in SPLITS:
            raise ValueError(f"{self.splits=} must be one of {SPLITS}")
        if 4 * self.words > SMEM_BYTES:
            raise ValueError(f"{4 * self.words} bytes of shared memory must fit {SMEM_BYTES}")

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.splits

    @property
    def units(self) -> int:
        """Of a split; the last splits may have fewer columns."""
        return -(-self.k // (UNIT * self.splits))

    @property
    def exact(self) -> bool:
        return self.units * self.splits * UNIT == self.k

    @property
    def warp_rows(self) -> int:
        return 16 * self.tiles

    @property
    def block_rows(self) -> int:
        return WARPS * self.warp_rows

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """The row block each matrix begins with, then their number."""
        firsts = [0]
        for n in self.outputs:
            firsts.append(firsts[-1] - (-n // self.block_rows))
        return tuple(firsts)

    @property
    def token_blocks(self) -> int:
        return -(-self.rows // self.tokens)

    @property
    def grid(self) -> int:
        """Clusters: the blocks of tokens of the same weights side by side."""
        return self.first_blocks[-1] * self.token_blocks

    @property
    def pitch(self) -> int:
        """Words from a token's sums to the next one's: no bank is asked twice."""
        return self.block_rows + 4

    @property
    def items(self) -> int:
        """Units of single rows of x that a block brings to shared memory."""
        return self.units * min(self.rows, self.tokens)

    @property
    def tasks(self) -> int:
        """Eights of them, of which a load of a warp takes one."""
        return -(-self.items // 8)

    @property
    def groups(self) -> int:
        """Operands of eight columns that hold a block's rows of x."""
        return self.tokens // 8

    @property
    def square_words(self) -> int:
        """The inputs of a split, later its sums: sums of squares lie behind them, those of units
        and those of all.
        """
        return max(self.units * self.groups * FRAGMENT // 4, self.tokens * self.pitch)

    @property
    def words(self) -> int:
        """Of shared memory."""
        return self.square_words + (0 if self.norm is None else (self.units + 1) * self.tokens)


@lru_cache(maxsize=256)
def tuned(rows: int, k: int, outputs: tuple[int, ...], **options: Any) -> Skinny:
    """The measured setting of the smallest bucket that holds ``rows``, else as few splits as make
    three blocks a multiprocessor, of four units at least and ``UNITS`` at most where K allows.
    """
    own = _estimated(rows, k, outputs, **options)
    fits = [
        entry
        for entry in json.loads(TUNED.read_text()).get("linear_few_rows", [])
        if entry["rows"] >= rows and (entry["k"], tuple(entry["outputs"])) == (k, outputs)
    ]
    if fits:
        best = min(fits, key=lambda entry: entry["rows"])
        own = replace(own, **{name: best[name] for name in SETTINGS})
    if own.norm is None or own.tasks <= WARPS:
        return own
    return replace(own, depth=min(own.depth, NORMED // own.tiles))


def _estimated(rows: int, k: int, outputs: tuple[int, ...], **options: Any) -> Skinny:
    splits = _splits(rows, k, outputs)
    room = SMEM_BYTES // ((2 * UNIT + 4) * -(-k // (UNIT * splits)) + 4)
    tokens = next((t for t in TOKENS if rows <= t), TOKENS[-1])
    tokens = max(t for t in TOKENS if t <= min(tokens, room))
    depth = {8: 12, 16: 10, 32: 6, 64: 4}[tokens]
    return Skinny(rows, k, outputs, tokens, _tiles(rows), splits, depth, **options)


def _tiles(rows: int) -> int:
    return 1 if rows <= 16 else 2


def _splits(rows: int, k: int, outputs: tuple[int, ...]) -> int:
    blocks = sum(-(-n // (64 * _tiles(rows))) for n in outputs) * -(-rows // TOKENS[-1])
    units = -(-k // UNIT)
    fits = [s for s in SPLITS if -(-units // s) <= UNITS and (s == 1 or units // s >= 4)]
    return next((s for s in fits if blocks * s >= 3 * SMS), fits[-1] if fits else SPLITS[-1])
