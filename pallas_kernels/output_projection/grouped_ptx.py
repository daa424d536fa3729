"""The grouped projection as PTX: FP8 weights go from memory to operand registers, rows of
activations are the N side of the products, a cluster adds the parts of K.

E4M3 codes as bf16 bits are 2^-120 of their values; a power of two brings in their scale, so
products are exact, and the sums carry 2^-SHIFT until the end. Within four columns the places of K
are in the order 0 2 1 3, the one that a word of codes gives for free.
"""

from pallas_kernels.inline_ptx import BARRIER, f32
from pallas_kernels.output_projection.grouped_shape import (
    CHUNK,
    STRIP,
    THREADS,
    TOKENS,
    WARPS,
    Grouped,
)

SHIFT = 60
MAX_SCALE_BYTE = 254 - 120 + SHIFT  # a scale of 2^67
AND_OR = 0xEA  # lop3 truth table of (a & b) | c
BOTH = 0x00800080  # one exponent step in both bf16 lanes
BATCH = 4  # pieces of rows that a warp has on their way at a time
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
LEAVE = "barrier.cluster.arrive.relaxed; barrier.cluster.wait;"  # behind reads: orders no writes


def vector(name: str, first: int, count: int = 4) -> str:
    return "{" + ",".join(f"{name}{first + e}" for e in range(count)) + "}"


def program(s: Grouped) -> list[str]:
    """Operands: o, codes, scales, z (GMEM), SMEM bytes, slab, tile of rows, rank in the cluster."""
    lines = [*_registers(s), *_start(s)]
    for slot in range(s.depth):
        lines += [*_load_side(s, slot, 0), *_load_side(s, slot, 1), *_load_scales(slot)]
    if s.early:
        lines.append("griddepcontrol.wait; griddepcontrol.launch_dependents;")
    lines += [*_stage(s), f"barrier.sync {BARRIER}, {THREADS};", *_multiply(s), *_publish(s)]
    lines.append(MEET if s.splits > 1 else f"barrier.sync {BARRIER}, {THREADS};")
    lines += _finish(s)
    if s.splits > 1:
        lines.append(LEAVE)  # a block's sums are read until all have met
    return [line for text in lines for line in text.strip().splitlines()]


def _registers(s: Grouped) -> list[str]:
    return [
        ".reg .b32 tid,lane,warp,g,quad,sm,row,rank,strip,kpart,at,left,a,b,c,d,half;",
        f".reg .b32 w<{32 * s.depth}>,sc<{s.depth}>,m<2>,x<8>,y<{16 * BATCH}>;",
        f".reg .b32 acc<{8 * s.token_groups}>,v<{max(32, s.addends)}>,z<3>,far<{s.splits}>;",
        ".reg .b64 q64,wp,sp,op,base; .reg .b16 h0; .reg .pred p,more,big;",
    ]


def _start(s: Grouped) -> list[str]:
    """``wp``, ``sp``: this thread's first codes and scales, ``base``: the block's part of o."""
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "shr.u32 g, lane, 2; and.b32 quad, lane, 3; mov.b32 sm, $4;",
        f"mul.lo.u32 row, $6, {s.tokens}; mov.b32 rank, $7;",
        f"and.b32 strip, warp, {s.strips - 1}; div.u32 kpart, warp, {s.strips};",
        f"mul.lo.u32 a, rank, {s.part}; mad.lo.u32 b, kpart, {s.chunks * CHUNK}, a;",
        f"mul.lo.u32 c, $5, {s.tile}; mad.lo.u32 c, strip, {STRIP}, c; add.u32 c, c, g;",
        f"mul.wide.u32 q64, c, {s.k}; mov.b64 wp, $1; add.s64 wp, wp, q64;",
        "mad.lo.u32 d, quad, 16, b; cvt.u64.u32 q64, d; add.s64 wp, wp, q64;",
        f"shr.u32 c, c, 5; mul.wide.u32 q64, c, {s.k // 32}; mov.b64 sp, $2;",
        "add.s64 sp, sp, q64; shr.u32 b, b, 5; cvt.u64.u32 q64, b; add.s64 sp, sp, q64;",
        f"div.u32 c, $5, {s.rank // s.tile}; mad.lo.u32 a, c, {s.k}, a; mov.b64 base, $0;",
        "mul.wide.u32 q64, a, 2; add.s64 base, base, q64;",
        "setp.ge.u32 big, quad, 2; mov.b32 half, 0x4440; @big mov.b32 half, 0x4441;",
        *[f"mov.b32 acc{e}, 0;" for e in range(8 * s.token_groups)],
    ]


def _load_side(s: Grouped, slot: int, side: int) -> list[str]:
    """Half a chunk: 16 codes of each of four rows."""
    load = "ld.global.nc.L1::no_allocate.v4.b32"
    return [
        f"{load} {vector('w', 32 * slot + 16 * side + 4 * e)}, [wp+{8 * e * s.k + 64 * side}];"
        for e in range(4)
    ]


def _load_scales(slot: int) -> list[str]:
    """The strip's four scales of the chunk; steps to the next."""
    return [
        f"ld.global.nc.b32 sc{slot}, [sp];",
        f"add.s64 wp, wp, {CHUNK}; add.s64 sp, sp, {CHUNK // 32};",
    ]


def _stage(s: Grouped) -> list[str]:
    """The block's part of the rows to shared memory, 16 bytes a lane in the order of operands."""
    pieces = s.part // CHUNK * s.token_groups
    batches = -(-pieces // (WARPS * BATCH))
    lines = []
    for first in range(0, batches * BATCH, BATCH):
        count = min(BATCH, -(-pieces // WARPS) - first)
        lines += [line for i in range(count) for line in _fetch(s, first + i, i, pieces)]
        lines += [line for i in range(count) for line in _keep(s, first + i, i, pieces)]
    return lines


def _fetch(s: Grouped, number: int, slot: int, pieces: int) -> list[str]:
    """A chunk of eight rows; rows behind the last are the last again."""
    guard = _guard(number, pieces)
    lines = [
        f"add.u32 a, warp, {WARPS * number}; setp.lt.u32 p, a, {pieces};",
        f"div.u32 b, a, {s.token_groups}; mul.lo.u32 c, b, {s.token_groups}; sub.u32 c, a, c;",
        f"mad.lo.u32 c, c, {TOKENS}, row; add.u32 c, c, g; min.u32 c, c, {s.rows - 1};",
        f"mul.wide.u32 q64, c, {2 * s.groups * s.k}; add.s64 op, base, q64;",
        "shl.b32 b, b, 8; mad.lo.u32 b, quad, 32, b; cvt.u64.u32 q64, b; add.s64 op, op, q64;",
    ]
    for i in range(4):
        at = 128 * (i // 2) + 16 * (i % 2)
        lines.append(f"{guard}ld.global.v4.b32 {vector('y', 16 * slot + 4 * i)}, [op+{at}];")
    return lines


def _guard(number: int, pieces: int) -> str:
    """Whether this warp has a piece, where not all have one."""
    return "" if WARPS * (number + 1) <= pieces else "@p "


def _keep(s: Grouped, number: int, slot: int, pieces: int) -> list[str]:
    guard = _guard(number, pieces)
    lines = [
        f"add.u32 a, warp, {WARPS * number}; setp.lt.u32 p, a, {pieces};",
        f"div.u32 b, a, {s.token_groups}; mul.lo.u32 c, b, {s.token_groups}; sub.u32 c, a, c;",
        f"mad.lo.u32 b, b, {4 * s.token_groups}, c; shl.b32 b, b, 9; mad.lo.u32 b, lane, 16, b;",
        "add.u32 b, b, sm;",
    ]
    for i in range(4):
        w = [f"y{16 * slot + 4 * i + e}" for e in range(4)]
        lines += [
            f"prmt.b32 x0, {w[0]}, {w[1]}, 0x5410; prmt.b32 x1, {w[0]}, {w[1]}, 0x7632;",
            f"prmt.b32 x2, {w[2]}, {w[3]}, 0x5410; prmt.b32 x3, {w[2]}, {w[3]}, 0x7632;",
            f"{guard}st.shared.v4.b32 [b+{512 * s.token_groups * i}], {{x0,x1,x2,x3}};",
        ]
    return lines


def _multiply(s: Grouped) -> list[str]:
    """All chunks of the warp; half a slot whose codes are used up is filled for ``depth`` chunks
    on. The last chunks have a copy of the code without loads: guarded ones would be put off to the
    end of the loop.
    """
    lines = [
        f"mul.lo.u32 a, kpart, {s.chunks * 2048 * s.token_groups}; mad.lo.u32 at, lane, 16, a;",
        "add.u32 at, at, sm;",
    ]
    turns = s.chunks // s.depth - 1
    if turns:
        lines += [f"mov.b32 left, {turns}; CHUNKS:", *_chunks(s, refill=True)]
        lines += ["sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra CHUNKS;"]
    return [*lines, *_chunks(s, refill=False)]


def _chunks(s: Grouped, *, refill: bool) -> list[str]:
    """One chunk of each slot."""
    lines = []
    for slot in range(s.depth):
        lines += [*_scale(slot, 0), *_scale(slot, 1)]
        for side in range(2):
            for step in range(4):
                lines += _step(s, slot, side, step)
            if refill:
                lines += _load_side(s, slot, side)
        lines += _load_scales(slot) if refill else []
        lines += [f"add.u32 at, at, {2048 * s.token_groups};"]
    return lines


def _scale(slot: int, side: int) -> list[str]:
    """m: what lifts bf16 bits of codes to values times 2^-SHIFT, in both lanes."""
    return [
        f"add.u32 a, half, {2 * side}; prmt.b32 a, sc{slot}, 0, a;",
        f"min.u32 a, a, {MAX_SCALE_BYTE}; mad.lo.u32 m{side}, a, {BOTH:#x},"
        f" {(120 - SHIFT) * BOTH:#x};",
    ]


def _step(s: Grouped, slot: int, side: int, step: int) -> list[str]:
    """16 columns of K: 32 weight rows by all rows of the tile."""
    lines = []
    for e in range(4):
        word = f"w{32 * slot + 16 * side + 4 * e + step}"
        even, odd = f"x{4 * (e // 2) + e % 2}", f"x{4 * (e // 2) + 2 + e % 2}"
        lines += [
            f"shl.b32 a, {word}, 4; and.b32 a, a, 0x07F007F0; shl.b32 b, {word}, 8;",
            f"lop3.b32 {even}, b, 0x80008000, a, {AND_OR:#x}; shr.u32 c, {word}, 4;",
            f"and.b32 c, c, 0x07F007F0; lop3.b32 {odd}, {word}, 0x80008000, c, {AND_OR:#x};",
            f"mul.rn.bf16x2 {even}, {even}, m{side}; mul.rn.bf16x2 {odd}, {odd}, m{side};",
        ]
    for n in range(s.token_groups):
        if step % 2 == 0:
            place = 512 * ((2 * side + step // 2) * s.token_groups + n)
            lines.append(f"ld.shared.v4.b32 {vector('y', 4 * n)}, [at+{place}];")
        right = vector("y", 4 * n + 2 * (step % 2), 2)
        for half in range(2):
            out = vector("acc", 8 * n + 4 * half)
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                f" {out}, {vector('x', 4 * half)}, {right}, {out};"
            )
    return lines


def _publish(s: Grouped) -> list[str]:
    """The warp's sums to shared memory, [warps_k, tokens, pitch]."""
    lines = [
        f"mul.lo.u32 a, kpart, {s.tokens}; mad.lo.u32 a, quad, 2, a;",
        f"mul.lo.u32 a, a, {s.pitch}; mad.lo.u32 a, strip, {STRIP}, a; add.u32 a, a, g;",
        f"shl.b32 a, a, 2; add.u32 a, a, sm; add.u32 a, a, {s.sums};",
    ]
    for n in range(s.token_groups):
        for half in range(2):
            for e in range(4):
                place = (TOKENS * n + e % 2) * s.pitch + 16 * half + 8 * (e // 2)
                lines.append(f"st.shared.b32 [a+{4 * place}], acc{8 * n + 4 * half + e};")
    return lines


def _finish(s: Grouped) -> list[str]:
    """Outputs of one row and strip are the work of a warp; blocks take them in turn."""
    units = s.tokens * s.strips
    at_once = max(1, min(8, 32 // s.addends, -(-units // (s.splits * WARPS))))
    stride = s.splits * WARPS
    lines = [f"mad.lo.u32 d, warp, {s.splits}, rank; mov.b32 far0, sm;"]
    if s.splits > 1:
        lines += [f"mapa.shared::cluster.u32 far{r}, sm, {r};" for r in range(s.splits)]
    lines += [f"UNITS: setp.ge.u32 p, d, {units}; @p bra SUMMED;"]
    for i in range(at_once):
        lines += _collect(s, i, stride, units)
    for i in range(at_once):
        first = i * s.addends
        lines += [f"add.f32 v{first}, v{first}, v{first + n};" for n in range(1, s.addends)]
        lines += _output(s, i, stride, units)
    return [*lines, f"add.u32 d, d, {at_once * stride}; bra UNITS;", "SUMMED:"]


def _collect(s: Grouped, i: int, stride: int, units: int) -> list[str]:
    lines = [
        f"add.u32 a, d, {i * stride}; min.u32 a, a, {units - 1}; div.u32 b, a, {s.strips};",
        f"mul.lo.u32 c, b, {s.strips}; sub.u32 c, a, c; mad.lo.u32 c, c, {STRIP}, lane;",
        f"mad.lo.u32 c, b, {s.pitch}, c; shl.b32 c, c, 2;",
    ]
    load = "ld.shared::cluster.b32" if s.splits > 1 else "ld.shared.b32"
    for n in range(s.addends):
        rank, k = divmod(n, s.warps_k)
        if k == 0:
            lines.append(f"add.u32 a, far{rank}, c;")
        place = s.sums + 4 * k * s.tokens * s.pitch
        lines.append(f"{load} v{i * s.addends + n}, [a+{place}];")
    return lines


def _output(s: Grouped, i: int, stride: int, units: int) -> list[str]:
    value = f"v{i * s.addends}"
    lines = [f"mul.f32 z0, {value}, {f32(2.0**SHIFT)}; cvt.rn.bf16.f32 h0, z0;"]
    if s.round:
        lines += round_outputs()
    return [
        *lines,
        f"add.u32 a, d, {i * stride}; div.u32 b, a, {s.strips}; mul.lo.u32 c, b, {s.strips};",
        f"sub.u32 c, a, c; add.u32 b, b, row; setp.lt.u32 p, b, {s.rows};",
        f"setp.lt.and.u32 p, a, {units}, p; mov.b64 op, $3;",
        f"mul.wide.u32 q64, b, {2 * s.groups * s.rank}; add.s64 op, op, q64;",
        f"mul.lo.u32 a, $5, {s.tile}; mad.lo.u32 c, c, {STRIP}, a; add.u32 c, c, lane;",
        "mul.wide.u32 q64, c, 2; add.s64 op, op, q64; @p st.global.b16 [op], h0;",
    ]


def round_outputs() -> list[str]:
    """h0 to the AQ32 grid of the warp's 32 outputs; not finite ones make them all NaN."""
    lines = ["cvt.u32.u16 z0, h0; shl.b32 z0, z0, 16; and.b32 z1, z0, 0x7FFFFFFF;"]
    for step in (16, 8, 4, 2, 1):
        lines.append(f"shfl.sync.bfly.b32 z2, z1, {step}, 31, 0xffffffff; max.u32 z1, z1, z2;")
    return [
        *lines,
        f"setp.ge.u32 big, z1, 0x7F800000; max.f32 z1, z1, {f32(1e-4)};",
        f"mul.f32 z1, z1, {f32(1 / 448)}; shr.u32 z2, z1, 23; and.b32 z1, z1, 0x7FFFFF;",
        "setp.ne.u32 p, z1, 0; @p add.u32 z2, z2, 1; sub.u32 z1, 254, z2; shl.b32 z1, z1, 23;",
        "mul.f32 z1, z0, z1; cvt.rn.satfinite.e4m3x2.f32 h0, z1, z1; cvt.u32.u16 z0, h0;",
        "and.b32 z1, z0, 0x7F; shl.b32 z1, z1, 20; and.b32 z0, z0, 0x80; shl.b32 z0, z0, 24;",
        f"or.b32 z0, z0, z1; mul.f32 z0, z0, {f32(2.0**120)}; shl.b32 z2, z2, 23;",
        "mul.f32 z0, z0, z2; @big mov.b32 z0, 0x7FFFFFFF; cvt.rn.bf16.f32 h0, z0;",
    ]
