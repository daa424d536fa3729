"""The kernel for up to 32 rows as one PTX program: a warp's weights come to its own slots of shared
memory (``box_ptx``), a cluster adds the parts of K.
"""

from pallas_kernels.inline_ptx import f32
from pallas_kernels.linear import box_ptx
from pallas_kernels.linear.box_ptx import BOX, COLUMNS, COPY, GROUP, STRIP
from pallas_kernels.linear.fragment_ptx import MEET, PART, PIN, divide, store_four, vector
from pallas_kernels.linear.stream_shape import PITCH, Stream

BATCH = 20  # loads of x that a thread has on their way


def program(s: Stream, words: str = "", cluster: str = "", maps: int = -1) -> list[str]:
    """Operands: x, codes and scales of each matrix, outputs, the norm's weight if there is one
    (GMEM), SMEM words, cluster, a tensor map of each matrix's codes; the last three may be named
    instead, maps by the number of the first.
    """
    last = operands(s)
    lines = [
        *_registers(s),
        *_place(s, words or f"${last}", cluster or f"${last + 1}"),
        *_matrix(s, last + 2 if maps < 0 else maps),
        *_barriers(s),
        *_ask(s, 0, box_ptx.EARLY),
        *_rows(s),
        # Behind all those weights these would come last, and nothing can begin.
        *[line for n in range(_batch(s)) for line in _fetch(s, n, n)],
        *_load_scales(s),
        *(_load_gains(s) if s.norm is not None else []),
        *_ask(s, box_ptx.EARLY, s.slots),
        *(_store_gains(s) if s.norm is not None else []),
        *(["barrier.cluster.wait.acquire;"] if s.sharers > 1 else []),
        *_inputs(s),
        *_store_scales(s),
        MEET if s.sharers > 1 else _meet(s),
    ]
    lines += _squares(s) if s.norm is not None and s.splits > 1 else []
    return [*lines, "@!busy bra MULTIPLIED;", *_multiply(s), "MULTIPLIED:", *_sum(s)]


def _meet(s: Stream) -> str:
    return f"barrier.sync 0, {s.threads};"


def operands(s: Stream) -> int:
    """How many of them are GMEM."""
    return 1 + 3 * len(s.outputs) + (s.norm is not None)


def _registers(s: Stream) -> list[str]:
    batch = _batch(s)
    return [
        ".reg .b32 tid, lane, warp, gi, qi, sm, rank, part, sharer, strip, own, n, row0, column;",
        ".reg .b32 ring, bar, slot, full, par, ask, left, spot, undo, gain, group, i, j, e, u;",
        f".reg .b32 t0, t1, y<2>, w<{4 * batch}>, g<{4 * _gain_loads(s)}>, b<{_scale_loads(s)}>;",
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


def _passes(s: Stream) -> int:
    return -(-s.groups // s.abreast)


def _batch(s: Stream) -> int:
    return min(_passes(s), BATCH)


def _rows(s: Stream) -> list[str]:
    """Four threads take a group of a row: where x has it, ``xp``, and the block, ``spot``."""
    shift = s.span.bit_length() - 1
    return [
        f"shr.u32 e, tid, 2; shr.u32 group, e, {shift}; and.b32 e, e, {s.span - 1};",
        f"mad.lo.u32 group, sharer, {s.abreast // s.sharers}, group;",
        f"setp.lt.u32 live, e, {s.rows}; mad.lo.u32 i, group, {8 * s.eights}, e;",
        "mad.lo.u32 spot, i, 64, sm; mad.lo.u32 spot, qi, 16, spot;",
        f"mad.lo.u32 undo, i, 4, sm; mad.lo.u32 j, group, {GROUP}, column;",
        f"mad.lo.u32 j, qi, 8, j; mul.wide.u32 xp, j, 2; mul.wide.u32 wide, e, {2 * s.k};",
        "add.s64 xp, xp, wide; add.s64 xp, xp, x;",
    ]


def _fetch(s: Stream, n: int, i: int) -> list[str]:
    """The n-th load of x, zeros past the end of K; ``on``: the group is of this part."""
    inside, at = (n + 1) * s.abreast <= s.groups, 64 * s.abreast * n
    lines = [
        f"add.u32 j, group, {n * s.abreast};",
        f"mov.pred on{i}, live;" if inside else f"setp.lt.and.u32 on{i}, j, {s.groups}, live;",
    ]
    guard = f"on{i}"
    if not s.exact:
        lines += [f"mov.b32 w{4 * i + m}, 0;" for m in range(4)]
        lines.append(f"mad.lo.u32 j, j, {GROUP}, column; setp.lt.and.u32 p, j, {s.k}, on{i};")
        guard = "p"
    return [*lines, f"@{guard} ld.global.v4.b32 {vector('w', 4 * i)}, [xp+{at}];"]


def _gain_loads(s: Stream) -> int:
    return -(-GROUP * s.groups // (8 * s.threads))


def _load_gains(s: Stream) -> list[str]:
    """The norm's weight, eight columns a thread and load; 0 past the end of K."""
    lines = [
        f"mad.lo.u32 j, tid, 8, column; mul.wide.u32 wide, j, 2;"
        f" add.s64 wide, wide, ${operands(s) - 1};"
    ]
    for n in range(_gain_loads(s)):
        lines += [f"mov.b32 g{4 * n + m}, 0;" for m in range(4)]
        lines += [
            f"add.u32 i, j, {8 * s.threads * n}; setp.lt.u32 p, i, {s.k};",
            f"add.u32 i, tid, {s.threads * n}; setp.lt.and.u32 p, i, {4 * s.groups}, p;",
            f"@p ld.global.v4.b32 {vector('g', 4 * n)}, [wide+{16 * s.threads * n}];",
        ]
    return lines


def _store_gains(s: Stream) -> list[str]:
    lines = ["mad.lo.u32 j, tid, 16, sm;"]
    for n in range(_gain_loads(s)):
        lines += [
            f"add.u32 i, tid, {s.threads * n}; setp.lt.u32 p, i, {4 * s.groups};",
            f"@p st.shared.v4.b32 [j+{s.gains + 16 * s.threads * n}], {vector('g', 4 * n)};",
        ]
    return [
        *lines,
        "mad.lo.u32 gain, group, 64, sm; mad.lo.u32 gain, qi, 16, gain; mov.f32 ss, 0f00000000;",
        _meet(s),
    ]


def _inputs(s: Stream) -> list[str]:
    """All of this part's x to shared memory, as threads will load it: [group][row][64 bytes]."""
    lines, passes, batch = [], _passes(s), _batch(s)
    for first in range(0, passes, batch):
        some = range(first, min(first + batch, passes))
        for n in some if first else ():
            lines += _fetch(s, n, n - first)
        for n in some:
            lines += _keep(s, n, n - first)
    return [*lines, *(_store_squares(s) if s.norm is not None else [])]


def _keep(s: Stream, n: int, i: int) -> list[str]:
    """What ``_fetch`` loaded, as f16 times a power of two, and what undoes it."""
    place = n * s.abreast * 8 * s.eights  # of a row of a group
    return [
        *(_weighed(s, n, i) if s.norm is not None else []),
        *box_ptx.raise_group(i),
        f"setp.eq.and.u32 p, qi, 0, on{i};",
        *_send(s, "p", "b32", "undo", s.powers + 4 * place, "t0"),
        *box_ptx.to_halves(i),
        *_send(s, f"on{i}", "v4.b32", "spot", 64 * place, vector("w", 4 * i)),
    ]


def _send(s: Stream, guard: str, kind: str, base: str, at: int, value: str) -> list[str]:
    """A store to this place of all sharers."""
    if s.sharers == 1:
        return [f"@{guard} st.shared.{kind} [{base}+{at}], {value};"]
    lines = []
    for n in range(s.sharers):
        lines += [
            f"mad.lo.u32 j, part, {s.sharers}, {n}; mapa.shared::cluster.u32 j, {base}, j;",
            f"@{guard} st.shared::cluster.{kind} [j+{at}], {value};",
        ]
    return lines


def _weighed(s: Stream, n: int, i: int) -> list[str]:
    """x times the norm's weight in its place; ss += x's squares."""
    lines = [f"@on{i} ld.shared.v4.b32 {vector('g', 0)}, [gain+{s.gains + 64 * s.abreast * n}];"]
    for m in range(4 * i, 4 * i + 4):
        lines += [
            f"shl.b32 lo, w{m}, 16; and.b32 hi, w{m}, 0xFFFF0000;",
            f"shl.b32 glo, g{m % 4}, 16; and.b32 ghi, g{m % 4}, 0xFFFF0000;",
            f"@on{i} fma.rn.f32 ss, lo, lo, ss; @on{i} fma.rn.f32 ss, hi, hi, ss;",
            f"mul.f32 lo, lo, glo; mul.f32 hi, hi, ghi; cvt.rn.bf16x2.f32 w{m}, hi, lo;",
        ]
    return lines


def _store_squares(s: Stream) -> list[str]:
    """A row's sum over the groups that a quad took, or all quads of a warp."""
    lines, lanes = [], [1, 2, *(4 << n for n in range(3) if s.span <= 1 << n)]
    for n in lanes:
        lines.append(f"shfl.sync.bfly.b32 lo, ss, {n}, 31, 0xffffffff; add.f32 ss, ss, lo;")
    return [
        *lines,
        f"shr.u32 e, tid, 2; {divide('i', 'e', max(8, s.span))} and.b32 j, e, {s.span - 1};",
        f"and.b32 e, e, {max(8, s.span) - 1}; setp.eq.u32 p, qi, 0;",
        f"setp.lt.and.u32 p, e, {s.span}, p; mad.lo.u32 i, sharer, {s.addends // s.sharers}, i;",
        f"mad.lo.u32 i, i, {s.span}, j; mad.lo.u32 i, i, 4, sm;",
        *_send(s, "p", "f32", "i", s.squares, "ss"),
    ]


def _total(s: Stream, row: str) -> list[str]:
    """ss: the sum of a row's addends."""
    lines = [f"mad.lo.u32 i, {row}, 4, sm; mov.f32 ss, 0f00000000;"]
    for n in range(s.addends):
        lines.append(f"ld.shared.f32 lo, [i+{s.squares + 4 * s.span * n}]; add.f32 ss, ss, lo;")
    return lines


def _squares(s: Stream) -> list[str]:
    """Sums of all addends, for the other blocks."""
    at = s.squares + 4 * s.span * s.addends
    return [
        f"setp.ge.u32 p, tid, {s.rows}; @p bra SQUARES;",
        *_total(s, "tid"),
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
    lines, at = _total(s, "j"), s.squares + 4 * s.span * s.addends
    if s.splits > 1:
        lines = ["mad.lo.u32 i, j, 4, sm; mov.f32 ss, 0f00000000;"]
        for r in range(s.splits):
            lines.append(f"add.u32 u, sharer, {r * s.sharers}; mapa.shared::cluster.u32 u, i, u;")
            lines.append(f"ld.shared::cluster.f32 lo, [u+{at}]; add.f32 ss, ss, lo;")
    lines.append(
        f"fma.rn.f32 ss, ss, {f32(1 / s.k)}, {f32(s.norm or 0)}; rsqrt.approx.ftz.f32 ss, ss;"
    )
    return [*lines, *[f"mul.f32 z{c}, z{c}, ss;" for c in range(4)]]
