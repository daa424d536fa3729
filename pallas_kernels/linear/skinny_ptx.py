"""The kernel for few rows as one PTX program: weights go from memory to registers, are
dequantised there and multiplied (``fragment_ptx``); a cluster adds the parts of K.
"""

from pallas_kernels.inline_ptx import f32
from pallas_kernels.linear.fragment_ptx import (
    FRAGMENT,
    MEET,
    PART,
    PIN,
    STEPS,
    UNIT,
    arrange,
    decode_unit,
    divide,
    spread_scale,
    store_four,
    vector,
)
from pallas_kernels.linear.skinny_shape import THREADS, WARPS, Skinny

LOAD = "ld.global.L1::no_allocate.L2::128B.v4.b32"
BATCH, NORMED_BATCH = 5, 3  # loads of such a unit that a warp has in flight, at least
MOST = 8  # and at most
LOADING = 192  # registers for what is on its way


def program(s: Skinny, words: str = "", cluster: str = "") -> list[str]:
    """Operands: x, codes and scales of each matrix, outputs, the norm's weight if there is one
    (GMEM), SMEM words, cluster; the last two may be named instead.
    """
    ahead, last = min(s.depth, s.units), 3 * len(s.outputs) + 1 + (s.norm is not None)
    lines = [*_registers(s), *_place(s, words or f"${last}", cluster or f"${last + 1}")]
    # Inputs first: behind all those weights they would come last, and nothing can begin.
    lines += [] if s.early else _fetch(s, 0)
    lines += [*[line for u in range(ahead) for line in _load(s, u)], PIN]
    if s.early:
        lines.append("griddepcontrol.wait; griddepcontrol.launch_dependents;")
    for first in range(0, s.tasks, WARPS * _batch(s)):
        lines += _fetch(s, first) if first or s.early else []
        lines += _keep(s, first)
    lines.append(_meet())
    if s.norm is not None:
        lines += _squares(s)
    for u in range(s.units):
        lines += _unit(s, u)
        if u + ahead < s.units:
            lines += [*_load(s, u + ahead), PIN]
    return [*lines, _meet(), *_stash(s), *_sum(s)]


def _batch(s: Skinny) -> int:
    """As many as leave registers for the weights under way, up to all of a warp's."""
    least, each = (BATCH, 8) if s.norm is None else (NORMED_BATCH, 16)
    taken = 8 * s.tiles * min(s.depth, s.units) + 4 * s.tiles * s.groups
    return max(least, min(-(-s.tasks // WARPS), MOST, (LOADING - taken) // each))


def _meet() -> str:
    return f"barrier.sync 0, {THREADS};"


def _registers(s: Skinny) -> list[str]:
    lines = [
        ".reg .b32 tid, lane, warp, gi, qi, row, n, block, tok0, live, column, scale, sm, xs;",
        ".reg .b32 rank, i, j, u, e, f, t0, t1, t2; .reg .b64 x, wp, sp, op, wide, other;",
        f".reg .pred p, in, on<{_batch(s)}>; .reg .f32 acc<{4 * s.tiles * s.groups}>;",
        f".reg .b32 w<{8 * _batch(s)}>, to<{_batch(s)}>, v<8>, y<2>, a<{16 * s.tiles}>;",
        f".reg .f32 z<{4 * s.splits}>;",
    ]
    for u in range(s.units):
        lines.append(f".reg .b32 r{u}_<{8 * s.tiles}>, b{u};")
    if s.norm is not None:
        lines.append(
            f".reg .b64 norm; .reg .b32 g<{8 * _batch(s)}>; .reg .f32 ss, lo, hi, glo, ghi;"
        )
    return lines


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
        "add.s64 wp, wp, wide; mad.lo.u32 xs, lane, 16, sm;",
        *[f"mov.f32 acc{i}, 0f00000000;" for i in range(4 * s.tiles * s.groups)],
    ]


def _load(s: Skinny, u: int) -> list[str]:
    """The codes and scale of unit u; zeros past the end of K."""
    lines, guard = [], ""
    if not s.exact:
        guard = "@in "
        lines += [f"mov.b32 r{u}_{i}, 0;" for i in range(8 * s.tiles)]
        lines += [f"mov.b32 b{u}, 0; mad.lo.u32 i, qi, 16, column; add.u32 i, i, {u * UNIT};"]
        lines.append(f"setp.lt.u32 in, i, {s.k};")
    for r in range(2 * s.tiles):
        lines.append(f"{guard}{LOAD} {vector(f'r{u}_', 4 * r)}, [wp+{UNIT * u + 8 * s.k * r}];")
    return [*lines, f"{guard}ld.global.u8 b{u}, [sp+{2 * u}];"]


def _fetch(s: Skinny, first: int) -> list[str]:
    """Loads of x: four threads take a unit of a row, ``BATCH`` loads or more a warp. Rows that are
    not live are left out, columns past the end of K are 0.
    """
    lines, rows = [], min(s.rows, s.tokens)
    for b in range(_batch(s)):
        if first + WARPS * b >= s.tasks:
            break
        lines += [
            # f: item, u: unit, i: row, j: column.
            f"add.u32 f, warp, {first + WARPS * b}; mad.lo.u32 f, f, 8, gi;",
            f"{divide('u', 'f', rows)} mul.lo.u32 i, u, {rows}; sub.u32 i, f, i;",
            f"setp.lt.u32 p, f, {s.items}; setp.lt.and.u32 on{b}, i, live, p;",
            *_spot(s, b),
            f"add.u32 i, tok0, i; mul.wide.u32 wide, i, {2 * s.k}; add.s64 wide, wide, x;",
            f"mad.lo.u32 j, u, {UNIT}, column; mad.lo.u32 j, qi, 16, j;",
            "mul.wide.u32 other, j, 2; add.s64 wide, wide, other;",
        ]
        guard = f"on{b}"
        if not s.exact:
            lines += [f"mov.b32 w{8 * b + i}, 0;" for i in range(8)]
            lines.append(f"setp.lt.and.u32 in, j, {s.k}, on{b};")
            guard = "in"
        for half in range(2):
            words = vector("w", 8 * b + 4 * half)
            lines.append(f"@{guard} ld.global.v4.b32 {words}, [wide+{16 * half}];")
        if s.norm is not None:
            lines += [f"mov.b32 g{8 * b + i}, 0;" for i in range(8)]
            lines.append("add.s64 other, other, norm;")
            for half in range(2):
                words = vector("g", 8 * b + 4 * half)
                lines.append(f"@{guard} ld.global.v4.b32 {words}, [other+{16 * half}];")
    return lines


def _spot(s: Skinny, b: int) -> list[str]:
    """``to{b}``: the place of unit u of row i in shared memory."""
    return [
        f"mad.lo.u32 e, u, {FRAGMENT * s.groups}, sm; shr.u32 f, i, 3;",
        f"mad.lo.u32 e, f, {FRAGMENT}, e; and.b32 f, i, 7; mad.lo.u32 e, f, 64, e;",
        f"mad.lo.u32 to{b}, qi, 16, e;",
    ]


def _keep(s: Skinny, first: int) -> list[str]:
    """What ``_fetch`` loaded to shared memory, as each thread will load it: [unit][group of eight
    rows][half][lane][16 bytes].
    """
    lines, tasks = [], [b for b in range(_batch(s)) if first + WARPS * b < s.tasks]
    for b in tasks:
        lines += _weighed(s, b) if s.norm is not None else []
        lines += _arranged(b)
    return lines


def _arranged(b: int) -> list[str]:
    """A task's bf16 to shared memory."""
    lines = []
    for step in range(STEPS):
        w = 8 * b + 2 * step
        lines += arrange(f"w{w}", f"w{w + 1}", f"v{2 * step}", f"v{2 * step + 1}")
    for half in range(2):
        lines.append(f"@on{b} st.shared.v4.b32 [to{b}+{512 * half}], {vector('v', 4 * half)};")
    return lines


def _weighed(s: Skinny, b: int) -> list[str]:
    """A task's x times the norm's weight in its place, and the sum of its squares to shared memory:
    [unit][row].
    """
    lines = ["mov.f32 ss, 0f00000000;"]
    for i in range(8 * b, 8 * b + 8):
        lines += [
            f"shl.b32 lo, w{i}, 16; and.b32 hi, w{i}, 0xFFFF0000;",
            f"shl.b32 glo, g{i}, 16; and.b32 ghi, g{i}, 0xFFFF0000;",
            "fma.rn.f32 ss, lo, lo, ss; fma.rn.f32 ss, hi, hi, ss;",
            f"mul.f32 lo, lo, glo; mul.f32 hi, hi, ghi; cvt.rn.bf16x2.f32 w{i}, hi, lo;",
        ]
    for lanes in (1, 2):
        lines.append(f"shfl.sync.bfly.b32 lo, ss, {lanes}, 31, 0xffffffff; add.f32 ss, ss, lo;")
    return [
        *lines,
        f"setp.eq.and.u32 p, qi, 0, on{b}; sub.u32 i, to{b}, sm; shr.u32 e, i, 10;",
        "bfe.u32 i, i, 6, 3; mad.lo.u32 i, e, 8, i; mad.lo.u32 i, i, 4, sm;",
        f"@p st.shared.f32 [i+{4 * s.square_words}], ss;",
    ]


def _squares(s: Skinny) -> list[str]:
    """Each live row's sum of squares in this block's columns to shared memory."""
    at = s.square_words
    lines = [
        "setp.ge.u32 p, tid, live; @p bra SQUARES; mad.lo.u32 i, tid, 4, sm;",
        "mov.f32 ss, 0f00000000;",
    ]
    for u in range(s.units):
        lines.append(f"ld.shared.f32 lo, [i+{4 * (at + u * s.tokens)}]; add.f32 ss, ss, lo;")
    return [*lines, f"st.shared.f32 [i+{4 * (at + s.units * s.tokens)}], ss;", "SQUARES:"]


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
    """acc += unit u of the weights x its inputs."""
    lines = spread_scale("scale", f"b{u}")
    for m in range(s.tiles):
        raw = [f"r{u}_{8 * m + i}" for i in range(8)]
        lines += decode_unit(raw, [f"a{16 * m + i}" for i in range(16)], "scale")
    for e in range(s.groups):
        at = FRAGMENT * (u * s.groups + e)
        lines += [f"ld.shared.v4.b32 {vector('v', 4 * h)}, [xs+{at + 512 * h}];" for h in range(2)]
        for step in range(STEPS):
            for m in range(s.tiles):
                acc = vector("acc", 4 * (m * s.groups + e))
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                    f" {acc}, {vector('a', 16 * m + 4 * step)}, {vector('v', 2 * step, 2)}, {acc};"
                )
    return lines


def _stash(s: Skinny) -> list[str]:
    """The sums to shared memory: [token][row of the block]."""
    lines = [
        f"mad.lo.u32 i, warp, {s.warp_rows}, gi; mul.lo.u32 j, qi, {2 * s.pitch};",
        "add.u32 i, i, j; mad.lo.u32 i, i, 4, sm;",
    ]
    for n in range(4 * s.tiles * s.groups):
        m, e, i = n // (4 * s.groups), n // 4 % s.groups, n % 4
        at = 4 * ((8 * e + i % 2) * s.pitch + 16 * m + i // 2 * 8)
        lines.append(f"st.shared.f32 [i+{at}], acc{n};")
    return lines


def _sum(s: Skinny) -> list[str]:
    """Each block of the cluster adds a share of the sums, split by split, and stores it."""
    lines = [_meet()]
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
