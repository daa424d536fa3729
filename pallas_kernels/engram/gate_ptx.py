"""Engram's gate and gated addition as PTX: one pass over streams, keys and values.

A block of threads takes one stream of every ``stride``-th row: eight columns a thread, with the
next two rows on their way to registers. Sums are added in one order, whatever the launch.
"""

import math
from dataclasses import dataclass

from pallas_kernels.columns import COLUMNS, Columns
from pallas_kernels.inline_ptx import BARRIER, f32

SETS = 2  # rows on their way
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Gate(Columns):
    """A launch over ``rows`` of ``streams`` streams of ``width`` columns, ``stride`` blocks a
    stream.
    """

    rows: int
    streams: int
    width: int
    stride: int
    eps: float

    def __post_init__(self) -> None:
        self.check_width()
        if not 0 < self.stride <= self.rows:
            raise ValueError(f"{self.stride=} must be 1 to {self.rows=}")

    @property
    def words(self) -> int:
        """Sums of products, of squares of the stream and of the keys, for two rows in turn."""
        return SETS * 3 * self.warps


def vector(name: str, first: int) -> str:
    return "{" + ",".join(f"{name}{first + e}" for e in range(4)) + "}"


def program(s: Gate) -> list[str]:
    """Operands: h, kv, q_weight, k_weight, live, out (GMEM), SMEM bytes, stream, first row."""
    lines = [*_registers(), *_start(s)]
    for k in range(SETS):
        lines += [f"add.u32 ahead, row, {k * s.stride};", *_load(s, k)]
    lines.append("ROWS:")
    for k in range(SETS):
        lines += [f"setp.ge.u32 p, row, {s.rows}; @p bra END;", *_sums(s, k)]
        lines += [f"add.u32 ahead, row, {SETS * s.stride};", *_load(s, k)]
        lines += [*_reduce(s, k), *_gate(s), *_add(s), f"add.u32 row, row, {s.stride};"]
    lines += ["bra ROWS;", "END:"]
    return [line for text in lines for line in text.strip().splitlines()]


def _registers() -> list[str]:
    return [
        ".reg .b32 tid,lane,warp,sm,stream,row,ahead,a,b,lo,hi,klo,khi,t,alive,gate;",
        f".reg .b32 h<{4 * SETS}>,k<{4 * SETS}>,v<{4 * SETS}>,l<{SETS}>,w<8>,x<4>,y<4>,u<4>;",
        ".reg .b32 dot,aa,bb; .reg .b64 q64,hp,kp,vp,lp,op,wp; .reg .pred p,on;",
    ]


def _start(s: Gate) -> list[str]:
    """Pointers to this thread's columns of row 0; w: products of the weights in float32."""
    lines = [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        f"mov.b32 sm, $6; mov.b32 stream, $7; mov.b32 row, $8;"
        f" setp.lt.u32 on, tid, {s.width // COLUMNS};",
        f"mul.wide.u32 q64, tid, 16; mov.b64 vp, $1; add.s64 vp, vp, q64;"
        f" add.s64 vp, vp, {2 * s.streams * s.width};",
        f"mul.lo.u32 a, stream, {2 * s.width}; mad.lo.u32 a, tid, 16, a; cvt.u64.u32 q64, a;",
        "mov.b64 hp, $0; add.s64 hp, hp, q64; mov.b64 kp, $1; add.s64 kp, kp, q64;",
        "mov.b64 op, $5; add.s64 op, op, q64; mov.b64 lp, $4;",
        *[f"mov.b32 {name}{e}, 0;" for name in "hkv" for e in range(4 * SETS)],
        *[f"mov.b32 w{e}, 0;" for e in range(8)],
        "mov.b64 wp, $2; add.s64 wp, wp, q64;",
        f"{s.on}ld.global.nc.v4.b32 {vector('h', 0)}, [wp];",
        "mov.b64 wp, $3; add.s64 wp, wp, q64;",
        f"{s.on}ld.global.nc.v4.b32 {vector('k', 0)}, [wp];",
    ]
    for e in range(4):
        lines += [
            *_unpack(f"h{e}", "lo", "hi"),
            *_unpack(f"k{e}", "klo", "khi"),
            f"mul.f32 w{2 * e}, lo, klo; mul.f32 w{2 * e + 1}, hi, khi;",
        ]
    return lines


def _unpack(source: str, low: str, high: str) -> list[str]:
    return [f"shl.b32 {low}, {source}, 16; and.b32 {high}, {source}, 0xFFFF0000;"]


def _load(s: Gate, k: int) -> list[str]:
    """Row ``ahead`` to set ``k``, behind the last the last again. Loads that are guarded or of
    constant memory (``nc``) would be put off until behind the barrier and the addition.
    """
    load = "ld.global.L1::no_allocate.v4.b32"
    lines = [f"min.u32 ahead, ahead, {s.rows - 1};"]
    for name, base, pitch in (
        ("h", "hp", 2 * s.streams * s.width),
        ("k", "kp", 2 * (s.streams + 1) * s.width),
        ("v", "vp", 2 * (s.streams + 1) * s.width),
    ):
        lines += [f"mul.wide.u32 q64, ahead, {pitch}; add.s64 q64, q64, {base};"]
        lines += [f"{s.on}{load} {vector(name, 4 * k)}, [q64];"]
    return [
        *lines,
        f"mul.wide.u32 q64, ahead, 4; add.s64 q64, q64, lp; ld.global.b32 l{k}, [q64];",
    ]


def _sums(s: Gate, k: int) -> list[str]:
    """The thread's part of the three sums; x, y: its columns of the stream and of the value."""
    lines = ["mov.b32 dot, 0; mov.b32 aa, 0; mov.b32 bb, 0;"]
    for e in range(4):
        lines += [
            *_unpack(f"h{4 * k + e}", "lo", "hi"),
            *_unpack(f"k{4 * k + e}", "klo", "khi"),
            f"mul.f32 t, lo, w{2 * e}; fma.rn.f32 dot, t, klo, dot;",
            f"mul.f32 t, hi, w{2 * e + 1}; fma.rn.f32 dot, t, khi, dot;",
            "fma.rn.f32 aa, lo, lo, aa; fma.rn.f32 aa, hi, hi, aa;",
            "fma.rn.f32 bb, klo, klo, bb; fma.rn.f32 bb, khi, khi, bb;",
            f"mov.b32 x{e}, h{4 * k + e}; mov.b32 y{e}, v{4 * k + e};",
        ]
    return [*lines, f"mov.b32 alive, l{k};"]


def _reduce(s: Gate, k: int) -> list[str]:
    """The sums over the block, in one order; sets take turns: one barrier a row is enough."""
    base = 4 * k * 3 * s.warps
    lines = []
    for step in (16, 8, 4, 2, 1):
        for name in ("dot", "aa", "bb"):
            lines += [f"shfl.sync.bfly.b32 t, {name}, {step}, 31, 0xffffffff;"]
            lines += [f"add.f32 {name}, {name}, t;"]
    lines += ["setp.eq.u32 p, lane, 0; shl.b32 a, warp, 2; add.u32 a, a, sm;"]
    for i, name in enumerate(("dot", "aa", "bb")):
        lines += [f"@p st.shared.b32 [a+{base + 4 * i * s.warps}], {name};"]
    lines += [f"barrier.sync {BARRIER}, {s.threads};"]
    for i, name in enumerate(("dot", "aa", "bb")):
        lines += [f"mov.b32 {name}, 0;"]
        for first in range(0, s.warps, 4):
            place = base + 4 * (i * s.warps + first)
            lines += [f"ld.shared.v4.b32 {vector('u', 0)}, [sm+{place}];"]
            lines += [f"add.f32 {name}, {name}, u{e};" for e in range(4)]
    return lines


def _gate(s: Gate) -> list[str]:
    return [
        f"fma.rn.f32 aa, aa, {f32(1 / s.width)}, {f32(s.eps)}; rsqrt.approx.ftz.f32 aa, aa;",
        f"fma.rn.f32 bb, bb, {f32(1 / s.width)}, {f32(s.eps)}; rsqrt.approx.ftz.f32 bb, bb;",
        f"mul.f32 aa, aa, bb; mul.f32 dot, dot, aa; mul.f32 dot, dot, {f32(s.width**-0.5)};",
        f"and.b32 t, dot, 0x7FFFFFFF; max.NaN.f32 t, t, {f32(1e-6)}; sqrt.approx.ftz.f32 t, t;",
        "and.b32 a, dot, 0x80000000; or.b32 t, t, a;",
        f"mul.f32 t, t, {f32(-LOG2E)}; ex2.approx.ftz.f32 t, t; add.f32 t, t, {f32(1.0)};",
        "rcp.approx.ftz.f32 gate, t; setp.eq.u32 p, alive, 0; @p mov.b32 gate, 0;",
    ]


def _add(s: Gate) -> list[str]:
    lines = []
    for e in range(4):
        lines += [
            *_unpack(f"x{e}", "lo", "hi"),
            *_unpack(f"y{e}", "klo", "khi"),
            "fma.rn.f32 lo, gate, klo, lo; fma.rn.f32 hi, gate, khi, hi;",
            f"cvt.rn.bf16x2.f32 x{e}, hi, lo;",
        ]
    return [
        *lines,
        f"mul.wide.u32 q64, row, {2 * s.streams * s.width}; add.s64 q64, q64, op;",
        f"{s.on}st.global.v4.b32 [q64], {vector('x', 0)};",
    ]
