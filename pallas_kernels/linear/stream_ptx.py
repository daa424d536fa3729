"""The kernel for up to 32 rows as one PTX program: a warp's weights come to its own slots of shared
memory (``box_ptx``), a cluster adds the parts of K.
"""

from pallas_kernels.inline_ptx import f32
from pallas_kernels.linear import box_ptx
from pallas_kernels.linear import stream_rows_ptx as rows_ptx
from pallas_kernels.linear.box_ptx import BOX, COLUMNS, COPY, GROUP, STRIP
from pallas_kernels.linear.fragment_ptx import MEET, PART, PIN, divide, store_four, vector
from pallas_kernels.linear.stream_shape import PITCH, Stream


def program(s: Stream, words: str = "", cluster: str = "", maps: int = -1) -> list[str]:
    """Operands: x, codes and scales of each matrix, outputs, the norm's weight if there is one
    (GMEM), SMEM words, cluster, a tensor map of each matrix's codes; the last three may be named
    instead, maps by the number of the first.
    """
    last = s.operands
    lines = [
        *_registers(s),
        *_place(s, words or f"${last}", cluster or f"${last + 1}"),
        *_matrix(s, last + 2 if maps < 0 else maps),
        *_barriers(s),
        *_ask(s, 0, box_ptx.EARLY),
        *rows_ptx.place(s),
        # Behind all those weights these would come last, and nothing can begin.
        *[line for n in range(rows_ptx.batch(s)) for line in rows_ptx.fetch(s, n, n)],
        *_load_scales(s),
        *(rows_ptx.load_gains(s) if s.norm is not None else []),
        *_ask(s, box_ptx.EARLY, s.slots),
        *(rows_ptx.store_gains(s) if s.norm is not None else []),
        *(["barrier.cluster.wait.acquire;"] if s.sharers > 1 else []),
        *rows_ptx.store(s),
        *_store_scales(s),
        MEET if s.sharers > 1 else rows_ptx.meet(s),
    ]
    lines += _squares(s) if s.norm is not None and s.splits > 1 else []
    return [*lines, "@!busy bra MULTIPLIED;", *_multiply(s), "MULTIPLIED:", *_sum(s)]


def _registers(s: Stream) -> list[str]:
    batch = rows_ptx.batch(s)
    return [
        ".reg .b32 tid, lane, warp, gi, qi, sm, rank, part, sharer, strip, own, n, row0, column;",
        ".reg .b32 ring, bar, slot, full, par, ask, left, spot, undo, gain, group, i, j, e, u;",
        f".reg .b32 t0, t1, y<2>, w<{4 * batch}>, g<{4 * rows_ptx.gain_loads(s)}>;",
        f".reg .b32 b<{_scale_loads(s)}>;",
        ".reg .b64 x, desc, sp, op, xp, wide;",
        f".reg .pred p, busy, one, live, got, more, on<{batch}>;",
        f".reg .f32 up<{batch}>, z<{4 * s.splits}>, lo, hi, glo, ghi, ss;",
        box_ptx.registers(s.eights),
    ]


def _place(s: Stream, smem: str, cluster: str) -> list[str]:
    """``part``: this block's, of K, ``sharer``: which of those that have it. ``strip``: this
    warp's, of all matrices; ``busy``: it has one. ``ring``: its slots.
    """
    started = ["barrier.cluster.arrive.relaxed;"] if s.sharers > 1 else []
    return [
        *started,  # all blocks run before one of them stores to another
        "mov.u32 tid, %tid.x; shr.u32 warp, tid, 5; and.b32 lane, tid, 31;",
        f"shr.u32 gi, lane, 2; and.b32 qi, tid, 3; mov.b32 sm, {smem}; mov.b64 x, $0;",
        f"mov.u32 rank, %cluster_ctarank; {divide('part', 'rank', s.sharers)}",
        f"and.b32 sharer, rank, {s.sharers - 1}; mad.lo.u32 strip, {cluster}, {s.sharers}, sharer;",
        f"mad.lo.u32 strip, strip, {s.strips}, warp;",
        f"setp.lt.u32 busy, warp, {s.strips};",
        f"setp.lt.and.u32 busy, strip, {s.first_strips[-1]}, busy;",
        f"mul.lo.u32 column, part, {s.groups * GROUP};",
        f"add.u32 ring, sm, {s.bars + 8 * s.strips * s.slots + 1023};",
        f"and.b32 ring, ring, 0xFFFFFC00; mad.lo.u32 ring, warp, {s.slots * BOX}, ring;",
        f"mad.lo.u32 bar, warp, {8 * s.slots}, sm; add.u32 bar, bar, {s.bars};",
    ]


def _matrix(s: Stream, maps: int) -> list[str]:
    """Whose strip it is: ``desc``, ``sp`` and ``op``, its map, scales and results, ``n`` its rows,
    ``own`` the number of the strip there.
    """
    count = len(s.outputs)
    lines = [
        f"mov.b64 desc, ${maps}; mov.b64 sp, $2; mov.b64 op, ${1 + 2 * count};",
        f"mov.b32 n, {s.outputs[0]}; mov.b32 i, 0;",
    ]
    for m in range(1, count):
        first = s.first_strips[m]
        lines += [
            f"setp.ge.u32 p, strip, {first}; selp.b32 n, {s.outputs[m]}, n, p;",
            f"selp.b32 i, {first}, i, p; selp.b64 desc, ${maps + m}, desc, p;",
            f"selp.b64 sp, ${2 + 2 * m}, sp, p; selp.b64 op, ${1 + 2 * count + m}, op, p;",
        ]
    return [*lines, f"sub.u32 own, strip, i; mul.lo.u32 row0, own, {STRIP};"]


def _copy(slot: str, full: str, guard: str) -> list[str]:
    """The box at ``column`` to ``slot``; ``column`` goes on."""
    return [
        f"@{guard} mbarrier.arrive.expect_tx.shared::cta.b64 _, [{full}], {BOX};",
        f"@{guard} {COPY} [{slot}], [desc, {{column, row0}}], [{full}];",
        f"add.u32 column, column, {COLUMNS};",
    ]


def _barriers(s: Stream) -> list[str]:
    count = min(s.slots, s.boxes)
    return [
        "elect.sync i|one, 0xffffffff; @!busy bra READY;",
        *[f"@one mbarrier.init.shared::cta.b64 [bar+{8 * i}], 1;" for i in range(count)],
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; READY:",
    ]


def _ask(s: Stream, begin: int, end: int) -> list[str]:
    """For some of a warp's first boxes."""
    end, label = min(end, s.boxes), f"ASKED{begin}_{end}"
    lines = [f"{PIN} elect.sync i|one, 0xffffffff; @!busy bra {label};"]
    lines.append(f"add.u32 column, column, {begin * COLUMNS};")
    for i in range(begin, end):
        lines += _copy(f"ring+{BOX * i}", f"bar+{8 * i}", "one")
    return [*lines, f"sub.u32 column, column, {max(begin, end) * COLUMNS};", f"{label}: {PIN}"]


def _scale_loads(s: Stream) -> int:
    return -(-s.groups // 32)


def _load_scales(s: Stream) -> list[str]:
    """A warp's, a group a lane and register; 0 past the end of K."""
    lines = [
        f"shr.u32 i, column, 5; add.u32 i, i, lane; mad.lo.u32 e, own, {s.k // GROUP}, i;",
        "cvt.u64.u32 wide, e; add.s64 wide, wide, sp;",
    ]
    for n in range(_scale_loads(s)):
        lines += [
            f"mov.b32 b{n}, 0; add.u32 j, i, {32 * n};",
            f"setp.lt.and.u32 p, j, {s.k // GROUP}, busy;",
            f"add.u32 j, lane, {32 * n}; setp.lt.and.u32 p, j, {s.groups}, p;",
            f"@p ld.global.u8 b{n}, [wide+{32 * n}];",
        ]
    return lines


def _store_scales(s: Stream) -> list[str]:
    lines = [
        f"mad.lo.u32 sc, warp, {s.groups}, sm; add.u32 sc, sc, {s.scales};",
        "add.u32 e, sc, lane;",
    ]
    for n in range(_scale_loads(s)):
        lines += [
            f"add.u32 j, lane, {32 * n}; setp.lt.and.u32 p, j, {s.groups}, busy;",
            f"@p st.shared.u8 [e+{32 * n}], b{n};",
        ]
    return lines


def _squares(s: Stream) -> list[str]:
    """Sums of all addends, for the other blocks."""
    at = s.squares + 4 * s.span * s.addends
    return [
        f"setp.ge.u32 p, tid, {s.rows}; @p bra SQUARES;",
        *rows_ptx.total(s, "tid"),
        f"st.shared.f32 [i+{at}], ss; SQUARES:",
    ]


def _multiply(s: Stream) -> list[str]:
    """All boxes of the warp, then its sums to its first slots: [row of x][weight row]."""
    return [
        f"mov.b32 slot, ring; mov.b32 full, bar; mov.b32 par, 0; mov.b32 left, {s.boxes};",
        f"mov.b32 ask, {max(0, s.boxes - s.slots)};",
        f"add.u32 column, column, {s.slots * COLUMNS}; mad.lo.u32 at, lane, 16, sm;",
        f"mad.lo.u32 pk, qi, 8, sm; add.u32 pk, pk, {s.powers};",
        *box_ptx.place(),
        *box_ptx.start(s.eights),
        "NEXT: mbarrier.try_wait.parity.shared::cta.b64 got, [full], par; @!got bra NEXT;",
        *box_ptx.box(s.eights, _refill() if s.slots < s.boxes else []),
        f"add.u32 slot, slot, {BOX}; add.u32 full, full, 8; sub.u32 i, full, bar;",
        f"setp.eq.u32 p, i, {8 * s.slots}; @p xor.b32 par, par, 1; @p mov.b32 slot, ring;",
        "@p mov.b32 full, bar; sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra NEXT;",
        *box_ptx.last(s.eights),
        *_stash(s),
    ]


def _refill() -> list[str]:
    """All codes of the slot are in registers: the next box may come there."""
    return [
        f"{PIN} elect.sync i|one, 0xffffffff; setp.ne.and.u32 p, ask, 0, one;",
        *_copy("slot", "full", "p"),
        "setp.ne.u32 p, ask, 0; @p sub.u32 ask, ask, 1;",
    ]


def _stash(s: Stream) -> list[str]:
    lines = [
        f"{PIN} and.b32 i, gi, 3; shr.u32 j, gi, 2; mad.lo.u32 i, i, 2, j;",
        f"mad.lo.u32 i, qi, {2 * PITCH}, i; mad.lo.u32 i, i, 4, ring;",
    ]
    for n in range(8 * s.eights):
        e, m, i = n // 8, n // 4 % 2, n % 4
        row = 8 * e + i % 2
        if row < s.rows:
            at = row * PITCH + 16 * m + 8 * (i // 2)
            lines.append(f"mad.lo.u32 j, qi, 2, {row}; setp.lt.u32 p, j, {s.rows};")
            lines.append(f"@p st.shared.f32 [i+{4 * at}], acc{n};")
    return lines


def _sum(s: Stream) -> list[str]:
    """Eight lanes a row of x; each block of the cluster takes four rows in its turn."""
    lines = [MEET if s.splits > 1 else PIN, "@!busy bra STORED;"]
    lines += ["shr.u32 e, lane, 3; mad.lo.u32 e, part, 4, e; and.b32 group, lane, 7;"]
    for first in range(0, s.rows, 4 * s.splits):
        lines += [
            f"add.u32 j, e, {first}; setp.ge.u32 p, j, {s.rows}; @p bra S{first};",
            f"mad.lo.u32 at, j, {4 * PITCH}, ring; mad.lo.u32 at, group, 16, at;",
            *_read(s),
            *[f"add.f32 z{c}, z{c}, z{4 * r + c};" for r in range(1, s.splits) for c in range(4)],
            *(_normed(s) if s.norm is not None else []),
            "mul.lo.u32 i, j, n; add.u32 i, i, row0; mad.lo.u32 i, group, 4, i;",
            f"mul.wide.u32 wide, i, {4 if s.wide else 2}; add.s64 wide, wide, op;",
            *store_four(s.wide, "z"),
            f"S{first}:",
        ]
    # A block's sums are read until all have come here.
    return [*lines, "STORED:", *([PART] if s.splits > 1 else [])]


def _read(s: Stream) -> list[str]:
    if s.splits == 1:
        return [f"ld.shared.v4.f32 {vector('z', 0)}, [at];"]
    lines = []
    for r in range(s.splits):
        lines.append(f"add.u32 u, sharer, {r * s.sharers}; mapa.shared::cluster.u32 u, at, u;")
        lines.append(f"ld.shared::cluster.v4.f32 {vector('z', 4 * r)}, [u];")
    return lines


def _normed(s: Stream) -> list[str]:
    """The sums of row j over its size."""
    lines, at = rows_ptx.total(s, "j"), s.squares + 4 * s.span * s.addends
    if s.splits > 1:
        lines = ["mad.lo.u32 i, j, 4, sm; mov.f32 ss, 0f00000000;"]
        for r in range(s.splits):
            lines.append(f"add.u32 u, sharer, {r * s.sharers}; mapa.shared::cluster.u32 u, i, u;")
            lines.append(f"ld.shared::cluster.f32 lo, [u+{at}]; add.f32 ss, ss, lo;")
    lines.append(
        f"fma.rn.f32 ss, ss, {f32(1 / s.k)}, {f32(s.norm or 0)}; rsqrt.approx.ftz.f32 ss, ss;"
    )
    return [*lines, *[f"mul.f32 z{c}, z{c}, ss;" for c in range(4)]]
