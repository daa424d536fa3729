"""What is static about the prefill kernel: its two grouped products, its rings in shared memory."""

from dataclasses import dataclass

from pallas_kernels.moe_experts.repack import FP4, TILE_BLOCKS, Chunk, chunk_columns

GROUP = 8  # tokens of a core matrix
MAX_GROUPS = 24  # of an item: 192 accumulator columns, 96 registers
TILE = GROUP * MAX_GROUPS
WIDTHS = tuple(range(2, MAX_GROUPS + 1, 2))  # groups that a product can be compiled for
SMEM_BYTES = 226 * 1024
UNIT_BYTES = 1024  # a group's tokens in a unit of 64 columns
WARPS = 4 * TILE_BLOCKS  # that multiply


def units_per_stage(width: int) -> int:
    """Units of 64 columns that a slot of tokens holds; small items take a whole chunk at once."""
    return 8 if width <= 4 else 2 if width <= 12 else 1


@dataclass(frozen=True)
class Product:
    """One grouped product: its matrix in tiles of ``TILE_BLOCKS`` blocks and ``depth`` chunks."""

    chunk: Chunk
    blocks: int  # 64-row blocks of the matrix
    depth: int  # chunks along K
    down: bool

    @property
    def tiles(self) -> int:
        return -(-self.blocks // TILE_BLOCKS)

    @property
    def units(self) -> int:
        """Units of a chunk, the one of 32 columns included."""
        return self.chunk.units + self.chunk.tail

    def stages(self, width: int) -> int:
        """Slots of tokens a chunk takes."""
        return -(-self.units // units_per_stage(width))


@dataclass(frozen=True)
class Ring:
    """Slots of weight chunks and of tokens, and the barriers that say which are full and empty."""

    weight_slots: int
    weight_bytes: int
    token_slots: int

    token_bytes = MAX_GROUPS * UNIT_BYTES

    @classmethod
    def fitting(cls, chunk: Chunk, weight_slots: int) -> "Ring":
        weight_bytes = TILE_BLOCKS * chunk.rows * 256
        tokens = (SMEM_BYTES - weight_slots * weight_bytes - 256) // cls.token_bytes
        return cls(weight_slots, weight_bytes, tokens)

    def barrier(self, kind: str) -> int:
        """Byte offset of the first barrier of a kind."""
        before = {
            "full_weights": 0,
            "empty_weights": self.weight_slots,
            "full_tokens": 2 * self.weight_slots,
            "empty_tokens": 2 * self.weight_slots + self.token_slots,
        }
        return 8 * before[kind]

    @property
    def barriers(self) -> int:
        return 2 * (self.weight_slots + self.token_slots)


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
    weight_slots: int = 5  # 3 to 5 measured alike; 6 leave too few slots for tokens

    @property
    def groups(self) -> int:
        """Groups of eight sorted tokens, every expert's last one padded: an upper bound."""
        pairs = self.rows * self.k
        return (pairs + (GROUP - 1) * min(self.experts, pairs)) // GROUP

    @property
    def items(self) -> int:
        """Runs of at most ``TILE`` tokens of one expert: an upper bound."""
        pairs = self.rows * self.k
        return (pairs + (TILE - 1) * min(self.experts, pairs)) // TILE

    def product(self, *, down: bool) -> Product:
        k, n = (self.f, self.d) if down else (self.d, 2 * self.f)
        bk = chunk_columns(k)[0]
        return Product(Chunk(FP4, bk), n // 64, k // bk, down)

    # The plan as one int32 array: items, then expert, first group and groups of each.
    at_expert = 1

    @property
    def at_group(self) -> int:
        return 1 + self.items

    @property
    def at_groups(self) -> int:
        return 1 + 2 * self.items
