"""The kernel for many rows as one PTX program.

Blocks walk the tiles in turn. Three warpgroups take 64 weight rows each from memory to registers,
dequantise them there (``fragment_ptx``) and multiply them with the rows of x that a fourth brings
to a ring of slots. wgmma sees weights as M and rows of x as N. Of its 16 rows a warp, index g + 8 h
is weight row 4 (g / 2) + 2 h + g % 2: then a thread stores four neighbours of one output row.
"""

from pallas_kernels.linear.broad_shape import (
    GROUP,
    GROUP_BYTES,
    NEAR,
    THREADS,
    WORKERS,
    Broad,
)
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

LOAD = "ld.global.L2::128B.v4.b32"
WARPS = 4 * WORKERS
WORKER_REGISTERS, COPY_REGISTERS = 160, 32  # of 128 a thread at the launch
NONE = 99  # no slot
SETS = 2  # of registers: one unit is multiplied while the next is dequantised


def program(s: Broad) -> list[str]:
    """Operands: image of x, codes and scales of each matrix, outputs (GMEM), SMEM words, cluster of
    one block a split.
    """
    return [
        *_registers(s),
        *_start(s),
        f"setmaxnreg.inc.sync.aligned.u32 {WORKER_REGISTERS};",
        *_work(s),
        "bra END;",
        f"COPIES: setmaxnreg.dec.sync.aligned.u32 {COPY_REGISTERS};",
        *_copies(s),
        # The workers' meetings in ``_sum``; no warp comes in parts.
        *([f"COPIED: {PIN} barrier.sync 0, {THREADS};", MEET, PART] if s.splits > 1 else []),
        "END:",
    ]


def _registers(s: Broad) -> list[str]:
    return [
        ".reg .b32 tile, wtile, rtile, rank, tid, wg, warp, lane, gi, qi, sm, at, slot, before;",
        ".reg .b32 par, bar, left, row, n, first, column, low, high, scale, i, j, e, t0, t1, t2;",
        ".reg .b32 count, size, y<2>; .reg .b64 wp, sp, op, d, wide, x;",
        ".reg .pred p, yes, in, more, got, live, one;",
        f".reg .f32 acc<{4 * s.width}>; .reg .b32 f0_<16>, f1_<16>, r0_<8>, r1_<8>, b<2>;",
    ]


def _operand(s: Broad, kind: str, m: int = 0) -> str:
    count = len(s.outputs)
    at = {"codes": 1 + 2 * m, "scales": 2 + 2 * m, "out": 1 + 2 * count + m}
    at |= {"smem": 1 + 3 * count, "cluster": 2 + 3 * count}
    return f"${at[kind]}"


def _who() -> list[str]:
    """Read anew where it is used, so that nothing of it takes registers while units go by."""
    return [
        "mov.u32 tid, %tid.x; shr.u32 wg, tid, 7; bfe.u32 warp, tid, 5, 2; and.b32 lane, tid, 31;",
        "shr.u32 gi, lane, 2; and.b32 qi, lane, 3;",
    ]


def _start(s: Broad) -> list[str]:
    """Barriers: full slots, then empty ones."""
    lines = [
        *_who(),
        f"mov.b32 sm, {_operand(s, 'smem')}; mov.u32 rank, %cluster_ctarank;",
        f"mad.lo.u32 tile, {_operand(s, 'cluster')}, {s.splits}, rank;",
        "mov.b32 slot, 0; setp.ne.u32 p, tid, 0; @p bra READY;",
    ]
    for i in range(s.slots):
        lines += [
            f"mbarrier.init.shared::cta.b64 [sm+{s.full + 8 * i}], 1;",
            f"mbarrier.init.shared::cta.b64 [sm+{s.empty + 8 * i}], {WARPS};",
        ]
    return [
        *lines,
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;",
        f"READY: barrier.sync 0, {THREADS}; setp.eq.u32 p, wg, {WORKERS}; @p bra COPIES;",
    ]


def _tile(s: Broad) -> list[str]:
    """wtile, rtile and rank of a tile: ``NEAR`` tiles of rows are done before the next ones."""
    span = NEAR * s.weight_tiles
    return [
        f"{divide('e', 'tile', s.splits)} and.b32 rank, tile, {s.splits - 1};",
        f"{divide('i', 'e', span)} mul.lo.u32 j, i, {span}; sub.u32 j, e, j;",
        f"mul.lo.u32 i, i, {NEAR}; sub.u32 e, {s.row_tiles}, i; min.u32 e, e, {NEAR};",
        "div.u32 wtile, j, e; mul.lo.u32 rtile, wtile, e; sub.u32 rtile, j, rtile;",
        "add.u32 rtile, rtile, i;",
    ]


def _advance(s: Broad) -> list[str]:
    """To the next slot; the parity of its barriers turns with the ring."""
    return [
        f"add.u32 slot, slot, 1; setp.eq.u32 p, slot, {s.slots};",
        "@p mov.b32 slot, 0; @p xor.b32 par, par, 1;",
    ]


def _copies(s: Broad) -> list[str]:
    """One thread fills the slots, units of a tile in turn."""
    return [
        f"setp.ne.u32 p, tid, {128 * WORKERS}; @p bra {'COPIED' if s.splits > 1 else 'END'};",
        "mov.b32 par, 1;",
        "COPY_TILE:",
        *_tile(s),
        f"mul.lo.u32 i, rtile, {s.width}; sub.u32 count, {s.groups}, i;",
        f"min.u32 count, count, {s.width}; mul.lo.u32 size, count, {GROUP_BYTES};",
        f"mul.lo.u32 j, rank, {s.steps * s.groups}; add.u32 i, i, j;",
        f"mul.wide.u32 x, i, {GROUP_BYTES}; add.s64 x, x, $0; mov.b32 left, {s.steps};",
        "COPY_UNIT: mad.lo.u32 bar, slot, 8, sm;",
        f"EMPTY: mbarrier.try_wait.parity.shared::cta.b64 got, [bar+{s.empty}], par;",
        f"@!got bra EMPTY; mad.lo.u32 at, slot, {s.slot_bytes}, sm; add.u32 bar, bar, {s.full};",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], size;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [x], size, [bar];",
        f"add.s64 x, x, {s.groups * GROUP_BYTES}; sub.u32 left, left, 1;",
        *_advance(s),
        "setp.ne.u32 p, left, 0; @p bra COPY_UNIT;",
        f"add.u32 tile, tile, {s.blocks * s.splits}; setp.lt.u32 p, tile, {s.tiles * s.splits};",
        "@p bra COPY_TILE;",
    ]


def _matrix(s: Broad, *kinds: str) -> list[str]:
    """n, and pointers, of the matrix of block j of 64 rows, then j as a row of it."""
    names = {"codes": "wp", "scales": "sp", "out": "op"}
    lines = [f"mov.b32 i, 0; mov.b32 n, {s.outputs[0]};"]
    lines += [f"mov.b64 {names[kind]}, {_operand(s, kind)};" for kind in kinds]
    for m in range(1, len(s.outputs)):
        block = s.first_blocks[m]
        lines += [
            f"setp.ge.u32 p, j, {block}; selp.b32 n, {s.outputs[m]}, n, p;",
            f"selp.b32 i, {block}, i, p;",
        ]
        for kind in kinds:
            name = names[kind]
            lines.append(f"selp.b64 {name}, {_operand(s, kind, m)}, {name}, p;")
    return [*lines, "sub.u32 j, j, i; mul.lo.u32 j, j, 64;"]


def _pick(s: Broad, *kinds: str) -> list[str]:
    """n, row (first of the warp in its matrix), first (row of x) and pointers of a tile."""
    return [
        *[*_who(), *_tile(s), f"mad.lo.u32 j, wtile, {WORKERS}, wg;", *_matrix(s, *kinds)],
        f"mad.lo.u32 row, warp, 16, j; mul.lo.u32 first, rtile, {GROUP * s.width};",
    ]


def _begin(s: Broad) -> list[str]:
    """The tile's addresses of weights; the first loads are on their way."""
    lines = [
        *_pick(s, "codes", "scales"),
        f"mul.lo.u32 column, rank, {s.steps * UNIT};",
        # Warps past the end of the matrix read its last rows; nobody stores those sums.
        "sub.u32 i, n, 16; min.u32 i, row, i; shr.u32 e, column, 5;",
        f"shr.u32 j, i, 5; mad.lo.u32 j, j, {s.k // 32}, e; shr.u32 e, qi, 1; add.u32 j, j, e;",
        "cvt.u64.u32 wide, j; add.s64 sp, sp, wide; and.b32 j, gi, 6; mad.lo.u32 i, j, 2, i;",
        f"and.b32 j, gi, 1; add.u32 i, i, j; mul.wide.u32 wide, i, {s.k}; add.s64 wp, wp, wide;",
        "mad.lo.u32 column, qi, 16, column; cvt.u64.u32 wide, column; add.s64 wp, wp, wide;",
    ]
    for u in range(min(SETS, s.steps)):
        lines += _load(s, u, u)
    return [*lines, PIN]


def _load(s: Broad, half: int, u: int, guard: str = "") -> list[str]:
    """Unit u from the one at ``wp`` on to registers r{half}_, if ``guard``; zeros past the end of
    K.
    """
    lines = []
    if s.k % UNIT:
        also = (".and", f", {guard}") if guard else ("", "")
        lines += [f"mov.b32 r{half}_{i}, 0;" for i in range(8)]
        lines += [f"mov.b32 b{half}, 0; add.u32 i, column, {u * UNIT};"]
        lines.append(f"setp.lt{also[0]}.u32 in, i, {s.k}{also[1]};")
        guard = "in"
    at = f"@{guard} " if guard else ""
    return [
        *lines,
        f"{at}{LOAD} {vector(f'r{half}_', 0)}, [wp+{UNIT * u}];",
        f"{at}{LOAD} {vector(f'r{half}_', 4)}, [wp+{UNIT * u + 2 * s.k}];",
        f"{at}ld.global.u8 b{half}, [sp+{2 * u}];",
    ]


def _decode(half: int) -> list[str]:
    raw, out = ([f"{kind}{half}_{i}" for i in range(n)] for kind, n in (("r", 8), ("f", 16)))
    return [*spread_scale("scale", f"b{half}"), *decode_unit(raw, out, "scale")]


def _work(s: Broad) -> list[str]:
    lines = [
        f"mov.b32 par, 0; mov.b32 high, {GROUP_BYTES >> 4}; setp.eq.u32 yes, 0, 0;",
        "setp.eq.u32 one, lane, 0;",
        *_begin(s),
        f"TILE: mov.b32 left, {s.steps}; mov.b32 before, {NONE};",
        *[f"mov.f32 acc{i}, 0f00000000;" for i in range(4 * s.width)],
        *_decode(0),
        *["UNITS:", *_unit(s, 0), *_unit(s, 1), "bra UNITS;"],
        "ENDED: wgmma.wait_group.sync.aligned 0;",
    ]
    if s.splits > 1:
        return [*lines, *_pick(s), *_stash(s), *_sum(s)]
    return [
        *lines,
        *[*_release(s, "before"), *_release(s, "at"), *_pick(s, "out")],
        "mov.b32 t0, n; mov.b32 t1, row; mov.b32 t2, first;",
        f"add.u32 tile, tile, {s.blocks}; setp.lt.u32 more, tile, {s.tiles}; @!more bra STORE;",
        *_begin(s),
        "STORE: mov.b32 n, t0; mov.b32 row, t1; mov.b32 first, t2;",
        *(_store_wide(s) if s.wide else _store(s)),
        "@more bra TILE;",
    ]


def _stash(s: Broad) -> list[str]:
    """Sums to shared memory, in the place of the ring: [row of x][weight row of the tile]."""
    lines = [
        f"shl.b32 i, wg, 6; mad.lo.u32 i, warp, 16, i; barrier.sync 0, {THREADS};",
        "and.b32 j, gi, 6; mad.lo.u32 i, j, 2, i; and.b32 j, gi, 1; add.u32 i, i, j;",
        f"mul.lo.u32 j, qi, {2 * s.pitch}; add.u32 i, i, j; mad.lo.u32 i, i, 4, sm;",
    ]
    for n in range(4 * s.width):
        at = 4 * ((n // 4 * 8 + n % 2) * s.pitch + n // 2 % 2 * 2)
        lines.append(f"st.shared.f32 [i+{at}], acc{n};")
    return [*lines, MEET]


def _sum(s: Broad) -> list[str]:
    """Each block of the cluster adds a share of the sums, split by split, and stores it."""
    vectors, lines = 16 * WORKERS, []
    for first in range(0, GROUP * s.width * vectors, 128 * WORKERS * s.splits):
        name = first // (128 * WORKERS * s.splits)
        lines += [
            f"mad.lo.u32 i, rank, {128 * WORKERS}, tid; add.u32 i, i, {first};",
            # e: row of x, t0: four weight rows of the tile, t1: the first of them in its block.
            f"div.u32 e, i, {vectors}; mul.lo.u32 t0, e, {vectors}; sub.u32 t0, i, t0;",
            f"mul.lo.u32 t2, e, {s.pitch}; mad.lo.u32 t2, t0, 4, t2; mad.lo.u32 t2, t2, 4, sm;",
            f"shr.u32 j, t0, 4; mad.lo.u32 j, wtile, {WORKERS}, j; and.b32 t1, t0, 15;",
            *_matrix(s, "out"),
            "mad.lo.u32 j, t1, 4, j; add.u32 e, e, first; setp.lt.u32 p, j, n;",
            f"setp.lt.and.u32 p, e, {s.rows}, p; @!p bra ADDED{name};",
        ]
        for r in range(s.splits):
            lines.append(f"mapa.shared::cluster.u32 i, t2, {r};")
            lines.append(f"ld.shared::cluster.v4.f32 {vector('acc', 4 * r)}, [i];")
        for r in range(1, s.splits):
            lines += [f"add.f32 acc{c}, acc{c}, acc{4 * r + c};" for c in range(4)]
        lines += [
            "mul.wide.u32 wide, e, n; cvt.u64.u32 d, j; add.s64 wide, wide, d;",
            f"shl.b64 wide, wide, {2 if s.wide else 1}; add.s64 wide, wide, op;",
            *store_four(s.wide, "acc"),
            f"ADDED{name}:",
        ]
    return [*lines, PART]


def _release(s: Broad, slot: str) -> list[str]:
    """A warp has read this slot, if it is one."""
    return [
        f"setp.ne.and.u32 p, {slot}, {NONE}, one; mad.lo.u32 bar, {slot}, 8, sm;",
        f"@p mbarrier.arrive.shared::cta.b64 _, [bar+{s.empty}];",
    ]


def _unit(s: Broad, half: int) -> list[str]:
    """Multiply a unit, whose operands are in f{half}_, while the next one is dequantised."""
    acc = vector("acc", 0, 4 * s.width)
    shape = f"m64n{GROUP * s.width}k16.f32.bf16.bf16"
    lines = [
        "mad.lo.u32 bar, slot, 8, sm;",
        f"FULL{half}: mbarrier.try_wait.parity.shared::cta.b64 got, [bar+{s.full}], par;",
        f"@!got bra FULL{half}; mad.lo.u32 low, slot, {s.slot_bytes}, sm;",
        # No swizzle: K-adjacent core matrices lie 128 bytes apart, groups a unit's bytes (high).
        f"bfe.u32 low, low, 4, 14; or.b32 low, low, {8 << 16};",
        # The broadcast tells the compiler that descriptors are uniform.
        "shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff; wgmma.fence.sync.aligned;",
    ]
    for step in range(STEPS):
        a = vector(f"f{half}_", 4 * step)
        lines += [
            f"add.u32 at, low, {16 * step}; mov.b64 d, {{at, high}};",
            f"wgmma.mma_async.sync.aligned.{shape} {acc}, {a}, d, yes, 1, 1, 0;",
        ]
    return [
        *lines,
        f"wgmma.commit_group.sync.aligned; setp.gt.u32 more, left, {SETS};",
        *_load(s, half, SETS, "more"),
        f"{PIN} add.s64 wp, wp, {UNIT}; add.s64 sp, sp, 2; add.u32 column, column, {UNIT};",
        *["mov.b32 at, slot;", *_advance(s)],
        "sub.u32 left, left, 1; setp.eq.u32 p, left, 0; @p bra ENDED;",
        # The unit before is done: its slot and operands are free.
        *["wgmma.wait_group.sync.aligned 1;", *_release(s, "before"), "mov.b32 before, at;"],
        *_decode(1 - half),
    ]


def _store(s: Broad) -> list[str]:
    """Sums as bf16, four of a row at a time."""
    lines = [
        "add.u32 i, first, gi; mul.wide.u32 wide, i, n; mad.lo.u32 j, qi, 4, row;",
        "cvt.u64.u32 d, j; add.s64 wide, wide, d; shl.b64 wide, wide, 1; add.s64 op, op, wide;",
        "mul.wide.u32 d, n, 16; setp.lt.u32 p, row, n;",
    ]
    for j in range(s.width):
        lines.append(f"setp.lt.and.u32 live, i, {s.rows}, p; add.u32 i, i, {GROUP};")
        for h in range(2):
            at = 4 * j + 2 * h
            lines += [
                f"cvt.rn.bf16x2.f32 y{h}, acc{at + 1}, acc{at};",
                f"movmatrix.sync.aligned.m8n8.trans.b16 y{h}, y{h};",
            ]
        lines.append("@live st.global.v2.b32 [op], {y0,y1}; add.s64 op, op, d;")
    return lines


def _store_wide(s: Broad) -> list[str]:
    """Sums as float32, one at a time."""
    lines = [
        "mad.lo.u32 i, qi, 2, first; mul.wide.u32 wide, i, n; and.b32 j, gi, 6;",
        "mad.lo.u32 j, j, 2, row; and.b32 e, gi, 1; add.u32 j, j, e; cvt.u64.u32 d, j;",
        "add.s64 wide, wide, d; shl.b64 wide, wide, 2; add.s64 op, op, wide;",
        "mul.wide.u32 d, n, 4; mul.wide.u32 wide, n, 28; setp.lt.u32 p, row, n;",
    ]
    for j in range(s.width):
        for low in range(2):
            at = 4 * j + low
            lines += [
                f"setp.lt.and.u32 live, i, {s.rows}, p; add.u32 i, i, {7 if low else 1};",
                f"@live st.global.f32 [op], acc{at}; @live st.global.f32 [op+8], acc{at + 2};",
                f"add.s64 op, op, {'wide' if low else 'd'};",
            ]
    return lines
