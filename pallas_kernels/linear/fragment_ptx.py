"""FP8 weights as released, turned into tensor core operands in registers (PTX).

Of a unit of 64 columns of 16 rows, thread 4 g + q of a warp holds columns 16 q .. 16 q + 15 of rows
g and g + 8: two loads of 16 bytes. Word s of either belongs to k16 step s; its two registers there
hold columns (0, 2) and (1, 3) of the word's four, so column 16 q + 4 s + 2 l + h of the unit is
index 8 h + 2 q + l of the step (``ORDER``). Inputs are brought to that order, too.
"""

import numpy as np

UNIT = 64  # columns
STEPS = 4  # of 16 columns a unit
FRAGMENT = 1024  # bytes of a unit of eight rows of x
SCALE_BIAS = 120  # the code's exponent, unbiased in bf16, is this much too small
MAX_SCALE_BYTE = 254 - SCALE_BIAS  # a larger one acts as infinity

_S, _H, _Q, _L = np.ogrid[:STEPS, :2, :4, :2]
ORDER = 16 * _Q + 4 * _S + 2 * _L + _H  # [step, half, quad thread, lane] -> column of the unit

# The compiler moves loads down to their use to save registers; not past this, which costs nothing,
# unless they take the constant path (nc). What only reads registers it moves up past this, past
# barriers even, and so between the loads, where it waits for the first of them; not past a branch.
PIN = "bar.warp.sync 0xffffffff;"
# Blocks of a cluster meet: what they wrote to shared memory before is there; and without that.
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
PART = "barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;"

_SIGNS, _CODES = 0x80008000, 0x87F087F0
_SELECT = (0xF0 & 0xAA) | (0xCC & ~0xAA & 0xFF)  # lop3 truth table of c ? a : b


def spread_scale(scale: str, byte: str) -> list[str]:
    """Two bf16 lanes 2^(byte - 127 + ``SCALE_BIAS``)."""
    return [
        f"add.u32 {scale}, {byte}, {SCALE_BIAS}; min.u32 {scale}, {scale}, 255;",
        f"mul.lo.u32 {scale}, {scale}, {0x00800080};",
    ]


def decode(word: str, even: str, odd: str, scale: str) -> list[str]:
    """A word of four codes to bf16 pairs of its bytes (0, 2) and (1, 3); clobbers t0, t1, t2."""
    return [
        f"shl.b32 t0, {word}, 8; shl.b32 t1, {word}, 4; shr.u32 t2, {word}, 4;",
        f"lop3.b32 {even}, t0, t1, {_SIGNS}, {_SELECT};",
        f"lop3.b32 {odd}, {word}, t2, {_SIGNS}, {_SELECT};",
        f"and.b32 {even}, {even}, {_CODES}; and.b32 {odd}, {odd}, {_CODES};",
        f"mul.rn.bf16x2 {even}, {even}, {scale}; mul.rn.bf16x2 {odd}, {odd}, {scale};",
    ]


def decode_unit(raw: list[str], out: list[str], scale: str) -> list[str]:
    """Four words of row g and four of row g + 8 to a unit's operands, four a step."""
    lines = []
    for s in range(STEPS):
        for row in range(2):
            at = 4 * s + row
            lines += decode(raw[4 * row + s], out[at], out[at + 2], scale)
    return lines


def arrange(first: str, second: str, even: str, odd: str) -> list[str]:
    """Columns (0, 1) and (2, 3) of bf16 inputs to (0, 2) and (1, 3)."""
    return [
        f"prmt.b32 {even}, {first}, {second}, 0x5410;",
        f"prmt.b32 {odd}, {first}, {second}, 0x7632;",
    ]


def divide(quotient: str, value: str, by: int) -> str:
    """An unsigned division; by a constant, too, the compiler's own takes twenty instructions."""
    if by & (by - 1):
        return f"div.u32 {quotient}, {value}, {by};"
    return f"shr.u32 {quotient}, {value}, {by.bit_length() - 1};"


def vector(name: str, first: int, count: int = 4) -> str:
    return "{" + ",".join(f"{name}{first + i}" for i in range(count)) + "}"


def store_four(wide: bool, sums: str) -> list[str]:
    """Four neighbours to ``wide``, as float32 or as bf16; clobbers y0 and y1."""
    if wide:
        return [f"st.global.v4.f32 [wide], {vector(sums, 0)};"]
    pairs = [f"cvt.rn.bf16x2.f32 y{i}, {sums}{2 * i + 1}, {sums}{2 * i};" for i in range(2)]
    return [*pairs, "st.global.v2.b32 [wide], {y0,y1};"]
