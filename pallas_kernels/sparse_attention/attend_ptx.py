"""The attention kernel of ``kernel_sm90`` as PTX: queries, products, softmax, output.

Two warpgroups hold 256 of the 512 output dims each, for all heads; both compute every score, so
that they share nothing but the rows. Probabilities go from score registers to operand registers.
A maximum moves only when scores exceed it by more than 2^8: a rescaling is rare and exact.
"""

import math

from pallas_kernels.inline_ptx import f32
from pallas_kernels.sparse_attention.ahead import ask
from pallas_kernels.sparse_attention.attend_shape import (
    BARRIER_ALL,
    BARRIER_CONSUMERS,
    CONSUMERS,
    CONSUMING_REGISTERS,
    MAX_HEADS,
    PRODUCERS,
    PRODUCING_REGISTERS,
    QUERY_BYTES,
    ROPE,
    SHIFT,
    SMS,
    THREADS,
    WIDTH,
    Attend,
)
from pallas_kernels.sparse_attention.merge_ptx import (
    ARRIVE,
    MEET,
    WAIT,
    merge,
    place_outputs,
    rotate,
)
from pallas_kernels.sparse_attention.rows_ptx import divide, first_tile, look_up, places, produce
from pallas_kernels.sparse_attention.rows_ptx import registers as row_registers

NAMES = ("queries", "cosines", "sines", "window", "written", "position", "floors", "owners")
NAMES += ("pool", "table", "selected", "sinks", "out")
LOG2E = math.log2(math.e)
HIGH = 0x40000040  # descriptor: 128-byte swizzle, blocks of eight rows 1024 bytes apart


def arrays(s: Attend) -> tuple[str, ...]:
    """The GMEM operands: NAMES, in front of the output those to ask for."""
    return (*NAMES[:-1], *_asked(s), NAMES[-1])


def _asked(s: Attend) -> list[str]:
    return [f"ahead{i}" for i in range(len(s.ahead))]


def program(s: Attend) -> list[str]:
    """Operands: ``arrays`` (GMEM), SMEM bytes, query row times groups + group, split."""
    names = arrays(s)
    lines = [
        *_registers(s),
        *[f"mov.b64 {name}, ${i};" for i, name in enumerate(names)],
        f"mov.b32 sm, ${len(names)}; mov.b32 row, ${len(names) + 1};",
        f"mov.b32 split, ${len(names) + 2}; mov.u32 tid, %tid.x; shr.u32 wg, tid, 7;",
        divide("query", "row", s.groups),
        divide("request", "query", s.per_request),
        "setp.ne.u32 p, tid, 0; @p bra READY;",
        *_barriers(s),
        f"st.shared.b32 [sm+{s.used}], 0; and.b32 a, sm, 1023; setp.ne.u32 p, a, 0; @p trap;",
        "READY: and.b32 t, tid, 127; and.b32 lane, tid, 31; shr.u32 warp, t, 5;",
        "setp.eq.u32 leader, lane, 0; bar.warp.sync 0xffffffff;",
        f"barrier.sync {BARRIER_ALL}, {THREADS};",
        "setp.eq.u32 p, wg, 2; @p bra LIST;",
        *_ahead(s),
        *fetch_queries(s, "row", "query"),
        *place_queries(s),
        "bra BEGIN;",
        "LIST:",
        *look_up(s),
        f"@leader red.shared.max.u32 [sm+{s.used}], last;",
        f"BEGIN: barrier.sync {BARRIER_ALL}, {THREADS};",
        *places(s),
        *first_tile(s),
        f"fence.proxy.async.shared::cta; barrier.sync {BARRIER_ALL}, {THREADS};",
        "setp.eq.u32 p, wg, 2; @p bra PRODUCE;",
        f"setmaxnreg.inc.sync.aligned.u32 {CONSUMING_REGISTERS};",
        *_consume(s),
        *merge(s),
        f"PRODUCE: setmaxnreg.dec.sync.aligned.u32 {PRODUCING_REGISTERS};",
        *(produce(s) if s.tiles > 1 else []),
        *([ARRIVE, *_ask(s), WAIT, MEET] if s.splits > 1 else []),
        "DONE:",
    ]
    return [line for text in lines for line in text.strip().splitlines() if line]


def _barriers(s: Attend) -> list[str]:
    init = "mbarrier.init.shared::cta.b64"
    counts = ((s.full, PRODUCERS // 32), (s.empty, CONSUMERS // 32))
    return [
        f"{init} [sm+{first + 8 * i}], {count};" for first, count in counts for i in range(s.stages)
    ]


def _ahead(s: Attend) -> list[str]:
    """Queries and entries of the row that this multiprocessor is likely to get next, to L2."""
    if s.splits > 1 or s.rows <= SMS or s.selected % 4:
        return []
    lines = [f"add.u32 a, row, {SMS}; setp.lt.u32 p, a, {s.rows}; setp.eq.and.u32 p, tid, 0, p;"]
    for name, size in (("queries", 2 * WIDTH * s.heads), ("selected", 4 * s.selected)):
        if size:
            lines += [
                f"mul.wide.u32 q64, a, {size}; add.s64 src, {name}, q64; mov.b32 b, {size};",
                "@p cp.async.bulk.prefetch.L2.global [src], b;",
            ]
    return lines


def _ask(s: Attend) -> list[str]:
    """Ask for what the next launch reads. The producers do it when all rows of their block are in
    shared memory, so that no load of theirs queues behind it, and between arriving at the meeting
    of the cluster and waiting for it, so that no consumer waits for them.
    """
    if not s.ahead:
        return []
    blocks = s.grid * s.splits
    return [
        f"mov.u32 a, %tid.x; sub.u32 a, a, {CONSUMERS}; mad.lo.u32 b, row, {s.splits}, split;",
        # Next to each other in different blocks: few pieces are spread over all of them.
        f"mad.lo.u32 a, a, {blocks}, b;",
        *ask(s.ahead, _asked(s), "a", blocks * PRODUCERS, "c", "q64", "p"),
    ]


def thread() -> list[str]:
    """Indices that are cheaper to make again than to keep in registers over the loop."""
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; bfe.u32 warp, tid, 5, 2; shr.u32 wg, tid, 7;",
        "shr.u32 gr, lane, 2; and.b32 quad, lane, 3;",
    ]


def _registers(s: Attend) -> list[str]:
    return [
        f".reg .b64 {','.join(arrays(s))},q64,da,db,src;",
        ".reg .b32 sm,row,query,split,tid,wg,lane,warp,request,a,b,c,d,x<4>,w<4>;",
        ".reg .pred p,leader,yes,no,more,turns,free;",
        f".reg .b32 o<{WIDTH // 4}>,s<{s.tile // 2}>,f<{s.tile // 4}>,alpha0,alpha1,new0,new1;",
        ".reg .b32 m0_,m1_,l0,l1,mx0,mx1,tile,end,ql,kl,vl,left,right,high;",
        ".reg .b32 quad,gr,place,parity,fb,masks,wide;",
        ".reg .b32 cs<4>,sn<4>,qc<4>,qs<4>;",
        ".reg .b32 even,odd,turned0,turned1,spread,sink0,sink1,inv0,inv1,head,seen;",
        *row_registers(s),
    ]


def _consume(s: Attend) -> list[str]:
    return [
        *thread(),
        f"mad.lo.u32 masks, quad, 8, sm; add.u32 masks, masks, {s.list};",
        f"mad.lo.u32 wide, wg, {4 * 128 * s.tile}, sm; add.u32 wide, wide, {QUERY_BYTES};",
        "setp.eq.u32 yes, tid, tid; setp.ne.u32 no, tid, tid; mov.b32 tile, 0;",
        "mov.b32 l0, 0; mov.b32 l1, 0;",
        f"mov.b32 m0_, {f32(-1e30)}; mov.b32 m1_, m0_; mov.b32 high, {HIGH:#x};",
        *[f"mov.b32 o{i}, 0;" for i in range(WIDTH // 4)],
        "shr.u32 ql, sm, 4; and.b32 ql, ql, 0x3FFF; or.b32 ql, ql, 0x10000;",
        "shfl.sync.idx.b32 ql, ql, 0, 31, 0xffffffff;",
        f"add.u32 a, sm, {QUERY_BYTES}; shr.u32 a, a, 4; and.b32 a, a, 0x3FFF;",
        "or.b32 kl, a, 0x10000; shfl.sync.idx.b32 kl, kl, 0, 31, 0xffffffff;",
        *score(s),
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        "TILE:",
        *_softmax(s),
        "add.u32 tile, tile, 1; setp.ge.u32 p, tile, end; @p bra LAST;",
        *_wait(s, "NEXT"),
        *_values(s),
        "wgmma.commit_group.sync.aligned;",
        *score(s),
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;",
        f"@leader mbarrier.arrive.shared::cta.b64 _, [fb+{s.empty}];",
        "wgmma.wait_group.sync.aligned 0; bra TILE;",
        "LAST:",
        *_values(s),
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        *_finish(s),
    ]


def fetch_queries(s: Attend, row: str, query: str, first: int = 0) -> list[str]:
    """A row's queries and a query row's angles to registers: o from ``first`` on, qc, qs."""
    lines = [
        f"and.b32 a, tid, 7; shr.u32 b, tid, 3; mad.lo.u32 c, {row}, "
        f"{s.heads}, a; mul.wide.u32 q64, c, {2 * WIDTH}; add.s64 src, queries, q64;",
        "mul.wide.u32 q64, b, 16; add.s64 src, src, q64;",
    ]
    for half in range(2):
        for i in range(s.heads // 8):
            at = 2 * WIDTH * 8 * i + 512 * half
            names = ",".join(_query(first, i, half))
            lines.append(f"ld.global.nc.v4.b32 {{{names}}}, [src+{at}];")
    return [
        *lines,
        "setp.ge.u32 turns, b, 24; sub.u32 b, b, 24; shl.b32 b, b, 2;",
        f"mad.lo.u32 b, {query}, {ROPE // 2}, b;",
        "mul.wide.s32 q64, b, 4; add.s64 da, cosines, q64; add.s64 db, sines, q64;",
        "@turns ld.global.v4.b32 {qc0,qc1,qc2,qc3}, [da];",
        "@turns ld.global.v4.b32 {qs0,qs1,qs2,qs3}, [db];",
    ]


def place_queries(s: Attend, first: int = 0) -> list[str]:
    """Queries to shared memory: rotated, times 2^SHIFT, eight dims in the order of the rows'."""
    live = range(s.heads // 8)
    lines = [
        # Blocks of 64 dims, swizzled by the head.
        "and.b32 a, tid, 7; shr.u32 b, tid, 3; setp.ge.u32 turns, b, 24;",
        "and.b32 c, b, 7; xor.b32 c, c, a; shl.b32 c, c, 4; mad.lo.u32 c, a, 128, c;",
        f"shr.u32 d, b, 3; mad.lo.u32 c, d, {128 * MAX_HEADS}, c; add.u32 place, c, sm;",
        f"mov.b32 spread, {(SHIFT + 127) * 128 * 0x10001:#x};",
        *[f"mov.b32 cs{j}, qc{j}; mov.b32 sn{j}, qs{j};" for j in range(4)],
    ]
    for i in live:
        lines += _place_query(_query(first, i, 0), 1024 * i)
    lines.append("@!turns bra FLAT;")
    for i in live:
        for j, word in enumerate(_query(first, i, 1)):
            lines += rotate(word, j, inverse=False)
    lines.append("FLAT:")
    for i in live:
        lines += _place_query(_query(first, i, 1), 8192 * 4 + 1024 * i)
    lines.append("mov.b32 a, 0;")
    for i in range(live.stop, 8):
        for half in range(2):
            lines.append(f"st.shared.v4.b32 [place+{8192 * 4 * half + 1024 * i}], {{a,a,a,a}};")
    return lines


def _query(first: int, i: int, half: int) -> list[str]:
    """Eight dims of a head in registers."""
    return [f"o{first + 4 * (8 * half + i) + j}" for j in range(4)]


def _place_query(o: list[str], at: int) -> list[str]:
    return [
        f"prmt.b32 x0, {o[0]}, {o[2]}, 0x5410; prmt.b32 x1, {o[0]}, {o[2]}, 0x7632;",
        f"prmt.b32 x2, {o[1]}, {o[3]}, 0x5410; prmt.b32 x3, {o[1]}, {o[3]}, 0x7632;",
        *[f"mul.rn.bf16x2 x{j}, x{j}, spread;" for j in range(4)],
        f"st.shared.v4.b32 [place+{at}], {{x0,x1,x2,x3}};",
    ]


def _wait(s: Attend, label: str) -> list[str]:
    """Wait for the stage of ``tile``; fb: where its barriers are, less their offset, once again."""
    return [
        f"and.b32 a, tile, {s.stages - 1}; shl.b32 b, a, 3; add.u32 b, b, sm;",
        # The first tile came without this barrier.
        "sub.u32 parity, tile, 1; bfe.u32 parity, parity, 1, 1;",
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 free, [b+{s.full}], parity;",
        f"@!free bra {label};",
        f"mad.lo.u32 a, a, {s.stage_bytes}, sm; add.u32 a, a, {QUERY_BYTES}; shr.u32 a, a, 4;",
        "and.b32 a, a, 0x3FFF; or.b32 kl, a, 0x10000; shfl.sync.idx.b32 kl, kl, 0, 31, 0xffffffff;",
    ]


def score(s: Attend) -> list[str]:
    """s = queries x rows of the stage, 32 steps of 16 dims."""
    acc = "{" + ",".join(f"s{i}" for i in range(s.tile // 2)) + "}"
    lines = ["wgmma.fence.sync.aligned;"]
    for step in range(WIDTH // 16):
        block, inner = divmod(step, 4)
        lines += [
            f"add.u32 left, ql, {(128 * MAX_HEADS * block + 32 * inner) // 16};",
            f"add.u32 right, kl, {(128 * s.tile * block + 32 * inner) // 16};",
            "mov.b64 da, {left,high}; mov.b64 db, {right,high};",
            f"wgmma.mma_async.sync.aligned.m64n{s.tile}k16.f32.bf16.bf16 {acc}, da, db, "
            f"{'yes' if step else 'no'}, 1, 1, 0, 0;",
        ]
    return lines


def _values(s: Attend) -> list[str]:
    """o += probabilities x this warpgroup's dims of the rows of the tile before ``tile``."""
    acc = "{" + ",".join(f"o{i}" for i in range(WIDTH // 4)) + "}"
    lines = [
        f"sub.u32 a, tile, 1; and.b32 a, a, {s.stages - 1}; shl.b32 fb, a, 3; add.u32 fb, fb, sm;",
        f"mad.lo.u32 a, a, {s.stage_bytes}, wide; shr.u32 a, a, 4; and.b32 a, a, 0x3FFF;",
        # Blocks of 64 dims are 128 bytes a row apart.
        f"or.b32 vl, a, {8 * s.tile << 16:#x}; shfl.sync.idx.b32 vl, vl, 0, 31, 0xffffffff;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(s.tile // 16):
        a = "{" + ",".join(f"f{4 * step + r}" for r in range(4)) + "}"
        lines += [
            f"add.u32 right, vl, {128 * step}; mov.b64 db, {{right,high}};",
            f"wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {acc}, {a}, db, yes, 1, 1, 1;",
        ]
    return lines


def _softmax(s: Attend) -> list[str]:
    """Masked scores of ``tile`` to probabilities f in bf16, and o, l rescaled where m moves."""
    scale, columns = f32(LOG2E * WIDTH**-0.5), range(s.tile // 8)
    lines = [
        f"mad.lo.u32 a, tile, {4 * s.tile}, masks;",
        f"mov.b32 mx0, {f32(-math.inf)}; mov.b32 mx1, mx0; mov.b32 d, mx0;",
    ]
    for j in columns:
        lines.append(f"ld.shared.v2.b32 {{b,c}}, [a+{32 * j}];")
        for i, name in enumerate("bc"):
            lines.append(f"setp.lt.s32 p, {name}, 0;")
            for h in range(2):
                r = f"s{4 * j + 2 * h + i}"
                lines.append(f"@p mov.b32 {r}, d; max.f32 mx{h}, mx{h}, {r};")
    for h in range(2):
        for lanes in (1, 2):
            lines += [
                f"shfl.sync.bfly.b32 a, mx{h}, {lanes}, 31, 0xffffffff; max.f32 mx{h}, mx{h}, a;"
            ]
        lines += [
            f"mul.f32 mx{h}, mx{h}, {scale}; add.f32 a, m{h}_, {f32(8.0)};",
            f"setp.gt.f32 p, mx{h}, a; selp.b32 new{h}, mx{h}, m{h}_, p;",
            f"sub.f32 alpha{h}, m{h}_, new{h}; ex2.approx.ftz.f32 alpha{h}, alpha{h};",
            f"mul.f32 l{h}, l{h}, alpha{h};",
        ]
    lines += [
        "setp.ne.f32 p, new0, m0_; setp.ne.or.f32 p, new1, m1_, p;",
        "vote.sync.any.pred p, p, 0xffffffff; @!p bra KEEP;",
        *[f"mul.f32 o{i}, o{i}, alpha{i // 2 % 2};" for i in range(WIDTH // 4)],
        "KEEP: mov.b32 m0_, new0; mov.b32 m1_, new1; neg.f32 new0, new0; neg.f32 new1, new1;",
    ]
    for j in columns:
        for i in range(4):
            r, h = f"s{4 * j + i}", i // 2
            lines += [
                f"fma.rn.f32 {r}, {r}, {scale}, new{h}; ex2.approx.ftz.f32 {r}, {r};",
                f"add.f32 l{h}, l{h}, {r};",
            ]
        for h in range(2):
            lines.append(f"cvt.rn.bf16x2.f32 f{2 * j + h}, s{4 * j + 2 * h + 1}, s{4 * j + 2 * h};")
    return lines


def _finish(s: Attend) -> list[str]:
    """Normalised outputs to shared memory, over the queries; several blocks also leave m and l."""
    lines = thread()
    for h in range(2):
        for lanes in (1, 2):
            lines += [
                f"shfl.sync.bfly.b32 a, l{h}, {lanes}, 31, 0xffffffff; add.f32 l{h}, l{h}, a;"
            ]
    lines += ["mad.lo.u32 head, warp, 16, gr;"]
    for h in range(2):
        lines += [f"add.u32 a, head, {8 * h};"] if h else ["mov.b32 a, head;"]
        if s.splits == 1:
            lines += [
                f"setp.lt.u32 p, a, {s.heads}; mul.wide.u32 q64, a, 4; add.s64 src, sinks, q64;",
                f"mov.b32 sink{h}, 0; @p ld.global.b32 sink{h}, [src];",
                f"mul.f32 sink{h}, sink{h}, {f32(LOG2E)}; max.f32 a, m{h}_, sink{h};",
                f"sub.f32 b, m{h}_, a; ex2.approx.ftz.f32 b, b; sub.f32 c, sink{h}, a;",
                f"ex2.approx.ftz.f32 c, c; fma.rn.f32 c, l{h}, b, c; div.full.f32 inv{h}, b, c;",
            ]
        else:
            lines += [
                f"setp.gt.f32 p, l{h}, 0f00000000; rcp.approx.ftz.f32 inv{h}, l{h};",
                f"selp.b32 inv{h}, inv{h}, 0, p;",
            ]
        lines += [f"mul.f32 inv{h}, inv{h}, {f32(2.0**SHIFT)};"]
    lines += [f"barrier.sync {BARRIER_CONSUMERS}, {CONSUMERS};"]
    if s.splits > 1:
        lines += [
            "setp.eq.u32 p, quad, 0; setp.eq.and.u32 p, wg, 0, p; mad.lo.u32 a, head, 8, sm;",
            f"@p st.shared.v2.b32 [a+{QUERY_BYTES}], {{m0_,l0}};",
            f"@p st.shared.v2.b32 [a+{QUERY_BYTES + 64}], {{m1_,l1}};",
        ]
    return [*lines, *place_outputs()]
