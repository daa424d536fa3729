"""Expand, collapse and RMSNorm of rows of four streams as PTX: one pass over the streams.

A block of threads takes every ``grid``-th row. A thread has eight columns of all streams in
registers while those of the next row are on their way; from the expansion to the norm it keeps only
what is collapsed.
"""

from dataclasses import dataclass

from pallas_kernels.columns import COLUMNS, Columns
from pallas_kernels.inline_ptx import BARRIER, f32

STREAMS = 4
COEFFICIENTS = 24  # of a row in shared memory: post, comb, pre

_REGISTERS = """
.reg .b32 tid,lane,warp,sm,row,next,par,a,b,t,lo,hi,ylo,yhi,sum,scale,base,coef;
.reg .b32 h<16>,y<4>,n<20>,x<4>,c<24>,u<8>,w<4>;
.reg .b64 q64,hp,yp,cp,op,xp,wp,stride;
.reg .pred p,on,more,few;
"""


@dataclass(frozen=True)
class Fused(Columns):
    """A launch over ``rows`` of four streams of ``width`` columns by ``grid`` blocks of threads."""

    rows: int
    width: int
    grid: int
    norm_eps: float

    def __post_init__(self) -> None:
        self.check_width()

    @property
    def buffer(self) -> int:
        """Words of a row: its coefficients, then a sum of squares for each warp."""
        return COEFFICIENTS + self.warps

    @property
    def words(self) -> int:
        return 2 * self.buffer


def vector(name: str, first: int) -> str:
    return "{" + ",".join(f"{name}{first + e}" for e in range(4)) + "}"


def program(s: Fused) -> list[str]:
    """Operands: h, y, post, comb, pre, weight, streams out, normed out (GMEM), SMEM words, block.

    The sums of squares and the next coefficients change places each row: one barrier a row.
    """
    lines = [_REGISTERS, *_start(s), *_load(s, "row"), *_turn(s)]
    lines += [f"barrier.sync {BARRIER}, {s.threads};", "ROW:"]
    lines += [f"ld.shared.v4.b32 {vector('c', e)}, [base+{4 * e}];" for e in range(0, 24, 4)]
    lines += [f"add.u32 next, row, {s.grid}; setp.lt.u32 more, next, {s.rows}; @!more bra LAST;"]
    lines += [*_load(s, "next"), "LAST: mov.b32 sum, 0;"]
    for word in range(4):
        lines += expand_word(word)
    lines += [*_store_streams(s), *_reduce(s), *_norm(s)]
    lines += ["@!more bra END;", "mov.b32 row, next; bra ROW;", "END:"]
    return [line for text in lines for line in text.strip().splitlines()]


def _start(s: Fused) -> list[str]:
    """``cp``: this thread's coefficient of row 0, ``stride``: from row to row."""
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "mov.b32 sm, $8; mov.b32 row, $9; mov.b32 par, 0;",
        f"setp.lt.u32 on, tid, {s.width // COLUMNS}; setp.lt.u32 few, tid, {COEFFICIENTS};",
        "mul.wide.u32 q64, tid, 16; mov.b64 hp, $0; mov.b64 yp, $1; mov.b64 op, $6;",
        "add.s64 hp, hp, q64; add.s64 yp, yp, q64; add.s64 op, op, q64;",
        "mov.b64 wp, $5; mov.b64 xp, $7; add.s64 wp, wp, q64; add.s64 xp, xp, q64;",
        *[f"mov.b32 n{e}, 0;" for e in range(20)],
        *[f"mov.b32 w{e}, 0;" for e in range(4)],
        f"{s.on}ld.global.nc.v4.b32 {vector('w', 0)}, [wp];",
        "mov.b64 cp, $2; mov.b64 stride, 16; mov.b32 a, tid; setp.ge.u32 p, tid, 4;",
        "@p mov.b64 cp, $3; @p mov.b64 stride, 64; @p sub.u32 a, tid, 4;",
        "setp.ge.u32 p, tid, 20;",
        "@p mov.b64 cp, $4; @p mov.b64 stride, 16; @p sub.u32 a, tid, 20;",
        "mul.wide.u32 q64, a, 4; add.s64 cp, cp, q64;",
    ]


def _load(s: Fused, row: str) -> list[str]:
    """A row's streams and sublayer output to n0 .. n19, its coefficients to ``coef``."""
    load = "ld.global.nc.L1::no_allocate.v4.b32"
    return [
        f"cvt.u64.u32 q64, {row}; mul.lo.u64 q64, q64, stride; add.s64 q64, q64, cp;",
        "@few ld.global.nc.b32 coef, [q64];",
        f"mul.wide.u32 q64, {row}, {2 * STREAMS * s.width}; add.s64 q64, q64, hp;",
        *[
            f"{s.on}{load} {vector('n', 4 * i)}, [q64+{2 * s.width * i}];"
            for i in range(STREAMS)
        ],
        f"mul.wide.u32 q64, {row}, {2 * s.width}; add.s64 q64, q64, yp;",
        f"{s.on}{load} {vector('n', 16)}, [q64];",
    ]  # fmt: skip


def _turn(s: Fused) -> list[str]:
    """What was loaded is the row at hand; ``base``: its part of shared memory."""
    return [
        f"mul.lo.u32 a, par, {4 * s.buffer}; add.u32 base, sm, a; xor.b32 par, par, 1;",
        "shl.b32 a, tid, 2; add.u32 a, a, base; @few st.shared.b32 [a], coef;",
        *[f"mov.b32 h{e}, n{e};" for e in range(16)],
        *[f"mov.b32 y{e}, n{16 + e};" for e in range(4)],
    ]


def expand_word(word: int) -> list[str]:
    """Two columns: h becomes the expanded streams, x what they collapse to."""

    def unpack(source: str, low: str, high: str) -> str:
        return f"shl.b32 {low}, {source}, 16; and.b32 {high}, {source}, 0xFFFF0000;"

    lines = []
    for i in range(STREAMS):
        lines.append(unpack(f"h{4 * i + word}", "lo", "hi"))
        for j in range(STREAMS):
            comb = f"c{4 + STREAMS * i + j}"
            for out, value in ((f"u{2 * j}", "lo"), (f"u{2 * j + 1}", "hi")):
                more = f"fma.rn.f32 {out}, {comb}, {value}, {out};"
                lines.append(more if i else f"mul.f32 {out}, {comb}, {value};")
    lines.append(unpack(f"y{word}", "ylo", "yhi"))
    for j in range(STREAMS):
        low, high, out = f"u{2 * j}", f"u{2 * j + 1}", f"h{4 * j + word}"
        lines += [f"fma.rn.f32 {low}, c{j}, ylo, {low}; fma.rn.f32 {high}, c{j}, yhi, {high};"]
        lines += [f"cvt.rn.bf16x2.f32 {out}, {high}, {low};", unpack(out, low, high)]
    lines.append("mul.f32 lo, c20, u0; mul.f32 hi, c20, u1;")
    for j in range(1, STREAMS):
        lines += [f"fma.rn.f32 lo, c{20 + j}, u{2 * j}, lo;"]
        lines += [f"fma.rn.f32 hi, c{20 + j}, u{2 * j + 1}, hi;"]
    return [
        *lines,
        f"cvt.rn.bf16x2.f32 x{word}, hi, lo;",
        unpack(f"x{word}", "lo", "hi"),
        "fma.rn.f32 sum, lo, lo, sum; fma.rn.f32 sum, hi, hi, sum;",
    ]


def _store_streams(s: Fused) -> list[str]:
    return [
        f"mul.wide.u32 q64, row, {2 * STREAMS * s.width}; add.s64 q64, q64, op;",
        *[
            f"{s.on}st.global.v4.b32 [q64+{2 * s.width * i}], {vector('h', 4 * i)};"
            for i in range(STREAMS)
        ],
    ]


def _reduce(s: Fused) -> list[str]:
    """sum: over the block, in one order; the next row's coefficients cross with it."""
    lines = []
    for step in (16, 8, 4, 2, 1):
        lines += [f"shfl.sync.bfly.b32 t, sum, {step}, 31, 0xffffffff; add.f32 sum, sum, t;"]
    lines += [
        "setp.eq.u32 p, lane, 0; shl.b32 a, warp, 2; add.u32 a, a, base; mov.b32 b, base;",
        f"@p st.shared.b32 [a+{4 * COEFFICIENTS}], sum;",
        *_turn(s),
        f"barrier.sync {BARRIER}, {s.threads}; mov.b32 sum, 0;",
    ]
    for first in range(0, s.warps, 4):
        lines += [f"ld.shared.v4.b32 {vector('u', 0)}, [b+{4 * (COEFFICIENTS + first)}];"]
        lines += [f"add.f32 sum, sum, u{e};" for e in range(4)]
    return lines


def _norm(s: Fused) -> list[str]:
    lines = [f"fma.rn.f32 sum, sum, {f32(1 / s.width)}, {f32(s.norm_eps)};"]
    lines.append("rsqrt.approx.ftz.f32 scale, sum;")
    for e in range(4):
        lines += [
            f"shl.b32 lo, x{e}, 16; and.b32 hi, x{e}, 0xFFFF0000;",
            f"shl.b32 ylo, w{e}, 16; and.b32 yhi, w{e}, 0xFFFF0000;",
            "mul.f32 lo, lo, scale; mul.f32 hi, hi, scale; mul.f32 lo, lo, ylo;",
            f"mul.f32 hi, hi, yhi; cvt.rn.bf16x2.f32 x{e}, hi, lo;",
        ]
    return [
        *lines,
        f"mul.wide.u32 q64, row, {2 * s.width}; add.s64 q64, q64, xp;",
        f"{s.on}st.global.v4.b32 [q64], {vector('x', 0)};",
    ]
