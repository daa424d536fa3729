"""What is static about a launch of the decode kernel: the four grouped products, their splits, the
plan's layout.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts.repack import FP4, FP8, TILE_BLOCKS, Chunk, chunk_columns

MAX_SPLITS = 6  # what the epilogue adds without spilling registers
JOINT_SLOTS = 32  # the bits of a word
TUNED = Path(__file__).parents[1] / "tuned" / "nvidia-h200.json"


@dataclass(frozen=True)
class Tuning:
    """K splits of the (up, down) products and the depths of the pipelines.

    Splits fill the GPU when few row blocks are touched; they fix the order of additions, so one
    bucket of rows keeps one setting. The shared expert has twice as many where its depth allows.
    """

    splits: tuple[int, int] = (1, 1)
    stages: int = 7  # at most; as many as shared memory holds
    group: int = 3  # chunks a warpgroup multiplies without waiting, at most
    registers: tuple[int, int, int] = (24, 48, 128)  # streaming, epilogue and computing warpgroups

    def __post_init__(self):
        if self.stages < 2 or self.group < 1:
            raise ValueError(f"{self.stages=} must be at least 2, {self.group=} at least 1")
        if self.splits[0] > MAX_SPLITS:
            raise ValueError(f"{self.splits=} must be at most {MAX_SPLITS} for the up product")
        # 768 threads are launched with 80 registers each; asking for more than that pool hangs.
        streaming, epilogue, computing = self.registers
        if 2 * streaming + epilogue + TILE_BLOCKS * computing > 480:
            raise ValueError(f"{self.registers=} must fit 480 a thread of each warpgroup")


@lru_cache
def tuned(rows: int, experts: int, width: int) -> Tuning:
    """The measured setting of the smallest bucket that holds ``rows``, else the default."""
    fits = [
        entry
        for entry in json.loads(TUNED.read_text())["moe_experts_decode"]
        if entry["rows"] >= rows and (entry["experts"], entry["width"]) == (experts, width)
    ]
    if not fits:
        return Tuning()
    return Tuning(splits=tuple(min(fits, key=lambda entry: entry["rows"])["splits"]))


@dataclass(frozen=True)
class Part:
    """One grouped product: items x tiles of row blocks x K splits, ``steps`` chunks each."""

    chunk: Chunk
    tokens: int
    blocks: int  # 64-row blocks of the matrix
    depth: int  # chunks along K
    splits: int
    down: bool
    shared: bool

    def __post_init__(self):
        if self.depth % self.splits:
            raise ValueError(f"{self.splits=} must divide the {self.depth} chunks of K")

    @property
    def tiles(self) -> int:
        return -(-self.blocks // TILE_BLOCKS)

    @property
    def steps(self) -> int:
        return self.depth // self.splits

    @property
    def tile_rows(self) -> int:
        """The weights of a tile as rows of 64 words, in each of its ``TILE_BLOCKS`` blocks."""
        return self.steps * self.chunk.rows

    @property
    def token_rows(self) -> int:
        """The tokens of a chunk as rows of 64 words."""
        return self.chunk.bk * self.tokens // 128

    def group(self, at_most: int) -> int:
        return max(g for g in range(1, at_most + 1) if self.steps % g == 0)

    def count(self, items):
        return items * self.tiles * self.splits


@dataclass(frozen=True)
class Shape:
    """The static sizes of a launch."""

    rows: int
    k: int
    experts: int
    d: int
    f: int
    limit: float
    blocks: int  # persistent blocks: the GPU's multiprocessors
    tuning: Tuning
    joint: bool = False  # whether sums are left in parts, 0 for slots that reach no expert

    def __post_init__(self):
        if self.joint and not (self.few and self.k <= JOINT_SLOTS):
            most = f"at most {dp.TILE} and {JOINT_SLOTS} for sums in parts"
            raise ValueError(f"{self.rows=} and {self.k=} must be {most}")

    @property
    def few(self) -> bool:
        """Whether all rows are in one tile of tokens, which every routed item reads."""
        return self.rows <= dp.TILE

    @property
    def items(self) -> int:
        count = dp.max_items(self.rows, self.k, self.experts)
        return max(count, self.k) if self.joint else count

    @property
    def shared_tokens(self) -> int:
        return min(32, -(-self.rows // 8) * 8)

    @property
    def shared_items(self) -> int:
        return -(-self.rows // self.shared_tokens)

    def part(self, *, down: bool, shared: bool) -> Part:
        k, n = (self.f, self.d) if down else (self.d, 2 * self.f)
        bk = chunk_columns(k)[shared]
        depth, splits = k // bk, self.tuning.splits[down]
        if shared and 2 * splits <= MAX_SPLITS and depth % (2 * splits) == 0:
            splits *= 2
        tokens = self.shared_tokens if shared else dp.TILE
        chunk = Chunk(FP8 if shared else FP4, bk)
        return Part(chunk, tokens, n // 64, depth, splits, down, shared)

    @property
    def up(self) -> Part:
        return self.part(down=False, shared=False)

    @property
    def up8(self) -> Part:
        return self.part(down=False, shared=True)

    @property
    def down(self) -> Part:
        return self.part(down=True, shared=False)

    @property
    def down8(self) -> Part:
        return self.part(down=True, shared=True)

    @property
    def rounds(self) -> int:
        """Down tiles that are as heavy as one up tile, or just heavier."""
        return -(-self.up.tile_rows // self.down.tile_rows)

    @property
    def sums(self) -> int:
        """K splits of all a row's experts, the shared one last."""
        return self.k * self.down.splits + self.down8.splits

    @property
    def arrivals(self) -> int:
        """Words that count the finished tiles of an item; one more counts the blocks that need them
        no longer.
        """
        return self.items + self.shared_items

    @property
    def tickets(self) -> tuple[int, int]:
        """Words that count the spilled K splits of a tile: of routed items, of shared items."""
        return (
            self.items * self.up.tiles * (self.up.splits > 1),
            self.shared_items * self.up8.tiles * (self.up8.splits > 1),
        )

    @property
    def plan(self) -> dp.PlanLayout:
        counters = self.arrivals + 1 + sum(self.tickets)
        return dp.PlanLayout(self.items, self.shared_items * self.shared_tokens, counters)
