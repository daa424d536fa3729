"""Coefficients of many rows from the sums of parts of K, as PTX: a thread a row.

A block has 32 rows; each of its four warps adds a quarter of the parts, by pairs.
"""

from pallas_kernels.inline_ptx import BARRIER, f32
from pallas_kernels.mhc.broad_shape import Broad
from pallas_kernels.mhc.fused_ptx import vector
from pallas_kernels.mhc.products_ptx import LOG2E, MIXES, SUMS

ROWS, WARPS = 32, 4
THREADS = ROWS * WARPS
WORDS = WARPS * SUMS * ROWS  # of shared memory


def program(s: Broad) -> list[str]:
    """Operands: sums [parts, SUMS, padded], base, scale, pre, post, comb (GMEM), SMEM words,
    block.
    """
    return [*_registers(s), *_sums(s), *_mixes(s), *_sinkhorn(s), "END:"]


def _registers(s: Broad) -> list[str]:
    return [
        ".reg .b32 tid,lane,warp,row,left,a,lo,r,z,big;",
        f".reg .b32 m<{SUMS * s.parts // WARPS}>,e<{MIXES}>,u<3>,t<3>;",
        ".reg .b64 q64,ip,op; .reg .pred p;",
    ]


def _sums(s: Broad) -> list[str]:
    """m: the sums of a row, in the first warp."""
    each = s.parts // WARPS
    lines = [
        "mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; and.b32 lane, tid, 31;",
        f"mad.lo.u32 row, $7, {ROWS}, lane; mul.wide.u32 ip, warp, {4 * each * SUMS * s.padded};",
        "mul.wide.u32 q64, row, 4; add.s64 ip, ip, q64; add.s64 ip, ip, $0;",
    ]
    lines += [f"ld.global.b32 m{n}, [ip+{4 * n * s.padded}];" for n in range(each * SUMS)]
    lines += ["mov.b64 ip, $1; mov.b64 op, $2; shl.b32 a, tid, 2; add.u32 a, a, $6;"]
    lines += [f"ld.global.nc.b32 e{n}, [ip+{4 * n}];" for n in range(MIXES)]
    lines += [f"ld.global.nc.b32 u{n}, [op+{4 * n}];" for n in range(3)]
    lines += [f"mad.lo.u32 a, warp, {4 * (SUMS - 1) * ROWS}, a;"]
    step = 1
    while step < each:
        for n in range(SUMS):
            for part in range(0, each, 2 * step):
                first, second = (SUMS * i + n for i in (part, part + step))
                lines.append(f"add.f32 m{first}, m{first}, m{second};")
        step *= 2
    lines += [f"st.shared.b32 [a+{4 * n * ROWS}], m{n};" for n in range(SUMS)]
    lines += [
        f"barrier.sync {BARRIER}, {THREADS}; setp.ne.u32 p, warp, 0; @p bra END;",
        f"setp.ge.u32 p, row, {s.rows}; @p bra END;",
    ]
    for n in range(SUMS):
        for warp in range(1, WARPS):
            lines.append(f"ld.shared.b32 t{warp - 1}, [a+{4 * ROWS * (SUMS * warp + n)}];")
        lines += [f"add.f32 m{n}, m{n}, t0; add.f32 t1, t1, t2; add.f32 m{n}, m{n}, t1;"]
    return lines


def _mixes(s: Broad) -> list[str]:
    """m: mixes of the thread's own row scaled and shifted; pre and post are stored."""
    lines = [f"fma.rn.f32 r, m24, {f32(1 / s.k)}, {f32(s.norm_eps)}; rsqrt.approx.ftz.f32 r, r;"]
    for n in range(MIXES):
        lines += [f"mul.f32 m{n}, m{n}, r; fma.rn.f32 m{n}, m{n}, u{min(n // 4, 2)}, e{n};"]
    for n in range(8):
        lines += [
            f"mul.f32 z, m{n}, {f32(-LOG2E)}; ex2.approx.ftz.f32 z, z; add.f32 z, z, {f32(1.0)};",
            "rcp.approx.ftz.f32 z, z;",
            f"add.f32 m{n}, z, {f32(s.eps)};" if n < 4 else f"add.f32 m{n}, z, z;",
        ]
    for first, out in ((0, "$3"), (4, "$4")):
        lines += [f"mul.wide.u32 q64, row, 16; mov.b64 op, {out}; add.s64 op, op, q64;"]
        lines += [f"st.global.v4.b32 [op], {vector('m', first)};"]
    return lines


def _sinkhorn(s: Broad) -> list[str]:
    def entry(i: int, j: int) -> str:
        return f"m{8 + 4 * i + j}"

    def step(by_row: bool) -> list[str]:
        lines = []
        for a in range(4):
            names = [entry(a, b) if by_row else entry(b, a) for b in range(4)]
            lines += [f"add.f32 lo, {names[0]}, {names[1]}; add.f32 lo, lo, {names[2]};"]
            lines += [f"add.f32 lo, lo, {names[3]}; add.f32 lo, lo, {f32(s.eps)};"]
            lines += ["rcp.approx.ftz.f32 lo, lo;", *[f"mul.f32 {n}, {n}, lo;" for n in names]]
        return lines

    lines = []
    for i in range(4):
        names = [entry(i, j) for j in range(4)]
        lines += [f"max.f32 big, {names[0]}, {names[1]};"]
        lines += [f"max.f32 big, big, {name};" for name in names[2:]]
        for name in names:
            lines += [f"sub.f32 {name}, {name}, big; mul.f32 {name}, {name}, {f32(LOG2E)};"]
            lines += [f"ex2.approx.ftz.f32 {name}, {name};"]
        lines += [f"add.f32 lo, {names[0]}, {names[1]};"]
        lines += [f"add.f32 lo, lo, {name};" for name in names[2:]]
        lines += ["rcp.approx.ftz.f32 lo, lo;"]
        lines += [f"fma.rn.f32 {name}, {name}, lo, {f32(s.eps)};" for name in names]
    lines += step(by_row=False)
    if s.iters > 1:  # a loop: as many instructions in a row would have to be fetched
        lines += [f"mov.b32 left, {s.iters - 1};", "ITERATE:"]
        lines += step(by_row=True) + step(by_row=False)
        lines += ["sub.u32 left, left, 1; setp.ne.u32 p, left, 0; @p bra ITERATE;"]
    lines += ["mul.wide.u32 q64, row, 64; mov.b64 op, $5; add.s64 op, op, q64;"]
    lines += [f"st.global.v4.b32 [op+{16 * i}], {vector('m', 8 + 4 * i)};" for i in range(4)]
    return lines
