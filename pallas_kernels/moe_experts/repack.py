"""Expert weights in the order the decode kernel reads them: wgmma A fragments, scales beside them.

A matrix [N, K] is cut into blocks of 64 rows and chunks of ``bk`` columns. A chunk is one
contiguous run of words: units of 64 columns (four k16 steps; the last unit may hold 32), 128
threads a unit, then the scales of the 64 rows. A word is placed so that few rotations and one mask
turn it into pairs of bf16 codes (``FP4``, ``FP8``); inside a unit the low lane of a pair comes from
columns 0-31 and the high lane from columns 32-63, so one packed multiply applies both scales.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.moe_experts.order import permute, restore
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.quant import Fp4Rows, Fp8Blocks
from pallas_kernels.quant.rounding import nibbles_pack, nibbles_unpack

Coded = tuple[Array, Array]  # codes one a byte, scale bytes
SCALE_MASK = 0x7F807F80  # the exponent fields of two bf16 lanes
TILE_BLOCKS = 3  # blocks of 64 rows a tile: one for each compute warpgroup


@dataclass(frozen=True)
class Encoding:
    """How codes sit in a word.

    Register i is XOR(moved(word, move) for move in moves[i]) & mask, two codes a register; a move
    is ("rotl" | "shl" | "shr", distance). Left shifts run beside the ALU, which limits the kernel;
    right shifts and rotations do not.
    """

    bits: int
    mask: int
    lane_bits: tuple[int, ...]  # target bit in a 16-bit lane of each code bit, lowest first
    moves: tuple[tuple[tuple[str, int], ...], ...]
    bias: int  # exponent that the scale carries because the code sits unbiased in bf16

    @property
    def codes_per_word(self) -> int:
        return 32 // self.bits

    @property
    def max_scale_byte(self) -> int:
        return 254 - self.bias


FP4 = Encoding(
    bits=4,
    mask=0x81C081C0,
    lane_bits=(6, 7, 8, 15),
    moves=((("shl", 0),), (("shl", 4),), (("rotl", 10),), (("shl", 6), ("shr", 2))),
    bias=126,
)
FP8 = Encoding(
    bits=8,
    mask=0x87F087F0,
    lane_bits=(4, 5, 6, 7, 8, 9, 10, 15),
    moves=((("shl", 0),), (("rotl", 4), ("rotl", 8))),
    bias=120,
)


@dataclass(frozen=True)
class Chunk:
    """Geometry of ``bk`` columns of a 64-row block."""

    encoding: Encoding
    bk: int

    def __post_init__(self):
        if self.bk % 32 or self.bk < 64:
            raise ValueError(f"{self.bk=} must be a multiple of 32, at least 64")

    @property
    def units(self) -> int:
        return self.bk // 64

    @property
    def tail(self) -> bool:
        return self.bk % 64 != 0

    @property
    def scale_words(self) -> int:
        """Words of scales a row: two units of two groups each."""
        return (self.units + self.tail + 1) // 2

    @property
    def code_words(self) -> int:
        return 64 * self.bk * self.encoding.bits // 32

    @property
    def rows(self) -> int:
        """The chunk as rows of 64 words."""
        return self.code_words // 64 + self.scale_words


def rotl(v: Array, d: int) -> Array:
    d %= 32
    return v if d == 0 else (v << d) | (v >> (32 - d))


def moved(word: Array, kind: str, distance: int) -> Array:
    """The 32-bit words after one move."""
    if kind == "rotl":
        return rotl(word, distance)
    return word << distance if kind == "shl" else word >> distance


def _source(target: int, kind: str, distance: int) -> int:
    """The word bit, as a mask, that a move brings to bit ``target``; 0 if a shift brings none."""
    source = target + distance if kind == "shr" else target - distance
    if kind == "rotl":
        source %= 32
    return 1 << source if 0 <= source < 32 else 0


@lru_cache
def placement(encoding: Encoding) -> tuple[tuple[int, ...], ...]:
    """[position][code bit] -> the word to XOR; position is 2 * register + lane. Inverts ``moves``
    over GF(2).
    """
    rows = []
    for moves in encoding.moves:
        for lane in range(2):
            for bit in encoding.lane_bits:
                source = 0
                for kind, distance in moves:
                    source ^= _source(bit + 16 * lane, kind, distance)
                rows.append((source, 1 << len(rows)))
    for column in range(32):
        pivot = next(i for i in range(column, 32) if rows[i][0] >> column & 1)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(32):
            if i != column and rows[i][0] >> column & 1:
                rows[i] = (rows[i][0] ^ rows[column][0], rows[i][1] ^ rows[column][1])
    words = [
        sum((rows[column][1] >> target & 1) << column for column in range(32))
        for target in range(32)
    ]
    b = encoding.bits
    return tuple(tuple(words[p * b : (p + 1) * b]) for p in range(encoding.codes_per_word))


@lru_cache
def word_table(encoding: Encoding) -> np.ndarray:
    """uint32 [position, code]: what a code at a position adds (XOR) to its word."""
    table = np.zeros((encoding.codes_per_word, 1 << encoding.bits), np.uint32)
    for position, constants in enumerate(placement(encoding)):
        for code in range(1 << encoding.bits):
            for bit, constant in enumerate(constants):
                table[position, code] ^= np.uint32(constant * (code >> bit & 1))
    return table


def words_of(codes: Array, encoding: Encoding) -> Array:
    """uint8 codes [..., positions] to uint32 words [...]."""
    parts = jnp.asarray(word_table(encoding))[jnp.arange(encoding.codes_per_word), codes]
    return jax.lax.reduce(parts, np.uint32(0), jax.lax.bitwise_xor, (parts.ndim - 1,))


def registers_of(word: Array, encoding: Encoding) -> Array:
    """uint32 words [...] to the bf16 pairs [..., registers] the kernel computes from them."""
    registers = []
    for moves in encoding.moves:
        value = jnp.zeros_like(word)
        for kind, distance in moves:
            value = value ^ moved(word, kind, distance)
        registers.append(value & jnp.uint32(encoding.mask))
    return jnp.stack(registers, axis=-1)


def codes_of(word: Array, encoding: Encoding) -> Array:
    """The inverse of ``words_of``."""
    registers = registers_of(word, encoding)
    lanes = jnp.stack([registers & 0xFFFF, registers >> 16], axis=-1).reshape(*word.shape, -1)
    code = jnp.zeros_like(lanes)
    for bit, target in enumerate(encoding.lane_bits):
        code = code | (lanes >> target & 1) << bit
    return code.astype(jnp.uint8)


def _fragments(codes: Array, chunk: Chunk, start: int, size: int) -> Array:
    """Codes of one unit [b, w, h, g, kb, bk] -> [b, kb, w, g, t, j, rh, h, lane]."""
    unit = codes[..., start : start + size]
    if size == 64:
        unit = unit.reshape(*unit.shape[:-1], 2, 4, 2, 4)  # b w h g kb lane j rh t
        return unit.transpose(0, 4, 1, 3, 8, 6, 7, 2, 5)
    unit = unit.reshape(*unit.shape[:-1], 2, 2, 4, 2)  # b w h g kb j rh t lane
    return unit.transpose(0, 4, 1, 3, 7, 5, 6, 2, 8)


def pack_matrix(codes: Array, scales: Array, chunk: Chunk) -> Array:
    """codes uint8 [N, K], UE8M0 bytes [N, K/32] to int32 [tiles * K/bk, TILE_BLOCKS * rows, 64].

    A tile's chunks of the same columns lie side by side; blocks past N hold zeros.
    """
    n, k = codes.shape
    blocks, kb, enc = n // 64, k // chunk.bk, chunk.encoding
    c = codes.reshape(blocks, 4, 2, 8, kb, chunk.bk)
    parts = []
    for start in range(0, chunk.bk, 64):
        f = _fragments(c, chunk, start, min(64, chunk.bk - start))
        # FP4: a word is a k16 step; FP8: half of one (rh), and four words make one 16-byte load.
        f = f.reshape(*f.shape[:5], -1, enc.codes_per_word)
        words = words_of(f, enc)  # [b, kb, w, g, t, words a thread]
        words = words.reshape(blocks, kb, 128, -1, min(4, words.shape[-1]))
        parts.append(words.swapaxes(2, 3).reshape(blocks, kb, -1))
    parts.append(_pack_scales(scales.reshape(blocks, 4, 2, 8, kb, chunk.bk // 32), chunk))
    packed = jnp.pad(jnp.concatenate(parts, axis=-1), ((0, -blocks % TILE_BLOCKS), (0, 0), (0, 0)))
    packed = packed.reshape(-1, TILE_BLOCKS, kb, chunk.rows, 64).swapaxes(1, 2)
    packed = packed.reshape(-1, TILE_BLOCKS * chunk.rows, 64)
    return jax.lax.bitcast_convert_type(packed, jnp.int32)


def _pack_scales(scales: Array, chunk: Chunk) -> Array:
    """[b, w, h, g, kb, groups] to words [b, kb, (w, g, h, word)]."""
    exponent = scales.astype(jnp.uint32) + chunk.encoding.bias
    if chunk.tail:
        exponent = jnp.concatenate([exponent, exponent[..., -1:]], axis=-1)
    pad = 4 * chunk.scale_words - exponent.shape[-1]
    exponent = jnp.pad(exponent, [(0, 0)] * 5 + [(0, pad)]).reshape(
        *exponent.shape[:-1], chunk.scale_words, 2, 2
    )
    unit = exponent[..., 0] << 7 | exponent[..., 1] << 23
    word = unit[..., 0] | rotl(unit[..., 1], 24)
    return word.transpose(0, 4, 1, 3, 2, 5).reshape(word.shape[0], word.shape[4], -1)


def unpack_matrix(packed: Array, chunk: Chunk, n: int, k: int) -> tuple[Array, Array]:
    """The inverse of ``pack_matrix``: codes uint8 [N, K], scale bytes [N, K/32]."""
    blocks, kb, enc = n // 64, k // chunk.bk, chunk.encoding
    words = jax.lax.bitcast_convert_type(packed, jnp.uint32).reshape(
        -1, kb, TILE_BLOCKS, chunk.rows * 64
    )
    words = words.swapaxes(1, 2).reshape(-1, kb, chunk.rows * 64)[:blocks]
    columns, at = [], 0
    for start in range(0, chunk.bk, 64):
        size = min(64, chunk.bk - start)
        count = size * 64 * enc.bits // 32
        per_thread = count // 128
        unit = (
            words[..., at : at + count]
            .reshape(blocks, kb, -1, 128, min(4, per_thread))
            .swapaxes(2, 3)
        )
        f = codes_of(unit, enc).reshape(
            blocks, kb, 4, 8, 4, size // 16, 2, 2, 2
        )  # b kb w g t j rh h lane
        order = (0, 2, 7, 3, 1, 8, 5, 6, 4) if size == 64 else (0, 2, 7, 3, 1, 5, 6, 4, 8)
        columns.append(f.transpose(order).reshape(blocks, 4, 2, 8, kb, size))
        at += count
    codes = jnp.concatenate(columns, axis=-1).reshape(n, k)
    s = words[..., at:].reshape(blocks, kb, 4, 8, 2, chunk.scale_words).transpose(0, 2, 4, 3, 1, 5)
    units = jnp.stack([s, rotl(s, 8)], axis=-1) & jnp.uint32(SCALE_MASK)
    exponent = jnp.stack([units >> 7 & 255, units >> 23], axis=-1).reshape(*s.shape[:-1], -1)
    scales = exponent[..., : chunk.bk // 32] - chunk.encoding.bias
    return codes, scales.reshape(n, k // 32).astype(jnp.uint8)


def chunk_columns(k: int) -> tuple[int, int]:
    """(FP4, FP8) columns a chunk for a matrix of ``k`` columns."""
    for fp4, fp8 in ((256, 128), (288, 96)):
        if k % fp4 == 0:
            return fp4, fp8
    raise ValueError(f"columns {k=} must be a multiple of 256 or 288")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedExperts:
    """A layer's routed and shared experts, repacked. ``up`` rows alternate w1 and w3 in runs of
    eight, in the fragment order of ``down``'s columns.
    """

    up: Array  # int32 [E * tiles * D/bk, TILE_BLOCKS * rows, 64]
    down: Array  # int32 [E * tiles * F/bk, TILE_BLOCKS * rows, 64]
    shared_up: Array
    shared_down: Array
    width: int = field(metadata={"static": True})  # columns F of an expert


def packed_count(packed: PackedExperts, d: int) -> int:
    """How many experts of hidden size D are packed; ``ValueError`` if D does not fit."""
    tiles = -(-(2 * packed.width) // (64 * TILE_BLOCKS))
    chunks, an_expert = packed.up.shape[0], tiles * (d // chunk_columns(d)[0])
    if chunks % an_expert:
        raise ValueError(f"{chunks=} of packed experts must be a multiple of {an_expert} for {d=}")
    return chunks // an_expert


def _interleave(w1: Array, w3: Array, bk: int) -> Array:
    """Rows of w1 and w3 [F, ...] to [2F, ...]: eight of w1, the same eight of w3; rows in the order
    in which the down projection, in chunks of ``bk`` columns, reads their outputs.
    """
    f = w1.shape[0]
    pair = jnp.stack([permute(w.T, bk).T.reshape(f // 8, 8, -1) for w in (w1, w3)], axis=1)
    return pair.reshape(2 * f, -1)


def _separate(rows: Array, bk: int) -> tuple[Array, Array]:
    """The inverse of ``_interleave``."""
    f = rows.shape[0] // 2
    pair = rows.reshape(f // 8, 2, 8, -1).swapaxes(0, 1).reshape(2, f, -1)
    return restore(pair[0].T, bk).T, restore(pair[1].T, bk).T


def _pack_expert(w1: Coded, w3: Coded, w2: Coded, up: Chunk, down: Chunk) -> tuple[Array, Array]:
    codes, scales = (_interleave(a, b, down.bk) for a, b in zip(w1, w3, strict=True))
    return pack_matrix(codes, scales, up), pack_matrix(w2[0], w2[1], down)


@partial(jax.jit, static_argnums=(1, 2))
def _pack_routed(experts: ExpertWeights, up: Chunk, down: Chunk) -> tuple[Array, Array]:
    def rows(m: Fp4Rows) -> Coded:
        return nibbles_unpack(m.codes), m.scales

    def one(w: ExpertWeights) -> tuple[Array, Array]:
        return _pack_expert(rows(w.w1), rows(w.w3), rows(w.w2), up, down)

    a, b = jax.lax.map(one, experts)
    return a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:])


@partial(jax.jit, static_argnums=(1, 2))
def _pack_shared(shared: ExpertWeights, up: Chunk, down: Chunk) -> tuple[Array, Array]:
    def rows(m: Fp8Blocks) -> Coded:
        return jax.lax.bitcast_convert_type(m.codes, jnp.uint8), jnp.repeat(m.scales, 32, axis=0)

    return _pack_expert(rows(shared.w1), rows(shared.w3), rows(shared.w2), up, down)


def pack(experts: ExpertWeights, shared: ExpertWeights) -> PackedExperts:
    """Repack a layer: experts ``Fp4Rows`` [E, F, D] and [E, D, F], shared ``Fp8Blocks`` [F, D] and
    [D, F].

    ``ValueError`` if D is no multiple of 256, F none of 256 or 288, a scale group has other than 32
    columns, or a scale exceeds 2 (FP4) or 128 (FP8): the kernel folds 2^126 (2^120) into it.
    """
    if why := misfit(experts, shared):
        raise ValueError(why)
    for encoding, weights in ((FP4, experts), (FP8, shared)):
        for name in ("w1", "w3", "w2"):
            top = int(jnp.max(getattr(weights, name).scales))
            if top > encoding.max_scale_byte:
                raise ValueError(
                    f"{name} scale byte {top} must be at most {encoding.max_scale_byte}"
                )
    return pack_unchecked(experts, shared)


def misfit(experts: ExpertWeights, shared: ExpertWeights) -> str:
    """Why ``pack`` refuses weights whatever their scales; empty if it does not."""
    for kind, weights in ((Fp4Rows, experts), (Fp8Blocks, shared)):
        for name in ("w1", "w3", "w2"):
            m = getattr(weights, name)
            if not isinstance(m, kind) or m.scales.shape[-1] * 32 != m.shape[-1]:
                return f"{name} must be {kind.__name__} with scales for 32 columns"
    f, d = experts.w1.shape[-2:]
    if d % 256:
        return f"hidden size {d=} must be a multiple of 256"
    return "" if f % 256 == 0 or f % 288 == 0 else f"width {f=} must be a multiple of 256 or 288"


def pack_unchecked(experts: ExpertWeights, shared: ExpertWeights) -> PackedExperts:
    """``pack`` without a look at sizes and scales, for tracing."""
    f, d = experts.w1.shape[-2:]
    (d4, d8), (f4, f8) = chunk_columns(d), chunk_columns(f)
    up, down = _pack_routed(experts, Chunk(FP4, d4), Chunk(FP4, f4))
    shared_up, shared_down = _pack_shared(shared, Chunk(FP8, d8), Chunk(FP8, f8))
    return PackedExperts(up, down, shared_up, shared_down, f)


def unpack(packed: PackedExperts, e: int, f: int, d: int) -> tuple[ExpertWeights, ExpertWeights]:
    """The inverse of ``pack``, bit for bit."""
    (d4, d8), (f4, f8) = chunk_columns(d), chunk_columns(f)

    def split(codes: Array, scales: Array, bk: int) -> tuple[Coded, Coded]:
        (c1, c3), (s1, s3) = _separate(codes, bk), _separate(scales, bk)
        return (c1, s1), (c3, s3)

    def one(up: Array, down: Array) -> ExpertWeights:
        w1, w3 = split(*unpack_matrix(up, Chunk(FP4, d4), 2 * f, d), f4)
        w2 = unpack_matrix(down, Chunk(FP4, f4), d, f)
        return ExpertWeights(*(Fp4Rows(nibbles_pack(c), s) for c, s in (w1, w3, w2)))

    stacked = [m.reshape(e, -1, *m.shape[1:]) for m in (packed.up, packed.down)]
    experts = jax.lax.map(lambda m: one(*m), tuple(stacked))
    w1, w3 = split(*unpack_matrix(packed.shared_up, Chunk(FP8, d8), 2 * f, d), f8)
    w2 = unpack_matrix(packed.shared_down, Chunk(FP8, f8), d, f)
    fp8 = [
        Fp8Blocks(jax.lax.bitcast_convert_type(c, jnp.float8_e4m3fn), s[::32])
        for c, s in (w1, w3, w2)
    ]
    return experts, ExpertWeights(*fp8)
