"""The attention kernel for lists of several tiles, one block a row, as PTX: each score once.

The two consuming warpgroups take tiles in turn: one multiplies a tile's scores and shares their
probabilities and maxima through shared memory, both add their 256 output dims of it. While one is
at its softmax, the other has the tensor cores. A block takes every ``grid``-th row: the producing
warpgroup looks up and fills the next row's first tiles while the others finish theirs. Tile g of a
block has stage, warpgroup, probabilities and maxima g % 2, and the phase g / 2 % 2 of its barriers.
"""

import math

from pallas_kernels.inline_ptx import f32
from pallas_kernels.sparse_attention.attend_ptx import (
    HIGH,
    LOG2E,
    NAMES,
    fetch_queries,
    place_queries,
    thread,
)
from pallas_kernels.sparse_attention.attend_ptx import score as scores
from pallas_kernels.sparse_attention.attend_shape import (
    BARRIER_ALL,
    CONSUMERS,
    MAX_HEADS,
    PRODUCERS,
    QUERY_BYTES,
    THREADS,
    WIDTH,
    Seesaw,
)
from pallas_kernels.sparse_attention.rows_ptx import registers as row_registers
from pallas_kernels.sparse_attention.seesaw_end_ptx import MEET, finish, store
from pallas_kernels.sparse_attention.seesaw_rows_ptx import produce

# 2 x 200 + 104 = 3 x 168
CONSUMING, PRODUCING = 200, 104
FIRST_MAXIMUM = -1e30
AFTER = WIDTH // 8  # registers of the next row's queries, behind those of outputs on their way out


def program(s: Seesaw) -> list[str]:
    """Operands: NAMES (GMEM), SMEM bytes, block, 0."""
    start = f"mov.b32 row, ${len(NAMES) + 1}; mov.b32 g, 0; mov.b32 book, sm;"
    start += "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; setp.eq.u32 leader, lane, 0;"
    lines = [
        *_registers(s),
        *[f"mov.b64 {name}, ${i};" for i, name in enumerate(NAMES)],
        f"mov.b32 sm, ${len(NAMES)}; mov.u32 tid, %tid.x; shr.u32 wg, tid, 7;",
        "setp.ne.u32 p, tid, 0; @p bra READY;",
        *_barriers(s),
        "and.b32 a, sm, 1023; setp.ne.u32 p, a, 0; @p trap;",
        f"READY: bar.warp.sync 0xffffffff; barrier.sync {BARRIER_ALL}, {THREADS};",
        "setp.eq.u32 p, wg, 2; @p bra PRODUCE;",
        f"setmaxnreg.inc.sync.aligned.u32 {CONSUMING};",
        start,
        *_descriptors(s),
        *fetch_queries(s, "row", "row", AFTER),
        "ROW:",
        *_ahead(s),
        *place_queries(s, AFTER),
        *_begin(s),
        *_tiles(s),
        *finish(s),
        f"add.u32 head, row, {s.grid}; min.u32 head, head, {s.rows - 1};",
        *fetch_queries(s, "head", "head", AFTER),
        *store(s),
        *next_book(s),
        f"add.u32 row, row, {s.grid}; setp.lt.u32 p, row, {s.rows}; @p bra ROW;",
        "bra DONE;",
        f"PRODUCE: setmaxnreg.dec.sync.aligned.u32 {PRODUCING};",
        f"{start} mov.b32 split, ${len(NAMES) + 2}; and.b32 t, tid, 127; shr.u32 warp, t, 5;",
        *produce(s),
        "DONE:",
    ]
    return [line for text in lines for line in text.strip().splitlines() if line]


def next_book(s: Seesaw) -> list[str]:
    return [
        f"add.u32 book, book, {s.book_bytes}; add.u32 a, sm, {3 * s.book_bytes};",
        "setp.ge.u32 p, book, a; @p mov.b32 book, sm;",
    ]


def _barriers(s: Seesaw) -> list[str]:
    counts = ((s.full, PRODUCERS // 32), (s.empty, CONSUMERS // 32), (s.ready, CONSUMERS // 64))
    return [
        f"mbarrier.init.shared::cta.b64 [sm+{first + 8 * i}], {count};"
        for first, count in counts
        for i in range(2)
    ]


def _registers(s: Seesaw) -> list[str]:
    return [
        f".reg .b64 {','.join(NAMES)},q64,da,db,src;",
        ".reg .b32 sm,row,query,split,tid,wg,lane,warp,request,a,b,c,d,x<4>,w<4>;",
        ".reg .pred p,leader,yes,no,more,turns,free,moved,kept;",
        f".reg .b32 o<{WIDTH // 4}>,s<{s.tile // 2}>,alpha0,alpha1,new0,new1;",
        ".reg .b32 m0_,m1_,l0,l1,mx0,mx1,g,end,book,ql,kl,vl,pl,left,right,high;",
        ".reg .b32 quad,gr,place,parity,ahead,away,fb,masks,seen;",
        ".reg .b32 cs<4>,sn<4>,qc<4>,qs<4>;",
        ".reg .b32 even,odd,turned0,turned1,spread,sink0,sink1,inv0,inv1,head;",
        *row_registers(s),
    ]


def _descriptors(s: Seesaw) -> list[str]:
    """ql, kl: queries and this warpgroup's stage; vl, pl of its 256 dims and probabilities."""

    def low(name: str, leading: int) -> str:
        return (
            f"shr.u32 {name}, {name}, 4; and.b32 {name}, {name}, 0x3FFF;"
            f"or.b32 {name}, {name}, {leading << 16:#x};"
            f"shfl.sync.idx.b32 {name}, {name}, 0, 31, 0xffffffff;"
        )

    return [
        f"setp.eq.u32 yes, tid, tid; setp.ne.u32 no, tid, tid; mov.b32 high, {HIGH:#x};",
        f"mov.b32 ql, sm; {low('ql', 1)}",
        f"mad.lo.u32 kl, wg, {s.stage_bytes}, sm; add.u32 kl, kl, {QUERY_BYTES}; {low('kl', 1)}",
    ]


def _ahead(s: Seesaw) -> list[str]:
    """Queries and entries of the block's next row to L2."""
    if s.rows <= s.grid or s.selected % 4:
        return []
    lines = [
        "mov.u32 tid, %tid.x;",
        f"add.u32 a, row, {s.grid}; setp.lt.u32 p, a, {s.rows}; setp.eq.and.u32 p, tid, 0, p;",
    ]
    for name, size in (("queries", 2 * WIDTH * s.heads), ("selected", 4 * s.selected)):
        if size:
            lines += [
                f"mul.wide.u32 q64, a, {size}; add.s64 src, {name}, q64; mov.b32 b, {size};",
                "@p cp.async.bulk.prefetch.L2.global [src], b;",
            ]
    return lines


def _begin(s: Seesaw) -> list[str]:
    """Queries are there for all; the first tile of the row, and with it the list, too."""
    return [
        f"fence.proxy.async.shared::cta; {MEET}",
        *thread(),
        "and.b32 a, g, 1; shl.b32 a, a, 3; add.u32 a, a, sm; bfe.u32 parity, g, 1, 1;",
        *wait("a", s.full, "LISTED"),
        f"ld.shared.v4.b32 {{x0,x1,x2,x3}}, [book+{s.used}];",
        "max.u32 x0, x0, x1; max.u32 x2, x2, x3; max.u32 end, x0, x2;",
        f"add.u32 end, end, {s.tile - 1};",
        f"shr.u32 end, end, {s.tile.bit_length() - 1}; max.u32 end, end, 1; add.u32 end, end, g;",
        # A warpgroup's tiles: the first or the second, then every other one.
        f"xor.b32 a, g, wg; and.b32 a, a, 1; mad.lo.u32 masks, a, {4 * s.tile}, book;",
        f"mad.lo.u32 masks, quad, 8, masks; add.u32 masks, masks, {s.list};",
        "mov.b32 l0, 0; mov.b32 l1, 0;",
        f"mov.b32 m0_, {f32(FIRST_MAXIMUM)}; mov.b32 m1_, m0_; setp.ne.u32 kept, tid, tid;",
        *[f"mov.b32 o{i}, 0;" for i in range(WIDTH // 4)],
    ]


def wait(at: str, barrier: int, label: str, parity: str = "parity") -> list[str]:
    return [
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 free, [{at}+{barrier}], {parity};",
        f"@!free bra {label};",
    ]


def _release(s: Seesaw, wg: str) -> str:
    """The stage of a tile of this (wg) or of the other warpgroup (away)."""
    return f"mad.lo.u32 fb, {wg}, 8, sm; @leader mbarrier.arrive.shared::cta.b64 _, [fb+{s.empty}];"


def _tiles(s: Seesaw) -> list[str]:
    """Tiles of the other warpgroup and of this one in turn: its probabilities, whose stage is then
    free, before this one's next scores. Whichever could go first was measured to be no faster.
    """
    mine = "mad.lo.u32 b, wg, 8, sm; add.u32 c, g, 1; bfe.u32 ahead, c, 1, 1;"
    commit = "wgmma.commit_group.sync.aligned;"
    return [
        "xor.b32 away, wg, 1; and.b32 a, g, 1; setp.ne.u32 p, a, wg; @p bra OTHER;",
        # The row's first tile, which is there.
        *scores(s),
        f"{commit} wgmma.wait_group.sync.aligned 0; bra SOFTMAX;",
        "OTHER:",
        *_other_maximum(s),
        *_values(s, "away"),
        f"{commit} add.u32 c, g, 1; setp.ge.u32 p, c, end; @p bra LAST;",
        mine,
        *wait("b", s.full, "FILLED", "ahead"),
        *scores(s),
        f"{commit} wgmma.wait_group.sync.aligned 1;",
        _release(s, "away"),
        "wgmma.wait_group.sync.aligned 0; add.u32 g, g, 1;",
        "SOFTMAX:",
        *_softmax(s),
        *_values(s, "wg"),
        f"{commit} wgmma.wait_group.sync.aligned 0;",
        _release(s, "wg"),
        "add.u32 g, g, 1; setp.lt.u32 p, g, end; @p bra OTHER;",
        "bra FINISH;",
        "LAST: wgmma.wait_group.sync.aligned 0; add.u32 g, g, 1;",
        _release(s, "away"),
        "FINISH:",
    ]


def _scale_outputs() -> list[str]:
    return [f"mul.f32 o{i}, o{i}, alpha{i // 2 % 2};" for i in range(WIDTH // 4)]


def _other_maximum(s: Seesaw) -> list[str]:
    """Wait for the other warpgroup's probabilities; o and l to their maximum."""
    return [
        "mad.lo.u32 a, away, 8, sm; bfe.u32 parity, g, 1, 1;",
        *wait("a", s.ready, "SHARED"),
        f"mad.lo.u32 a, away, {4 * MAX_HEADS}, sm; mad.lo.u32 a, warp, 64, a;",
        "mad.lo.u32 a, gr, 4, a;",
        f"ld.shared.b32 new0, [a+{s.maxima}]; ld.shared.b32 new1, [a+{s.maxima + 32}];",
        "setp.ne.f32 p, new0, m0_; setp.ne.or.f32 p, new1, m1_, p;",
        "vote.sync.any.pred p, p, 0xffffffff; and.pred p, p, kept; @!p bra SAME;",
        *_decay(),
        *_scale_outputs(),
        "SAME: mov.b32 m0_, new0; mov.b32 m1_, new1;",
    ]


def _decay() -> list[str]:
    return [
        line
        for h in range(2)
        for line in (
            f"sub.f32 alpha{h}, m{h}_, new{h}; ex2.approx.ftz.f32 alpha{h}, alpha{h};",
            f"mul.f32 l{h}, l{h}, alpha{h};",
        )
    ]


def _values(s: Seesaw, of: str) -> list[str]:
    """o += probabilities of a tile of this (wg) or of the other warpgroup (away) x this one's dims
    of its rows.
    """
    acc = "{" + ",".join(f"o{i}" for i in range(WIDTH // 4)) + "}"
    one = "shr.u32 {n}, {n}, 4; and.b32 {n}, {n}, 0x3FFF; or.b32 {n}, {n}, {lead:#x};"
    one += "shfl.sync.idx.b32 {n}, {n}, 0, 31, 0xffffffff;"
    lines = [
        f"mad.lo.u32 vl, {of}, {s.stage_bytes}, sm; add.u32 vl, vl, {QUERY_BYTES};",
        f"mad.lo.u32 vl, wg, {4 * 128 * s.tile}, vl;",
        # Blocks of 64 dims are 128 bytes a row apart.
        one.format(n="vl", lead=8 * s.tile << 16),
        f"mad.lo.u32 pl, {of}, {2 * MAX_HEADS * s.tile}, sm; add.u32 pl, pl, {s.probabilities};",
        one.format(n="pl", lead=1 << 16),
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(s.tile // 16):
        lines += [
            f"add.u32 left, pl, {2 * step}; mov.b64 da, {{left,high}};",
            f"add.u32 right, vl, {128 * step}; mov.b64 db, {{right,high}};",
            f"wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {acc}, da, db, "
            "yes, 1, 1, 0, 1;",
        ]
    return [*lines, "setp.eq.u32 kept, tid, tid;"]


def _softmax(s: Seesaw) -> list[str]:
    """Scores of tile g, masked, to probabilities in shared memory; o and l to a new maximum."""
    scale, columns = f32(LOG2E * WIDTH**-0.5), range(s.tile // 8)
    lines = [
        f"mov.b32 mx0, {f32(-math.inf)}; mov.b32 mx1, mx0; mov.b32 d, mx0;",
    ]
    for j in columns:
        lines.append(f"ld.shared.v2.b32 {{b,c}}, [masks+{32 * j}];")
        for i, name in enumerate("bc"):
            lines.append(f"setp.lt.s32 p, {name}, 0;")
            for h in range(2):
                r = f"s{4 * j + 2 * h + i}"
                lines.append(f"@p mov.b32 {r}, d; max.f32 mx{h}, mx{h}, {r};")
    for lanes in (1, 2):
        for h in range(2):
            lines += [
                f"shfl.sync.bfly.b32 x{h}, mx{h}, {lanes}, 31, 0xffffffff;",
                f"max.f32 mx{h}, mx{h}, x{h};",
            ]
    for h in range(2):
        lines += [
            f"mul.f32 mx{h}, mx{h}, {scale}; add.f32 a, m{h}_, {f32(8.0)};",
            f"setp.gt.f32 p, mx{h}, a; selp.b32 new{h}, mx{h}, m{h}_, p;",
        ]
    lines += [
        f"mad.lo.u32 head, warp, 16, gr; mad.lo.u32 a, wg, {4 * MAX_HEADS}, sm;",
        "mad.lo.u32 a, head, 4, a; setp.eq.u32 p, quad, 0;",
        f"@p st.shared.b32 [a+{s.maxima}], new0; @p st.shared.b32 [a+{s.maxima + 32}], new1;",
        f"mad.lo.u32 place, wg, {2 * MAX_HEADS * s.tile}, sm; mad.lo.u32 place, head, 128, place;",
        "mad.lo.u32 place, gr, 16, place; mad.lo.u32 place, quad, 4, place;",
        "setp.ne.f32 moved, new0, m0_; setp.ne.or.f32 moved, new1, m1_, moved;",
        "vote.sync.any.pred moved, moved, 0xffffffff; and.pred moved, moved, kept;",
        *_decay(),
        "mov.b32 m0_, new0; mov.b32 m1_, new1; neg.f32 new0, new0; neg.f32 new1, new1;",
    ]
    for j in columns:
        for i in range(4):
            r, h = f"s{4 * j + i}", i // 2
            lines += [
                f"fma.rn.f32 {r}, {r}, {scale}, new{h}; ex2.approx.ftz.f32 {r}, {r};",
                f"add.f32 l{h}, l{h}, {r};",
            ]
        lines.append(f"xor.b32 c, place, {16 * j};")
        for h in range(2):
            lines += [
                f"cvt.rn.bf16x2.f32 d, s{4 * j + 2 * h + 1}, s{4 * j + 2 * h};",
                f"st.shared.b32 [c+{s.probabilities + 1024 * h}], d;",
            ]
    return [
        *lines,
        f"add.u32 masks, masks, {8 * s.tile};",
        "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; mad.lo.u32 b, wg, 8, sm;",
        f"@leader mbarrier.arrive.shared::cta.b64 _, [b+{s.ready}]; bfe.u32 parity, g, 1, 1;",
        "@!moved bra KEEP;",
        *_scale_outputs(),
        "KEEP:",
        *wait("b", s.ready, "MINE"),
    ]
