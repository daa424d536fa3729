"""The radix selection of ``kernel_sm90`` as PTX.

A cluster of blocks of threads shares a row. Scores become unsigned keys of the same order, 0 for
what cannot be picked. A sample bounds the k-th largest key from below; what reaches the bound is
counted by its first 11 bits and kept in shared memory, as much as fits, so that the scores are read
once. Rounds of 11 and 10 bits over what was kept then find the k-th key. Picks are bits of two
maps, above that key and equal to it, which gives the order and the ties to the lowest.
"""

from pallas_kernels.index_topk.stream_ptx import (
    BINS,
    PICKED_BITS,
    Selection,
    prefetch,
    sample,
    stream,
)
from pallas_kernels.inline_ptx import BARRIER

FLAG_ALL = 0xFFFFFFFF  # bin of a row with fewer keys than places

_REGISTERS = """
.reg .b32 tid,lane,warp,sm,row,rank,vis,els,chunk,lo,cnt,need,total,bin,low,prefix,mask,below;
.reg .b32 i,j,a,b,c,d,e,x<32>,key<4>,s<16>,sum,incl,excl,word,kept,left,before,mine,take;
.reg .b32 full,idx,base,one,mx,gt,eq,pos;
.reg .b64 scores,out,p64,q64,rowp;
.reg .pred p,q,all,v<4>,cand,over;
"""


def program(s: Selection) -> list[str]:
    """Operands: scores, visible, out (GMEM), SMEM words, row, rank in the cluster."""
    lines = [_REGISTERS, *_start(s), *prefetch(s), f"barrier.sync {BARRIER}, {s.threads};"]
    lines += [*sample(s, _count_sample(s)), *_threshold(s, 0)]
    lines += [
        f"setp.eq.u32 all, bin, {FLAG_ALL}; shl.b32 low, bin, 21; selp.b32 low, 1, low, all;",
        f"mov.b32 need, {s.k};",
        *stream(s, _keep(s), "KEEP"),
        *_threshold(s, 1),
        f"ld.shared.u32 kept, [sm+{4 * (s.found + 2)}]; setp.gt.u32 over, kept, {s.kept};",
        f"mov.b32 prefix, bin; setp.eq.u32 all, bin, {FLAG_ALL}; @all bra TAKE;",
    ]
    for level, (shift, bits) in ((2, (10, 11)), (3, (0, 10))):
        lines += _kept_or_stream(s, _count(s, level, shift, bits), f"COUNT{level}")
        lines += _threshold(s, level)
        lines += [f"shl.b32 prefix, prefix, {bits}; or.b32 prefix, prefix, bin;"]
    # With fewer keys than places every key is picked: all are above 0.
    lines += ["bra MARKING;", "TAKE: mov.b32 prefix, 0; mov.b32 need, 0;", "MARKING:"]
    lines += [*_kept_or_stream(s, _mark(s), "MARK"), *_emit(s)]
    return [line for text in lines for line in text.strip().splitlines()]


def _start(s: Selection) -> list[str]:
    span = 128 * s.cluster
    shift = (s.block - 1).bit_length()
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "mov.b64 scores, $0; mov.b64 p64, $1; mov.b64 out, $2;",
        "mov.b32 sm, $3; mov.b32 row, $4; mov.b32 rank, $5;",
        "mul.wide.u32 q64, row, 4; add.s64 p64, p64, q64; ld.global.b32 vis, [p64];",
        f"max.s32 vis, vis, 0; min.s32 vis, vis, {s.n};",
        "mov.b32 one, 1; shl.b32 below, one, lane; sub.u32 below, below, 1;",
        f"add.u32 els, vis, {s.block - 1}; shr.u32 els, els, {shift};",
        f"add.u32 chunk, els, {span - 1}; shr.u32 chunk, chunk, {span.bit_length() - 1};",
        "shl.b32 chunk, chunk, 7; mul.lo.u32 lo, chunk, rank; min.u32 lo, lo, els;",
        "sub.u32 cnt, els, lo; min.u32 cnt, cnt, chunk;",
        f"mul.wide.u32 rowp, row, {s.n}; mul.wide.u32 q64, lo, {s.block};",
        "add.s64 rowp, rowp, q64; shl.b64 rowp, rowp, 2; add.s64 rowp, rowp, scores;",
        f"mul.wide.u32 q64, row, {4 * s.k}; add.s64 out, out, q64; mov.b32 need, {s.k};",
        "shl.b32 i, tid, 4; mov.b32 a, 0;",
        "ZERO: add.u32 b, sm, i; st.shared.v4.b32 [b], {a,a,a,a};",
        f"add.u32 i, i, {16 * s.threads}; setp.lt.u32 p, i, {4 * s.keys}; @p bra ZERO;",
        f"add.u32 b, sm, {4 * s.found}; setp.eq.u32 p, tid, 0;",
        "@p st.shared.v4.b32 [b], {a,a,a,a};",
    ]


def _each(s: Selection) -> range:
    return range(4 if s.block == 1 else 1)


def _count_sample(s: Selection) -> list[str]:
    lines = []
    for e in _each(s):
        lines += [
            f"shr.u32 a, key{e}, 21; shl.b32 a, a, 2; add.u32 a, a, sm; setp.ne.u32 p, key{e}, 0;",
            "@p red.shared.add.u32 [a], one;",
        ]
    return lines


def _count(s: Selection, level: int, shift: int, bits: int) -> list[str]:
    """Keys that begin with ``prefix`` by their next bits."""
    lines = []
    for e in _each(s):
        lines += [
            f"shr.u32 a, key{e}, {shift + bits}; setp.eq.u32 p, a, prefix;",
            f"bfe.u32 a, key{e}, {shift}, {bits}; shl.b32 a, a, 2; add.u32 a, a, sm;",
            f"@p red.shared.add.u32 [a+{4 * BINS * level}], one;",
        ]
    return lines


def _keep(s: Selection) -> list[str]:
    """Keys that reach ``low`` are counted by their first 11 bits and kept with their places."""
    lines = ["mov.b32 mx, key0;", *[f"max.u32 mx, mx, key{e};" for e in _each(s)[1:]]]
    lines += ["setp.ge.u32 p, mx, low; vote.sync.any.pred p, p, 0xffffffff; @!p bra NONE_#;"]
    for e in _each(s):
        lines += [
            f"setp.ge.u32 cand, key{e}, low; vote.sync.ballot.b32 mask, cand, 0xffffffff;",
            f"setp.eq.u32 p, mask, 0; @p bra SKIP{e}_#;",
            "popc.b32 c, mask; mov.b32 d, 0; setp.eq.u32 p, lane, 0;",
            f"@p atom.shared.add.u32 d, [sm+{4 * (s.found + 2)}], c;",
            "shfl.sync.idx.b32 d, d, 0, 31, 0xffffffff; and.b32 c, mask, below; popc.b32 c, c;",
            f"add.u32 d, d, c; setp.lt.and.u32 p, d, {s.kept}, cand; add.u32 pos, idx, {e};",
            f"shl.b32 d, d, 2; add.u32 d, d, sm; @p st.shared.b32 [d+{4 * s.keys}], key{e};",
            f"@p st.shared.b32 [d+{4 * (s.keys + s.kept)}], pos;",
            f"shr.u32 a, key{e}, 21; shl.b32 a, a, 2; add.u32 a, a, sm;",
            f"@cand red.shared.add.u32 [a+{4 * BINS}], one;",
            f"SKIP{e}_#:",
        ]
    return [*lines, "NONE_#:"]


def _mark(s: Selection) -> list[str]:
    lines = []
    for e in _each(s):
        lines += [
            f"setp.gt.u32 p, key{e}, prefix; setp.eq.u32 q, key{e}, prefix;",
            f"setp.ne.and.u32 q, key{e}, 0, q; add.u32 pos, idx, {e};",
            "shr.u32 a, pos, 5; shl.b32 a, a, 2; add.u32 a, a, sm; and.b32 b, pos, 31;",
            f"shl.b32 b, one, b; @p red.shared.or.b32 [a+{4 * s.above}], b;",
            f"@q red.shared.or.b32 [a+{4 * s.equal}], b;",
        ]
    return lines


def _kept_or_stream(s: Selection, body: list[str], name: str) -> list[str]:
    """``body`` over the kept keys, or over all scores again where they were too many."""
    one = body[: len(body) // len(_each(s))]
    return [
        f"@over bra AGAIN_{name};",
        "mov.b32 i, tid;",
        f"KEPT_{name}: setp.ge.u32 p, i, kept; @p bra DONE_{name};",
        f"shl.b32 d, i, 2; add.u32 d, d, sm; ld.shared.b32 key0, [d+{4 * s.keys}];",
        f"ld.shared.b32 idx, [d+{4 * (s.keys + s.kept)}];",
        *one,
        f"add.u32 i, i, {s.threads}; bra KEPT_{name};",
        f"AGAIN_{name}:",
        *stream(s, body, name),
        f"DONE_{name}:",
    ]


def _meet(s: Selection) -> list[str]:
    """All threads of the row's blocks meet, and see what they wrote to shared memory."""
    if s.cluster == 1:
        return [f"barrier.sync {BARRIER}, {s.threads};"]
    return ["barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"]


def _scan(s: Selection) -> list[str]:
    """incl, excl: sums of ``sum`` over the threads up to this one; two barriers apart at least."""
    lines = ["mov.b32 incl, sum;"]
    for step in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.up.b32 a, incl, {step}, 0, 0xffffffff; setp.ge.u32 p, lane, {step};",
            "@p add.u32 incl, incl, a;",
        ]
    at = 4 * (s.found + 16)
    return [
        *lines,
        "setp.eq.u32 p, lane, 31; shl.b32 a, warp, 2; add.u32 a, a, sm;",
        f"@p st.shared.b32 [a+{at}], incl; barrier.sync {BARRIER}, {s.threads};",
        "shl.b32 a, lane, 2; add.u32 a, a, sm; mov.b32 b, 0; setp.lt.u32 p, lane, warp;",
        f"@p ld.shared.b32 b, [a+{at}]; redux.sync.add.u32 b, b, 0xffffffff;",
        "add.u32 incl, incl, b; sub.u32 excl, incl, sum;",
    ]


def _threshold(s: Selection, level: int) -> list[str]:
    """bin: where the key of place ``need`` lies; need: its place within the bin."""
    bins = BINS // s.threads
    width = min(bins, 4)
    at = 4 * BINS * level
    lines = _meet(s)
    lines += [f"mul.lo.u32 base, tid, {4 * bins}; sub.u32 base, sm, base;"]
    lines += [f"add.u32 base, base, {at + 4 * (BINS - bins)};"]
    lines += [f"mov.b32 s{j}, 0;" for j in range(bins)]
    for rank in range(s.cluster):
        space, address = "shared", "base"
        if s.cluster > 1:
            space, address = "shared::cluster", "d"
            lines.append(f"mapa.shared::cluster.u32 d, base, {rank};")
        for first in range(0, bins, width):
            names = ",".join(f"x{j}" for j in range(width))
            lines.append(f"ld.{space}.v{width}.b32 {{{names}}}, [{address}+{4 * first}];")
            lines += [f"add.u32 s{first + j}, s{first + j}, x{j};" for j in range(width)]
    lines += ["mov.b32 sum, s0;", *[f"add.u32 sum, sum, s{j};" for j in range(1, bins)]]
    lines += _scan(s)
    lines += [
        f"mov.b32 c, excl; mov.b32 b, {BINS - 1}; mul.lo.u32 a, tid, {bins}; sub.u32 b, b, a;",
        f"add.u32 d, sm, {4 * s.found};",
    ]
    for j in reversed(range(bins)):
        lines += [
            f"add.u32 e, c, s{j}; setp.lt.u32 p, c, need; setp.ge.and.u32 p, e, need, p;",
            "sub.u32 a, need, c; @p st.shared.v2.b32 [d], {b,a};",
            "mov.b32 c, e; sub.u32 b, b, 1;",
        ]
    if level < 2:
        lines += [
            f"setp.lt.u32 p, incl, need; setp.eq.and.u32 p, tid, {s.threads - 1}, p;",
            f"mov.b32 b, {FLAG_ALL}; mov.b32 a, 0; @p st.shared.v2.b32 [d], {{b,a}};",
        ]
    lines += [f"barrier.sync {BARRIER}, {s.threads};", "ld.shared.v2.b32 {bin,need}, [d];"]
    return lines


def _emit(s: Selection) -> list[str]:
    """Picks as ascending positions: this block's come after those of lower ranks."""
    per_thread = s.map_words // s.threads
    field = (1 << PICKED_BITS) - 1
    lines = [
        f"barrier.sync {BARRIER}, {s.threads};",
        f"mul.lo.u32 base, tid, {4 * per_thread}; add.u32 base, base, sm; mov.b32 sum, 0;",
    ]
    for j in range(per_thread):
        lines += [
            f"ld.shared.b32 a, [base+{4 * (s.above + j)}]; popc.b32 a, a; add.u32 sum, sum, a;",
            f"ld.shared.b32 a, [base+{4 * (s.equal + j)}]; popc.b32 a, a;",
            f"shl.b32 a, a, {PICKED_BITS}; add.u32 sum, sum, a;",
        ]
    lines += [
        *_scan(s),
        f"setp.eq.u32 p, tid, {s.threads - 1}; @p st.shared.b32 [sm+{4 * (s.found + 3)}], incl;",
        *_meet(s),
        "mov.b32 left, need; mov.b32 before, 0; mov.b32 total, 0; mov.b32 mine, 0;",
    ]
    for rank in range(s.cluster):
        at = 4 * (s.found + 3)
        if s.cluster > 1:
            lines += [f"mapa.shared::cluster.u32 d, sm, {rank};"]
            lines += [f"ld.shared::cluster.b32 a, [d+{at}];"]
        else:
            lines += [f"ld.shared.b32 a, [sm+{at}];"]
        lines += [
            f"setp.eq.u32 p, rank, {rank}; @p mov.b32 mine, left;",
            f"shr.u32 b, a, {PICKED_BITS}; and.b32 c, a, {field}; min.u32 take, b, left;",
            "sub.u32 left, left, take; add.u32 c, c, take; add.u32 total, total, c;",
            f"setp.gt.u32 p, rank, {rank}; @p add.u32 before, before, c;",
        ]
    lines += [
        f"shr.u32 b, excl, {PICKED_BITS}; and.b32 c, excl, {field}; min.u32 take, b, mine;",
        "add.u32 pos, before, c; add.u32 pos, pos, take; sub.u32 left, mine, take;",
        f"mul.lo.u32 idx, tid, {32 * per_thread}; add.u32 idx, idx, lo; mov.b32 j, 0;",
        f"WORD: ld.shared.b32 gt, [base+{4 * s.above}]; ld.shared.b32 eq, [base+{4 * s.equal}];",
        "setp.eq.u32 p, left, 0; @p mov.b32 eq, 0;",
        "CUT: popc.b32 a, eq; setp.le.u32 p, a, left; @p bra FITS;",
        "bfind.u32 b, eq; shl.b32 b, one, b; xor.b32 eq, eq, b; bra CUT;",
        "FITS: sub.u32 left, left, a; or.b32 word, gt, eq;",
        "PICK: setp.eq.u32 p, word, 0; @p bra NEXT;",
        "sub.u32 a, word, 1; not.b32 b, a; and.b32 b, b, word; bfind.u32 b, b;",
        "add.u32 b, b, idx; mul.wide.u32 q64, pos, 4; add.s64 q64, q64, out;",
        "st.global.b32 [q64], b; add.u32 pos, pos, 1; and.b32 word, word, a; bra PICK;",
        "NEXT: add.u32 base, base, 4; add.u32 idx, idx, 32; add.u32 j, j, 1;",
        f"setp.lt.u32 p, j, {per_thread}; @p bra WORD;",
        "setp.ne.u32 p, rank, 0; @p bra FILLED; add.u32 i, total, tid; mov.b32 a, 0xffffffff;",
        f"FILL: setp.ge.u32 p, i, {s.k}; @p bra FILLED; mul.wide.u32 q64, i, 4;",
        f"add.s64 q64, q64, out; st.global.b32 [q64], a; add.u32 i, i, {s.threads}; bra FILL;",
        "FILLED:",
    ]
    if s.cluster > 1:
        lines += _meet(s)  # no block may end while another reads its counts
    return lines
