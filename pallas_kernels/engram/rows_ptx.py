"""Table rows gathered and dequantised to bf16, as PTX.

A warp takes whole rows, eight codes a lane: it reads 256 and writes 512 consecutive bytes a row,
with ``unroll`` rows on their way to its registers. Nothing passes through shared memory.
"""

from dataclasses import dataclass

WIDTH = 256  # values of a row
SCALES = WIDTH // 32
WARPS = 8
THREADS = 32 * WARPS
RESIDENT = 132 * 64  # warps that the GPU holds
AND_OR = 0xEA  # lop3 truth table of (a & b) | c
UNBIAS = 0x7B807B80  # 2^120 in both bf16 lanes: E4M3 codes as bf16 bits are 2^-120 of their values


@dataclass(frozen=True)
class Gather:
    """``count`` rows out of a ``table`` of as many, ``unroll`` of them a warp."""

    count: int
    table: int
    unroll: int

    def __post_init__(self) -> None:
        if self.unroll not in (1, 2, 4, 8):
            raise ValueError(f"{self.unroll=} must be 1, 2, 4 or 8")
        if not 0 < self.table <= 1 << 31:
            raise ValueError(f"{self.table=} must be 1 to 2^31")

    @property
    def blocks(self) -> int:
        return -(-self.count // (WARPS * self.unroll))


def gather(count: int, table: int) -> Gather:
    """As few rows a warp as let all of them be on the GPU at once."""
    return Gather(count, table, next((u for u in (1, 2, 4) if count <= u * RESIDENT), 8))


def program(s: Gather) -> list[str]:
    """Operands: codes, scales, ids, out (GMEM), block."""
    lines = [
        ".reg .b32 tid,lane,first,id,at,a,b,c,m;",
        f".reg .b32 w<{2 * s.unroll}>,sc<{s.unroll}>,y<4>; .reg .b64 q64,cp,sp,op; .reg .pred p;",
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 first, tid, 5;",
        f"mad.lo.u32 first, $4, {WARPS}, first; mul.lo.u32 first, first, {s.unroll};",
        f"add.u32 a, first, lane; min.u32 a, a, {s.count - 1}; mul.wide.u32 q64, a, 4;",
        "mov.b64 op, $2; add.s64 op, op, q64; ld.global.nc.b32 id, [op];",
        f"max.s32 id, id, 0; min.s32 id, id, {s.table - 1};",
        "mul.wide.u32 q64, lane, 8; mov.b64 cp, $0; add.s64 cp, cp, q64; shr.u32 a, lane, 2;",
        "cvt.u64.u32 q64, a; mov.b64 sp, $1; add.s64 sp, sp, q64;",
    ]
    for u in range(s.unroll):
        lines += [
            f"shfl.sync.idx.b32 at, id, {u}, 31, 0xffffffff;",
            f"mul.wide.u32 q64, at, {WIDTH}; add.s64 q64, q64, cp;",
            f"ld.global.nc.L1::no_allocate.v2.b32 {{w{2 * u},w{2 * u + 1}}}, [q64];",
            f"mul.wide.u32 q64, at, {SCALES}; add.s64 q64, q64, sp;",
            f"ld.global.nc.u8 sc{u}, [q64];",
        ]
    lines += ["mul.wide.u32 q64, lane, 16; mov.b64 op, $3; add.s64 op, op, q64;"]
    for u in range(s.unroll):
        lines += _scale(u)
        for word in range(2):
            lines += _decode(f"w{2 * u + word}", 2 * word)
        lines += [
            f"add.u32 a, first, {u}; setp.lt.u32 p, a, {s.count};",
            f"mul.wide.u32 q64, a, {2 * WIDTH}; add.s64 q64, q64, op;",
            "@p st.global.v4.b32 [q64], {y0,y1,y2,y3};",
        ]
    return [line for text in lines for line in text.strip().splitlines()]


def _scale(u: int) -> list[str]:
    """m: the scale in both bf16 lanes; byte 0 is 2^-127, byte 255 NaN."""
    return [
        f"mul.lo.u32 m, sc{u}, 0x00800080; setp.eq.u32 p, sc{u}, 0; @p mov.b32 m, 0x00400040;",
        f"setp.eq.u32 p, sc{u}, 255; @p mov.b32 m, 0x7FFF7FFF;",
    ]


def _decode(word: str, first: int) -> list[str]:
    lines = []
    for i, select in enumerate((0x1404, 0x3424)):
        out = f"y{first + i}"
        lines += [
            f"prmt.b32 a, {word}, 0, {select:#x}; shr.u32 b, a, 4; and.b32 b, b, 0x07F007F0;",
            f"lop3.b32 {out}, a, 0x80008000, b, {AND_OR:#x}; mov.b32 c, {UNBIAS:#x};",
            f"mul.rn.bf16x2 {out}, {out}, c; mul.rn.bf16x2 {out}, {out}, m;",
        ]
    return lines
