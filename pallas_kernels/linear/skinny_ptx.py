"""The kernel for few rows as one PTX program: weights go through a ring in shared memory to
registers, are dequantised there and multiplied (``fragment_ptx``); a cluster adds the parts of K.

A thread copies to the ring what it alone reads, so nobody waits for others; and unit by unit, which
loads to registers do not: of those the compiler waits for many at once.
"""

from pallas_kernels.inline_ptx import f32
from pallas_kernels.linear.fragment_ptx import (
    MEET,
    PART,
    PIN,
    STEPS,
    UNIT,
    decode_unit,
    divide,
    spread_scale,
    store_four,
    vector,
)
from pallas_kernels.linear.inputs_ptx import FRAGMENT, fetch, input_registers, keep, meet, squares
from pallas_kernels.linear.skinny_shape import THREADS, Skinny

COPY = "cp.async.cg.shared.global.L2::128B"


def program(s: Skinny, words: str = "", cluster: str = "") -> list[str]:
    """Operands: x, codes and scales of each matrix, outputs, the norm's weight if there is one
    (GMEM), SMEM words, cluster; the last two may be named instead.
    """
    last = 3 * len(s.outputs) + 1 + (s.norm is not None)
    lines = [*_registers(s), *_place(s, words or f"${last}", cluster or f"${last + 1}")]
    weights = [line for u in range(s.slots) for line in _load(s, u)]
    if s.early:
        lines += [*_scales(s), *weights]
        lines += ["griddepcontrol.wait; griddepcontrol.launch_dependents;", *fetch(s)]
    else:  # inputs first: behind all those weights they would come last, and nothing can begin
        lines += [*fetch(s), *_scales(s), *weights]
    lines += [*keep(s, 0 if s.early else s.slots), meet()]
    lines += squares(s) if s.norm is not None else []
    lines += _take(s, 0)
    for u in range(s.units):
        lines += _unit(s, u)
    return [*lines, meet(), *_stash(s), *_sum(s)]


def _registers(s: Skinny) -> list[str]:
    return [
        ".reg .b32 tid, lane, warp, gi, qi, row, n, block, tok0, live, column, scale, sm, xs;",
        ".reg .b32 rank, ring, i, j, u, e, f, t0, t1, t2; .reg .b64 x, wp, sp, op, wide, other;",
        f".reg .pred p, in; .reg .f32 acc<{s.tiles * s.tokens // 2}>, z<{4 * s.splits}>;",
        f".reg .b32 v<8>, y<2>, a<{16 * s.tiles}>, r<{8 * s.tiles}>, b<{s.units}>;",
        *input_registers(s),
    ]


def _place(s: Skinny, smem: str, cluster: str) -> list[str]:
    """Which matrix, rows and columns are this block's, and this thread's addresses there."""
    count = len(s.outputs)
    norm = [f"${3 * count + 1}"] if s.norm is not None else []
    lines = [
        "mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; and.b32 lane, tid, 31;",
        f"shr.u32 gi, lane, 2; and.b32 qi, tid, 3; mov.b32 sm, {smem}; mov.b64 x, $0;",
        divide("block", cluster, s.token_blocks),
        f"mov.u32 rank, %cluster_ctarank; mul.lo.u32 tok0, block, {s.token_blocks};",
        f"sub.u32 tok0, {cluster}, tok0; mul.lo.u32 tok0, tok0, {s.tokens};",
        f"sub.u32 live, {s.rows}, tok0; min.u32 live, live, {s.tokens}; mov.b32 i, 0;",
        f"mov.b64 wp, $1; mov.b64 sp, $2; mov.b64 op, ${1 + 2 * count}; mov.b32 n, {s.outputs[0]};",
    ]
    for m in range(1, count):
        first = s.first_blocks[m]
        lines += [
            f"setp.ge.u32 p, block, {first}; selp.b32 n, {s.outputs[m]}, n, p;",
            f"selp.b32 i, {first}, i, p; selp.b64 wp, ${1 + 2 * m}, wp, p;",
            f"selp.b64 sp, ${2 + 2 * m}, sp, p; selp.b64 op, ${1 + 2 * count + m}, op, p;",
        ]
    return [
        *lines,
        *[f"mov.b64 norm, {operand};" for operand in norm],
        f"sub.u32 block, block, i; mul.lo.u32 block, block, {s.block_rows};",
        # Warps past the end of the matrix read its last rows; nobody stores those sums.
        f"mad.lo.u32 row, warp, {s.warp_rows}, block; sub.u32 i, n, {s.warp_rows};",
        f"min.u32 row, row, i; mul.lo.u32 column, rank, {s.units * UNIT};",
        # A scale of 32 columns is that of two threads' 16.
        f"shr.u32 i, row, 5; mul.lo.u32 i, i, {s.k // 32}; shr.u32 j, column, 5;",
        "add.u32 i, i, j; shr.u32 j, qi, 1; add.u32 i, i, j; cvt.u64.u32 wide, i;",
        "add.s64 sp, sp, wide; mad.lo.u32 i, qi, 16, column; cvt.u64.u32 wide, i;",
        f"add.s64 wp, wp, wide; add.u32 row, row, gi; mul.wide.u32 wide, row, {s.k};",
        "add.s64 wp, wp, wide; mad.lo.u32 xs, lane, 16, sm; mad.lo.u32 ring, tid, 16, sm;",
        *[f"mov.f32 acc{i}, 0f00000000;" for i in range(s.tiles * s.tokens // 2)],
    ]


def _inside(s: Skinny, u: int) -> list[str]:
    """in: this thread's columns of unit u are not past the end of K."""
    return [f"mad.lo.u32 i, qi, 16, column; add.u32 i, i, {u * UNIT}; setp.lt.u32 in, i, {s.k};"]


def _scales(s: Skinny) -> list[str]:
    """All of them; 0 past the end of K."""
    lines, guard = [], "" if s.exact else "@in "
    for u in range(s.units):
        lines += [] if s.exact else [f"mov.b32 b{u}, 0;", *_inside(s, u)]
        lines.append(f"{guard}ld.global.u8 b{u}, [sp+{2 * u}];")
    return [*lines, PIN]


def _load(s: Skinny, u: int) -> list[str]:
    """Copies of the codes of unit u to the ring, each to where none but its thread reads it; zeros
    past the end of K.
    """
    lines, size = [], "16"
    if not s.exact:
        lines, size = [*_inside(s, u), "selp.b32 t0, 16, 0, in;"], "16, t0"
    for r in range(2 * s.tiles):
        lines.append(f"{COPY} [ring+{_slot(s, u, r)}], [wp+{UNIT * u + 8 * s.k * r}], {size};")
    return [*lines, "cp.async.commit_group;"]


def _slot(s: Skinny, u: int, r: int) -> int:
    """Where the ring has the r-th row of unit u: [slot][row of a thread][thread][16 bytes]."""
    return 4 * (s.ring_words + u % s.slots * s.slot_words) + 16 * THREADS * r


def _take(s: Skinny, u: int) -> list[str]:
    """Unit u from the ring to registers, once it is there."""
    later = min(u + s.slots, s.units) - u - 1
    lines = [f"cp.async.wait_group {later};"]
    for r in range(2 * s.tiles):
        lines.append(f"ld.shared.v4.b32 {vector('r', 4 * r)}, [ring+{_slot(s, u, r)}];")
    return lines


def _normed(s: Skinny) -> list[str]:
    """The sums of row j over its size."""
    at = 4 * (s.square_words + s.units * s.tokens)
    lines = ["mad.lo.u32 f, j, 4, sm; mov.f32 ss, 0f00000000;"]
    for r in range(s.splits):
        read = f"ld.shared.f32 lo, [f+{at}];"
        if s.splits > 1:
            read = f"mapa.shared::cluster.u32 u, f, {r}; ld.shared::cluster.f32 lo, [u+{at}];"
        lines.append(f"{read} add.f32 ss, ss, lo;")
    lines.append(
        f"fma.rn.f32 ss, ss, {f32(1 / s.k)}, {f32(s.norm or 0)}; rsqrt.approx.ftz.f32 ss, ss;"
    )
    return [*lines, *[f"mul.f32 z{c}, z{c}, ss;" for c in range(4)]]


def _unit(s: Skinny, u: int) -> list[str]:
    """acc += unit u of the weights x its inputs; the next to registers."""
    lines = [*_inputs(s, u, 0), *spread_scale("scale", f"b{u}")]
    for m in range(s.tiles):
        raw = [f"r{8 * m + i}" for i in range(8)]
        lines += decode_unit(raw, [f"a{16 * m + i}" for i in range(16)], "scale")
    if u + s.slots < s.units:
        lines += _load(s, u + s.slots)
    if u + 1 < s.units:
        lines += _take(s, u + 1)
    groups = s.tokens // 8
    for e in range(groups):
        lines += _inputs(s, u, e) if e else []
        for step in range(STEPS):
            for m in range(s.tiles):
                acc = vector("acc", 4 * (m * groups + e))
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                    f" {acc}, {vector('a', 16 * m + 4 * step)}, {vector('v', 2 * step, 2)}, {acc};"
                )
    return lines


def _inputs(s: Skinny, u: int, e: int) -> list[str]:
    """Those of eight rows."""
    at = FRAGMENT * (u * (s.tokens // 8) + e)
    return [f"ld.shared.v4.b32 {vector('v', 4 * h)}, [xs+{at + 512 * h}];" for h in range(2)]


def _stash(s: Skinny) -> list[str]:
    """The sums to shared memory: [token][row of the block]."""
    lines = [
        f"mad.lo.u32 i, warp, {s.warp_rows}, gi; mul.lo.u32 j, qi, {2 * s.pitch};",
        "add.u32 i, i, j; mad.lo.u32 i, i, 4, sm;",
    ]
    groups = s.tokens // 8
    for n in range(4 * s.tiles * groups):
        m, e, i = n // (4 * groups), n // 4 % groups, n % 4
        at = 4 * ((8 * e + i % 2) * s.pitch + 16 * m + i // 2 * 8)
        lines.append(f"st.shared.f32 [i+{at}], acc{n};")
    return lines


def _sum(s: Skinny) -> list[str]:
    """Each block of the cluster adds a share of the sums, split by split, and stores it."""
    lines = [meet()]
    if s.splits > 1:
        lines = [MEET]
    vectors = s.block_rows // 4
    for first in range(0, s.tokens * vectors, THREADS * s.splits):
        name = first // (THREADS * s.splits)
        lines += [
            f"mad.lo.u32 i, rank, {THREADS}, tid; add.u32 i, i, {first};",
            f"shr.u32 j, i, {vectors.bit_length() - 1}; setp.ge.u32 p, j, live; @p bra S{name};",
            f"and.b32 i, i, {vectors - 1}; mad.lo.u32 e, i, 4, block; setp.ge.u32 p, e, n;",
            f"@p bra S{name}; mul.lo.u32 f, j, {s.pitch}; mad.lo.u32 f, i, 4, f;",
            "mad.lo.u32 f, f, 4, sm;",
            *_read(s),
            *_add(s.splits),
            *(_normed(s) if s.norm is not None else []),
            "add.u32 j, j, tok0; mul.lo.u32 j, j, n; add.u32 j, j, e;",
            f"mul.wide.u32 wide, j, {4 if s.wide else 2}; add.s64 wide, wide, op;",
            *store_four(s.wide, "z"),
            f"S{name}:",
        ]
    if s.splits > 1:  # a block's sums are read until all have come here
        lines.append(PART)
    return lines


def _read(s: Skinny) -> list[str]:
    if s.splits == 1:
        return [f"ld.shared.v4.f32 {vector('z', 0)}, [f];"]
    lines = []
    for r in range(s.splits):
        lines.append(f"mapa.shared::cluster.u32 u, f, {r};")
        lines.append(f"ld.shared::cluster.v4.f32 {vector('z', 4 * r)}, [u];")
    return lines


def _add(splits: int) -> list[str]:
    return [f"add.f32 z{c}, z{c}, z{4 * r + c};" for r in range(1, splits) for c in range(4)]
