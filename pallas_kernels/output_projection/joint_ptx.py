"""Both halves of the output projection as one PTX program: each warp has a stream of boxes of FP8
weights (``linear.box_ptx``), rows of activations are the N side of products.

The first boxes of the second half are on their way while outputs of the first half go through
memory to the blocks of their part, which count each other.
"""

from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.linear import box_ptx
from pallas_kernels.linear.box_ptx import (
    BIAS,
    BOX,
    COLUMNS,
    COPY,
    GROUP,
    GROUPS,
    HIGHEST,
    INPUTS,
    POWERS,
    STRIP,
    TOP,
)
from pallas_kernels.linear.fragment_ptx import PIN, divide, vector
from pallas_kernels.output_projection.grouped_ptx import round_outputs
from pallas_kernels.output_projection.joint_shape import (
    BLOCKS,
    PART,
    SIDES,
    SLOTS,
    THREADS,
    TOKENS,
    WARPS,
    Joint,
)

INVERSE = 2 * BIAS << 23  # less a power of two: its inverse
SYNC = f"barrier.sync {BARRIER}, {THREADS};"


def program(s: Joint) -> list[str]:
    """Operands: o, codes and scales of both halves, a zeroed counter for each part, parts out, what
    blocks exchange (GMEM), SMEM bytes, part, rank in it, tensor maps of both halves' codes.
    """
    return [
        *_registers(s),
        *_start(s),
        *_barriers(s),
        *_ask(s, 0, box_ptx.EARLY),
        # Behind all those weights these would come last, and nothing can begin.
        *[line for n in range(_passes(s)) for line in _fetch(s, n)],
        *_load_scales(s),
        *_ask(s, box_ptx.EARLY, SLOTS),
        *[line for n in range(_passes(s)) for line in _keep(s, n)],
        *_store_scales(s),
        SYNC,
        *_first_half(s),
        *_exchange(s),
        *_gather(s),
        *_second_half(s),
        *_store(s),
    ]


def _registers(s: Joint) -> list[str]:
    passes = _passes(s)
    return [
        ".reg .b32 tid, lane, warp, gi, qi, sm, rank, part, strip, kpart, side, half, ring, bar;",
        ".reg .b32 slot, full, par, row0, column, next, row1, column1, edge, left, put, first, fk;",
        ".reg .b32 spot, undo, group, i, j, e, z<3>, t0, t1;",
        f".reg .b32 w<{4 * max(passes, 3)}>, b<{_loads(GROUPS * s.first_boxes)}>;",
        f".reg .b32 f<{_loads(_second_groups(s))}>; .reg .b64 desc, other, xp, ep, cp, wide;",
        f".reg .pred p, q, one, big, live, got, more, on<{passes}>;",
        f".reg .f32 up<{passes}>, y<2>, lo, hi;",
        box_ptx.registers(1),
    ]


def _start(s: Joint) -> list[str]:
    """``row0``, ``column``: the warp's first box of the first half, ``row1``, ``column1``: of the
    second. Four threads take a group of a row of o: where it is, ``xp``, and comes to, ``spot``.
    """
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "shr.u32 gi, lane, 2; and.b32 qi, lane, 3; mov.b32 sm, $8; mov.b32 part, $9;",
        "mov.b32 rank, $10; mov.b64 desc, $11; mov.b64 other, $12;",
        f"and.b32 strip, warp, {s.strips - 1}; {divide('kpart', 'warp', s.strips)}",
        f"mul.lo.u32 row0, part, {PART}; mad.lo.u32 row0, rank, {s.block_rows}, row0;",
        f"mad.lo.u32 row0, strip, {STRIP}, row0;",
        f"mul.lo.u32 column, kpart, {s.first_boxes * COLUMNS};",
        f"and.b32 side, warp, {SIDES - 1}; {divide('half', 'warp', SIDES)}",
        f"mul.lo.u32 row1, rank, {s.block_outputs};",
        f"mad.lo.u32 row1, side, {s.tiles * STRIP}, row1; mul.lo.u32 column1, part, {PART};",
        f"mad.lo.u32 column1, half, {s.tile_boxes * COLUMNS}, column1;",
        f"add.u32 edge, column1, {s.tile_boxes * COLUMNS};",
        f"add.u32 ring, sm, {s.bars + 8 * WARPS * SLOTS + 1023}; and.b32 ring, ring, 0xFFFFFC00;",
        f"mad.lo.u32 ring, warp, {SLOTS * BOX}, ring;",
        f"mad.lo.u32 bar, warp, {8 * SLOTS}, sm; add.u32 bar, bar, {s.bars};",
        f"shr.u32 e, tid, 2; {divide('group', 'e', s.span)} and.b32 e, e, {s.span - 1};",
        f"setp.lt.u32 live, e, {s.rows}; mad.lo.u32 i, group, {TOKENS}, e;",
        "mad.lo.u32 spot, i, 64, sm; mad.lo.u32 spot, qi, 16, spot; mad.lo.u32 undo, i, 4, sm;",
        f"div.u32 j, part, {s.parts // s.groups}; mad.lo.u32 j, e, {s.groups}, j;",
        f"mul.lo.u32 j, j, {s.k}; mad.lo.u32 j, group, {GROUP}, j; mad.lo.u32 j, qi, 8, j;",
        "mul.wide.u32 xp, j, 2; add.s64 xp, xp, $0;",
    ]


def _passes(s: Joint) -> int:
    """Loads of o by a thread."""
    return -(-s.k // (GROUP * s.abreast))


def _fetch(s: Joint, n: int) -> list[str]:
    """``on``: there is such a group and row."""
    inside = (n + 1) * s.abreast * GROUP <= s.k
    return [
        f"add.u32 j, group, {n * s.abreast};",
        f"mov.pred on{n}, live;" if inside else f"setp.lt.and.u32 on{n}, j, {s.k // GROUP}, live;",
        f"@on{n} ld.global.v4.b32 {vector('w', 4 * n)}, [xp+{2 * GROUP * s.abreast * n}];",
    ]


def _keep(s: Joint, n: int) -> list[str]:
    """What ``_fetch`` loaded, as f16 times a power of two, and what undoes it."""
    at = n * s.abreast
    return [
        *box_ptx.raise_group(n),
        f"setp.eq.and.u32 p, qi, 0, on{n};",
        f"@p st.shared.b32 [undo+{s.powers + POWERS * at}], t0;",
        *box_ptx.to_halves(n),
        f"@on{n} st.shared.v4.b32 [spot+{INPUTS * at}], {vector('w', 4 * n)};",
    ]


def _loads(count: int) -> int:
    return -(-count // 32)


def _second_groups(s: Joint) -> int:
    return GROUPS * s.tiles * s.tile_boxes


def _load_scales(s: Joint) -> list[str]:
    """A warp's, a group a lane and register: of the first half, then tile by tile."""
    groups = GROUPS * s.tile_boxes
    lines = [
        f"mul.lo.u32 i, part, {PART // STRIP}; mad.lo.u32 i, rank, {s.strips}, i;",
        f"add.u32 i, i, strip; mul.lo.u32 i, i, {s.k // GROUP};",
        f"mad.lo.u32 i, kpart, {GROUPS * s.first_boxes}, i; add.u32 i, i, lane;",
        "cvt.u64.u32 wide, i; add.s64 wide, wide, $2;",
    ]
    first = GROUPS * s.first_boxes
    for n in range(_loads(first)):
        lines.append(f"{_within(first - 32 * n)}ld.global.u8 b{n}, [wide+{32 * n}];")
    lines += [
        f"shr.u32 i, row1, 5; {divide('e', 'lane', groups)} add.u32 i, i, e;",
        f"mul.lo.u32 i, i, {s.outputs // GROUP}; shr.u32 j, column1, 5; add.u32 i, i, j;",
        f"and.b32 j, lane, {groups - 1}; add.u32 i, i, j; cvt.u64.u32 wide, i;",
        "add.s64 wide, wide, $4;",
    ]
    for n in range(_loads(_second_groups(s))):
        at = 32 // groups * (s.outputs // GROUP) * n
        lines.append(f"{_within(_second_groups(s) - 32 * n)}ld.global.u8 f{n}, [wide+{at}];")
    return lines


def _store_scales(s: Joint) -> list[str]:
    """To shared memory, in the order of boxes; ``sc``: those of the first."""
    first = GROUPS * s.first_boxes
    lines = [
        f"mad.lo.u32 sc, warp, {s.warp_scales}, sm; add.u32 sc, sc, {s.scales};",
        "add.u32 i, sc, lane;",
    ]
    for n in range(_loads(first)):
        lines.append(f"{_within(first - 32 * n)}st.shared.u8 [i+{32 * n}], b{n};")
    for n in range(_loads(_second_groups(s))):
        guard = _within(_second_groups(s) - 32 * n)
        lines.append(f"{guard}st.shared.u8 [i+{first + 32 * n}], f{n};")
    return lines


def _within(count: int) -> str:
    return f"setp.lt.u32 p, lane, {count}; @p " if count < 32 else ""


def _barriers(s: Joint) -> list[str]:
    return [
        "mov.b32 next, 0; elect.sync i|one, 0xffffffff;",
        *[f"@one mbarrier.init.shared::cta.b64 [bar+{8 * i}], 1;" for i in range(SLOTS)],
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;",
    ]


def _ask(s: Joint, begin: int, end: int) -> list[str]:
    """For some of a warp's first boxes."""
    lines = [f"{PIN} elect.sync i|one, 0xffffffff;"]
    for i in range(begin, min(end, s.all_boxes)):
        lines += _copy(s, f"ring+{BOX * i}", f"bar+{8 * i}", "one")
    return [*lines, PIN]


def _copy(s: Joint, slot: str, full: str, guard: str) -> list[str]:
    """The box whose turn it is to ``slot``, and where the ``next`` one is: of the first half
    further along the inputs, of the second at the end of a tile in the tile below.
    """
    return [
        f"@{guard} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{full}], {BOX};",
        f"@{guard} {COPY} [{slot}], [desc, {{column, row0}}], [{full}];",
        f"add.u32 column, column, {COLUMNS}; setp.ge.u32 q, next, {s.first_boxes};",
        f"setp.eq.and.u32 q, column, edge, q; @q add.u32 row0, row0, {STRIP};",
        "@q mov.b32 column, column1;",
        f"add.u32 next, next, 1; setp.eq.u32 q, next, {s.first_boxes}; @q mov.b64 desc, other;",
        "@q mov.b32 column, column1; @q mov.b32 row0, row1;",
    ]


def _box(s: Joint, label: str) -> list[str]:
    """The box whose turn it is, once it has come; the next in its place."""
    refill = [
        f"{PIN} elect.sync i|one, 0xffffffff; setp.lt.and.u32 p, next, {s.all_boxes}, one;",
        *_copy(s, "slot", "full", "p"),
    ]
    return [
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 got, [full], par; @!got bra {label};",
        *box_ptx.box(1, refill),
        f"add.u32 slot, slot, {BOX}; add.u32 full, full, 8; sub.u32 i, full, bar;",
        f"setp.eq.u32 p, i, {8 * SLOTS}; @p xor.b32 par, par, 1; @p mov.b32 slot, ring;",
        "@p mov.b32 full, bar;",
    ]


def _first_half(s: Joint) -> list[str]:
    """All boxes of the warp, then its sums to shared memory: [warp along the inputs][row][weight
    row of the block].
    """
    groups = GROUPS * s.first_boxes
    lines = [
        "mov.b32 slot, ring; mov.b32 full, bar; mov.b32 par, 0;",
        f"mul.lo.u32 at, kpart, {INPUTS * groups}; mad.lo.u32 at, lane, 16, at;",
        f"add.u32 at, at, sm; mad.lo.u32 pk, kpart, {POWERS * groups}, sm;",
        f"mad.lo.u32 pk, qi, 8, pk; add.u32 pk, pk, {s.powers};",
        *box_ptx.place(),
        *box_ptx.start(1),
        f"mov.b32 left, {s.first_boxes};",
        "FIRST:",
        *_box(s, "FULL"),
        "sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra FIRST;",
        *box_ptx.last(1),
        f"mul.lo.u32 i, kpart, {TOKENS}; mad.lo.u32 i, qi, 2, i; mul.lo.u32 i, i, {s.pitch};",
        f"mad.lo.u32 i, strip, {STRIP}, i; {_own_row('i')} mad.lo.u32 i, i, 4, sm;",
    ]
    for n in range(8):
        at = n % 2 * s.pitch + 8 * (n // 2)
        lines.append(f"st.shared.f32 [i+{s.sums + 4 * at}], acc{n};")
    return lines


def _own_row(name: str) -> str:
    """Adds this thread's first weight row."""
    return (
        f"and.b32 e, gi, 3; mad.lo.u32 {name}, e, 2, {name}; shr.u32 e, gi, 2;"
        f" add.u32 {name}, {name}, e;"
    )


def _exchange(s: Joint) -> list[str]:
    """The first half's outputs, a row and a group of 32 a warp, to memory in the order of inputs;
    the block counts once all of them are there.
    """
    lines = [
        SYNC,
        f"mul.wide.u32 ep, part, {s.part_bytes}; add.s64 ep, ep, $7;",
        "mul.wide.u32 cp, part, 4; add.s64 cp, cp, $5;",
    ]
    for first in range(0, s.rows * s.strips, WARPS):
        label = f"SENT{first}"
        lines += [
            f"add.u32 i, warp, {first}; setp.ge.u32 p, i, {s.rows * s.strips}; @p bra {label};",
            # Row e of activations, group j of the block, then of the part.
            f"{divide('e', 'i', s.strips)} and.b32 j, i, {s.strips - 1};",
            f"mul.lo.u32 i, e, {s.pitch}; mad.lo.u32 i, j, {STRIP}, i; add.u32 i, i, lane;",
            f"mad.lo.u32 i, i, 4, sm; ld.shared.f32 y0, [i+{s.sums}];",
        ]
        for n in range(1, s.warps_k):
            lines.append(f"ld.shared.f32 y1, [i+{s.sums + 4 * n * TOKENS * s.pitch}];")
            lines.append("add.f32 y0, y0, y1;")
        lines += [
            "cvt.rn.bf16.f32 h0, y0;",
            *_raise_outputs(s),
            f"mad.lo.u32 j, rank, {s.strips}, j; mul.lo.u32 i, j, {INPUTS};",
            "mad.lo.u32 i, e, 64, i; mad.lo.u32 i, lane, 2, i; cvt.u64.u32 wide, i;",
            "add.s64 wide, wide, ep; st.global.b16 [wide], h0;",
            f"mul.lo.u32 i, j, {POWERS}; mad.lo.u32 i, e, 4, i; cvt.u64.u32 wide, i;",
            "add.s64 wide, wide, ep; setp.eq.u32 p, lane, 0;",
            f"@p st.global.b32 [wide+{INPUTS * (PART // GROUP)}], z2;",
            f"{label}:",
        ]
    return [
        *lines,
        f"{SYNC} setp.eq.u32 p, tid, 0; @p red.release.gpu.global.add.u32 [cp], 1;",
    ]


def _raise_outputs(s: Joint) -> list[str]:
    """The bf16 h0 of a warp to f16 times a power of two; z2 what undoes it."""
    if s.round:
        # Codes of FP8, whose scale is in z2.
        lines = [*round_outputs(), f"cvt.u32.u16 z0, h0; sub.u32 z1, {INVERSE}, z2;"]
    else:
        lines = [
            "cvt.u32.u16 z0, h0; and.b32 z1, z0, 0x7FFF; redux.sync.max.u32 z1, z1, 0xffffffff;",
            f"shr.u32 z1, z1, 7; sub.u32 z1, {TOP}, z1; min.u32 z1, z1, {HIGHEST};",
            f"shl.b32 z1, z1, 23; sub.u32 z2, {INVERSE}, z1;",
        ]
    return [*lines, "shl.b32 z0, z0, 16; mul.f32 y0, z0, z1; cvt.rn.f16.f32 h0, y0;"]


def _gather(s: Joint) -> list[str]:
    """The part's inputs of the second half, once all its blocks have stored theirs."""
    vectors = s.part_bytes // 16
    lines = [
        "setp.ne.u32 p, tid, 0; @p bra ARRIVED;",
        f"ARRIVE: ld.acquire.gpu.global.b32 i, [cp]; setp.lt.u32 q, i, {BLOCKS}; @q bra ARRIVE;",
        f"ARRIVED: {SYNC}",
        "mul.wide.u32 wide, tid, 16; add.s64 ep, ep, wide; mad.lo.u32 j, tid, 16, sm;",
    ]
    some = [(n, _below(vectors - n * THREADS)) for n in range(-(-vectors // THREADS))]
    for n, guard in some:
        w = vector("w", 4 * n)
        lines.append(f"{guard}ld.global.cg.v4.b32 {w}, [ep+{16 * THREADS * n}];")
    for n, guard in some:
        w = vector("w", 4 * n)
        lines.append(f"{guard}st.shared.v4.b32 [j+{s.middle + 16 * THREADS * n}], {w};")
    return [*lines, SYNC]


def _below(count: int) -> str:
    return f"setp.lt.u32 p, tid, {count}; @p " if count < THREADS else ""


def _second_half(s: Joint) -> list[str]:
    """Tile after tile of 32 outputs, a part of their columns a warp; sums to shared memory: [part
    of the columns][row][output of the block].
    """
    groups, powers = GROUPS * s.tile_boxes, s.middle + INPUTS * (PART // GROUP)
    lines = [
        f"mad.lo.u32 first, half, {INPUTS * groups}, sm; mad.lo.u32 first, lane, 16, first;",
        f"add.u32 first, first, {s.middle}; mad.lo.u32 fk, half, {POWERS * groups}, sm;",
        f"mad.lo.u32 fk, qi, 8, fk; add.u32 fk, fk, {powers};",
        f"mul.lo.u32 put, half, {s.rows}; mad.lo.u32 put, qi, 2, put;",
        f"mul.lo.u32 put, put, {s.put_pitch}; mad.lo.u32 put, side, {s.tiles * STRIP}, put;",
        f"{_own_row('put')} mad.lo.u32 put, put, 4, sm; mov.b32 left, {s.tiles};",
        "SECOND: mov.b32 at, first; mov.b32 pk, fk;",
        *box_ptx.start(1),
    ]
    for n in range(s.tile_boxes):
        lines += _box(s, f"FULL{n}")
    lines += box_ptx.last(1)
    for row in range(2):
        lines.append(f"mad.lo.u32 i, qi, 2, {row}; setp.lt.u32 p, i, {s.rows};")
        for n in range(row, 8, 2):
            at = row * s.put_pitch + 8 * (n // 2)
            lines.append(f"@p st.shared.f32 [put+{4 * at}], acc{n};")
    return [
        *lines,
        f"add.u32 put, put, {4 * STRIP}; sub.u32 left, left, 1; setp.ne.u32 more, left, 0;",
        "@more bra SECOND;",
    ]


def _store(s: Joint) -> list[str]:
    """Sums over all columns of the part, four outputs a thread."""
    each = s.block_outputs // 4  # vectors of a row
    lines = [
        f"{SYNC} mul.lo.u32 i, part, {s.rows}; mul.wide.u32 ep, i, {4 * s.hidden};",
        f"mul.wide.u32 wide, rank, {4 * s.block_outputs}; add.s64 ep, ep, wide;",
        "add.s64 ep, ep, $6;",
    ]
    for first in range(0, s.rows * each, THREADS):
        label = f"KEPT{first}"
        lines += [
            f"add.u32 i, tid, {first}; setp.ge.u32 p, i, {s.rows * each}; @p bra {label};",
            f"div.u32 e, i, {each}; mul.lo.u32 j, e, {each}; sub.u32 j, i, j;",
            f"mul.lo.u32 i, e, {4 * s.put_pitch}; mad.lo.u32 i, j, 16, i; add.u32 i, i, sm;",
            "ld.shared.v4.f32 {acc0,acc1,acc2,acc3}, [i];",
        ]
        for half in range(1, WARPS // SIDES):
            at = 4 * half * s.rows * s.put_pitch
            lines.append(f"ld.shared.v4.f32 {{acc4,acc5,acc6,acc7}}, [i+{at}];")
            lines += [f"add.f32 acc{n}, acc{n}, acc{4 + n};" for n in range(4)]
        lines += [
            f"mul.lo.u32 e, e, {s.hidden}; mad.lo.u32 e, j, 4, e; mul.wide.u32 wide, e, 4;",
            "add.s64 wide, wide, ep; st.global.v4.f32 [wide], {acc0,acc1,acc2,acc3};",
            f"{label}:",
        ]
    return lines
