"""The score kernel of ``kernel_sm90`` as PTX.

A tile is 64 keys: wgmma sees them as M = 64 rows in registers and the heads of up to six query rows
as N. A thread (warp w, lane 4 g + q) of a warpgroup holds quarter q, one scale group, of the keys
16 w + g and 16 w + g + 8. Its 32 codes stay in the order of their words, which costs nothing: the
queries in shared memory are permuted instead. The weighted sum over heads is a product with ones.
"""

from pallas_kernels.index_scores.scores_shape import (
    HEADS,
    MAX_ROWS,
    MAX_SCALE_BYTE,
    SHIFT,
    TILE,
    WIDTH,
    Scores,
)
from pallas_kernels.inline_ptx import BARRIER

NONE = 0x7FFFFFFF  # position of an entry that is not there
AND_OR = 0xEA  # lop3 truth table of (a & b) | c


def _registers(s: Scores) -> str:
    n = s.columns // 2
    lines = [
        ".reg .b32 tid,lane,g,q,warp,wg,sm,unit,split,request,first,one,inf,x<4>,t<4>;",
        ".reg .b32 a,b,c,d,e,i,j;",
        f".reg .b32 vis<{MAX_ROWS}>,most,total,per,begin,end,count,tiles,tile,low,at,high;",
        f".reg .b32 acc<{n}>,f<32>,w<4>,m0,m1,h<8>,d<4>,v,pos,place,index;",
        ".reg .b64 queries,weights,codes,scales,table,visible,among,out,p64,q64,desc,mine,row;",
        ".reg .pred p,r,yes,no,okay,live,leader,small;",
        ".reg .b16 half,zero;",
    ]
    for k in range(s.depth):
        lines += [f".reg .b32 k{k}_<8>,s{k}_<2>,p{k}_<2>,i{k}_;"]
    return "\n".join(lines)


def program(s: Scores) -> list[str]:
    """Operands: queries, weights, codes, scales, table, visible, candidates (the table where there
    are none), out (GMEM), SMEM bytes, request and row tile as one index, split.
    """
    lines = [_registers(s), *_start(s), *_queries(s), *_ranges(s)]
    lines += [
        "ROUND: setp.ge.u32 p, begin, end; @p bra FINISH;",
        f"sub.u32 count, end, begin; min.u32 count, count, {s.round_list};",
        *_look_up(s),
        f"fence.proxy.async; barrier.sync {BARRIER}, {s.threads};",
        *_tiles(s),
        f"barrier.sync {BARRIER}, {s.threads}; add.u32 begin, begin, {s.round_list}; bra ROUND;",
        "FINISH:",
    ]
    if not s.blocks:
        lines += _nothing_behind(s)
    return [line for text in lines for line in text.strip().splitlines()]


def _start(s: Scores) -> list[str]:
    names = ("queries", "weights", "codes", "scales", "table", "visible", "among", "out")
    lines = [f"mov.b64 {name}, ${i};" for i, name in enumerate(names)]
    lines += [
        "mov.b32 sm, $8; mov.b32 unit, $9; mov.b32 split, $10; mov.u32 tid, %tid.x;",
        "and.b32 lane, tid, 31; shr.u32 g, lane, 2; and.b32 q, lane, 3; shr.u32 wg, tid, 7;",
        "bfe.u32 warp, tid, 5, 2; mov.b32 one, 0x3F803F80; mov.b32 inf, 0xFF800000;",
        "setp.eq.u32 yes, tid, tid; setp.ne.u32 no, tid, tid; mov.b16 zero, 0;",
    ]
    if s.row_tiles == 1:
        lines += ["mov.b32 request, unit; mov.b32 first, 0;"]
    else:
        lines += [
            f"div.u32 request, unit, {s.row_tiles}; mul.lo.u32 a, request, {s.row_tiles};",
            f"sub.u32 first, unit, a; mul.lo.u32 first, first, {s.tile_rows};",
        ]
    lines += [f"mul.lo.u32 a, request, {s.rows}; add.u32 a, a, first; mov.b32 most, 0;"]
    lines += ["mul.wide.u32 q64, a, 4; add.s64 p64, visible, q64;"]
    for t in range(s.tile_rows):
        # Rows behind the last one see nothing and are not stored.
        lines += [
            f"mov.b32 vis{t}, 0; add.u32 b, first, {t}; setp.lt.u32 p, b, {s.rows};",
            f"@p ld.global.b32 vis{t}, [p64+{4 * t}]; max.s32 vis{t}, vis{t}, 0;",
            f"min.u32 vis{t}, vis{t}, {s.entries}; max.u32 most, most, vis{t};",
        ]
    lines += [
        f"mul.wide.u32 q64, a, {4 * s.outputs}; add.s64 row, out, q64;",
        f"mul.wide.u32 q64, a, {2 * HEADS}; add.s64 weights, weights, q64;",
        f"mul.wide.u32 q64, a, {2 * HEADS * WIDTH}; add.s64 queries, queries, q64;",
        f"div.u32 b, request, {s.sharing}; mul.wide.u32 q64, b, {4 * s.pages};",
        "add.s64 table, table, q64;",
        f"mul.wide.u32 q64, a, {4 * max(1, s.blocks)}; add.s64 among, among, q64;",
    ]
    return lines


def _queries(s: Scores) -> list[str]:
    """Queries and weights to shared memory, in the order in which the codes of a word lie."""
    pieces = WIDTH // 8
    lines = [
        "mov.b32 i, tid;",
        f"QUERY: setp.ge.u32 p, i, {s.columns * pieces}; @p bra WEIGHT;",
        f"shr.u32 a, i, {pieces.bit_length() - 1}; and.b32 b, i, {pieces - 1};",
        # a: column, b: 16-byte piece. Rows behind the last one repeat it.
        f"shr.u32 c, a, 5; add.u32 d, first, c; min.u32 d, d, {s.rows - 1}; sub.u32 d, d, first;",
        f"shl.b32 d, d, 5; and.b32 c, a, 31; add.u32 d, d, c; mul.lo.u32 d, d, {pieces};",
        "add.u32 d, d, b; mul.wide.u32 q64, d, 16; add.s64 q64, q64, queries;",
        "ld.global.v4.b32 {x0,x1,x2,x3}, [q64];",
        "prmt.b32 t0, x0, x2, 0x5410; prmt.b32 t1, x0, x2, 0x7632;",
        "prmt.b32 t2, x1, x3, 0x5410; prmt.b32 t3, x1, x3, 0x7632;",
        "shl.b32 c, a, 4; shr.u32 d, b, 2; shl.b32 d, d, 2; add.u32 c, c, d; and.b32 b, b, 3;",
        f"mul.lo.u32 b, b, {64 * s.columns}; add.u32 c, c, b; add.u32 c, c, sm;",
    ]
    scale = (127 + SHIFT << 7) * 0x10001
    for i in range(4):
        lines += [
            f"mul.rn.bf16x2 t{i}, t{i}, h0;"
            if i
            else f"mov.b32 h0, {scale:#x}; mul.rn.bf16x2 t0, t0, h0;",
            f"st.shared.b32 [c+{16 * s.columns * i}], t{i};",
        ]
    lines += [
        f"add.u32 i, i, {s.threads}; bra QUERY;",
        f"WEIGHT: setp.lt.u32 p, tid, {16 * s.tile_rows}; shr.u32 a, tid, 4;",
        f"add.u32 d, first, a; min.u32 d, d, {s.rows - 1}; sub.u32 d, d, first; shl.b32 d, d, 6;",
        "and.b32 b, tid, 3; shl.b32 b, b, 4; add.u32 d, d, b; and.b32 b, tid, 12; add.u32 d, d, b;",
        "cvt.u64.u32 q64, d; add.s64 q64, q64, weights; @p ld.global.b32 a, [q64];",
        f"shl.b32 b, tid, 2; add.u32 b, b, sm; @p st.shared.b32 [b+{s.weights}], a;",
    ]
    return lines


def _ranges(s: Scores) -> list[str]:
    """begin .. end: this block's share of the list of key groups, a whole number of tiles."""
    per_tile = TILE // s.group
    if s.blocks:
        lines = [f"mov.b32 total, {s.blocks};"]
    else:
        lines = [f"add.u32 total, most, {s.group - 1};"]
        lines += [f"shr.u32 total, total, {s.group.bit_length() - 1};"]
    return [
        *lines,
        f"add.u32 per, total, {s.splits * per_tile - 1}; div.u32 per, per, {s.splits * per_tile};",
        f"mul.lo.u32 per, per, {per_tile}; mul.lo.u32 begin, per, split;",
        "add.u32 end, begin, per; min.u32 end, end, total;",
        # The descriptor of the queries: K-adjacent core matrices, column-adjacent ones.
        f"shr.u32 low, sm, 4; and.b32 low, low, 0x3FFF; or.b32 low, low, {s.columns << 16:#x};",
        "mov.b32 high, 8; shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;",
        "shl.b32 place, warp, 4; add.u32 place, place, g; shl.b32 a, q, 4; cvt.u64.u32 mine, a;",
        "add.s64 codes, codes, mine; cvt.u64.u32 mine, q; add.s64 scales, scales, mine;",
    ]


def _look_up(s: Scores) -> list[str]:
    """The list: pool row and position of each key group, position ``NONE`` of what is not there."""
    padded = TILE // s.group
    lines = [
        f"add.u32 a, count, {padded - 1}; and.b32 e, a, {0xFFFFFFFF ^ padded - 1:#x};",
        "mov.b32 i, tid;",
        "FIND: setp.ge.u32 p, i, e; @p bra FOUND; add.u32 j, begin, i;",
        "setp.lt.u32 okay, i, count; mov.b32 a, 0xFFFFFFFF; mov.b32 b, 0;",
    ]
    if s.blocks:
        lines += [
            "mul.wide.u32 q64, j, 4; add.s64 q64, q64, among; @okay ld.global.b32 a, [q64];",
            f"setp.lt.u32 p, a, {-(-s.entries // 8)}; and.pred okay, okay, p; shl.b32 a, a, 3;",
        ]
    else:
        lines += [f"shl.b32 a, j, {s.group.bit_length() - 1};"]
    shift = s.page.bit_length() - 1
    lines += [
        "setp.lt.and.u32 okay, a, most, okay;",
        f"shr.u32 c, a, {shift}; mul.wide.u32 q64, c, 4; add.s64 q64, q64, table;",
        f"@okay ld.global.b32 b, [q64]; setp.lt.and.u32 okay, b, {s.pool_pages}, okay;",
        f"shl.b32 b, b, {shift}; and.b32 c, a, {s.page - 1}; add.u32 b, b, c;",
        f"selp.b32 a, a, {NONE}, okay; shl.b32 c, i, 3; add.u32 c, c, sm;",
        f"st.shared.v2.b32 [c+{s.list}], {{b,a}}; add.u32 i, i, {s.threads}; bra FIND;",
        "FOUND:",
    ]
    return lines


def _load(s: Scores, k: int) -> list[str]:
    """Start loading tile ``tile`` as number k of those in flight, and step on to the next."""
    per_tile = TILE // s.group
    shift = s.group.bit_length() - 1
    lines = [
        f"setp.lt.u32 live, tile, tiles; mov.b32 i{k}_, tile;",
        *[f"mov.b32 k{k}_{j}, 0;" for j in range(8)],
        f"mov.b32 p{k}_0, {NONE}; mov.b32 p{k}_1, {NONE}; mov.b32 s{k}_0, 0; mov.b32 s{k}_1, 0;",
        f"mul.lo.u32 a, tile, {8 * per_tile}; add.u32 a, a, sm;",
    ]
    for half in range(2):
        lines += [
            f"add.u32 b, place, {8 * half}; shr.u32 c, b, {shift}; shl.b32 c, c, 3;",
            f"add.u32 c, c, a; mov.b32 d, {NONE}; @live ld.shared.v2.b32 {{e,d}}, [c+{s.list}];",
            f"setp.ne.u32 p, d, {NONE}; and.b32 b, b, {s.group - 1}; add.u32 e, e, b;",
            f"@p add.u32 p{k}_{half}, d, b;",
            "mul.wide.u32 q64, e, 64; add.s64 q64, q64, codes;",
            "@p ld.global.nc.L1::no_allocate.v4.b32 "
            f"{{{','.join(f'k{k}_{4 * half + j}' for j in range(4))}}}, [q64];",
            "mul.wide.u32 q64, e, 4; add.s64 q64, q64, scales;",
            f"@p ld.global.nc.L1::no_allocate.u8 s{k}_{half}, [q64];",
        ]
    return [*lines, f"add.u32 tile, tile, {s.warpgroups};"]


def _pair(target: str, word: str, i: int, scale: str) -> list[str]:
    """Codes i and i + 4 of a word as bf16 lanes, times the group's scale."""
    sign, rest = 12 - 4 * i, 6 - 4 * i
    lines = [f"shl.b32 t0, {word}, {rest};" if rest > 0 else f"shr.u32 t0, {word}, {-rest};"]
    lines.append("and.b32 t0, t0, 0x01C001C0;")
    signed = word
    if sign:
        lines.append(f"shl.b32 t1, {word}, {sign};")
        signed = "t1"
    return [
        *lines,
        f"lop3.b32 t0, {signed}, 0x80008000, t0, {AND_OR:#x};",
        f"mul.rn.bf16x2 {target}, t0, {scale};",
    ]


def _multiply(s: Scores, k: int) -> list[str]:
    """acc = keys of tile k x queries."""
    acc = "{" + ",".join(f"acc{i}" for i in range(s.columns // 2)) + "}"
    one = 0x00800080  # the lowest exponent bit of both lanes
    bias = (254 - MAX_SCALE_BYTE) * one
    lines = [f"mad.lo.u32 m{h}, s{k}_{h}, {one:#x}, {bias:#x};" for h in range(2)]
    for word in range(4):
        for step in (2 * word, 2 * word + 1):
            for r in range(4):
                half, i = r % 2, 2 * (step % 2) + r // 2
                lines += _pair(f"f{4 * step + r}", f"k{k}_{4 * half + word}", i, f"m{half}")
        if word % 2 == 0:
            continue
        lines.append("wgmma.fence.sync.aligned;")
        for step in range(2 * word - 2, 2 * word + 2):
            a = "{" + ",".join(f"f{4 * step + r}" for r in range(4)) + "}"
            keep = "yes" if step else "no"
            shape = f"m64n{s.columns}k16.f32.bf16.bf16"
            lines += [
                f"add.u32 at, low, {2 * s.columns * step}; mov.b64 desc, {{at,high}};",
                f"wgmma.mma_async.sync.aligned.{shape} {acc}, {a}, desc, {keep}, 1, 1, 0;",
            ]
        lines.append("wgmma.commit_group.sync.aligned;")
    return lines


def _place(s: Scores, k: int) -> list[str]:
    """Where this thread's score of tile k goes: its position, its address."""
    return [
        "setp.eq.u32 leader, q, 0; setp.lt.u32 small, q, 2;",
        f"selp.b32 pos, p{k}_0, p{k}_1, leader; selp.b32 a, 0, 8, leader; add.u32 a, a, place;",
        f"shl.b32 index, i{k}_, 6; mul.lo.u32 b, begin, {s.group}; add.u32 index, index, b;",
        f"add.u32 index, index, a; setp.lt.and.u32 small, index, {s.outputs}, small;",
        "mul.wide.u32 q64, index, 4; add.s64 p64, row, q64;",
    ]


def _reduce(s: Scores) -> list[str]:
    """Rounded dots, ReLU, rounded products with the weights, their sum: one score a key."""
    lines = []
    for t in range(s.tile_rows):
        if s.tile_rows > 1:
            lines += [_weights(s, t)]
        lines += [f"mov.b32 d{i}, 0;" for i in range(4)]
        for j in range(4):
            for half in range(2):
                v, at = f"h{2 * j + half}", 16 * t + 4 * j + 2 * half
                lines += [
                    f"cvt.rn.relu.bf16x2.f32 {v}, acc{at + 1}, acc{at};",
                    f"mul.rn.bf16x2 {v}, {v}, w{j};",
                ]
        for j in range(2):
            a = ",".join(f"h{4 * j + i}" for i in range(4))
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{d0,d1,d2,d3}}, {{{a}}}, {{one,one}}, {{d0,d1,d2,d3}};"
            )
        lines += [
            "selp.b32 v, d0, d2, leader; cvt.rn.bf16.f32 half, v; mov.b32 v, {zero,half};",
            f"setp.lt.u32 p, pos, vis{t}; selp.b32 v, v, inf, p;",
        ]
        guard = "small"
        if s.row_tiles > 1:
            lines += [f"add.u32 a, first, {t}; setp.lt.and.u32 r, a, {s.rows}, small;"]
            guard = "r"
        lines += [f"@{guard} st.global.b32 [p64+{4 * s.outputs * t}], v;"]
    return lines


def _weights(s: Scores, t: int) -> str:
    return (
        "shl.b32 a, q, 4; add.u32 a, a, sm;"
        f"ld.shared.v4.b32 {{w0,w1,w2,w3}}, [a+{s.weights + 64 * t}];"
    )


def _tiles(s: Scores) -> list[str]:
    """All tiles of a round: warpgroups take turns, each with ``depth`` tiles in flight."""
    per_tile = TILE // s.group
    lines = [
        f"add.u32 tiles, count, {per_tile - 1}; shr.u32 tiles, tiles, {per_tile.bit_length() - 1};",
        "mov.b32 tile, wg;",
    ]
    if s.tile_rows == 1:
        lines += [_weights(s, 0)]
    for k in range(s.depth):
        lines += _load(s, k)
    lines += ["NEXT:"]
    for k in range(s.depth):
        lines += [
            f"setp.ge.u32 p, i{k}_, tiles; @p bra SCORED;",
            *_multiply(s, k),
            *_place(s, k),
            *_load(s, k),
            "wgmma.wait_group.sync.aligned 0;",
            *_reduce(s),
        ]
    return [*lines, "bra NEXT;", "SCORED:"]


def _nothing_behind(s: Scores) -> list[str]:
    """-inf for the entries behind the last tile that somebody sees."""
    lines = [
        f"add.u32 a, most, {s.group - 1}; and.b32 a, a, {0xFFFFFFFF ^ s.group - 1:#x};",
        f"shl.b32 b, tid, 2; add.u32 a, a, b; mul.lo.u32 b, split, {4 * s.threads};",
        "add.u32 i, a, b;",
        f"BEHIND: setp.ge.u32 p, i, {s.entries}; @p bra END; mul.wide.u32 q64, i, 4;",
        "add.s64 p64, row, q64;",
    ]
    for t in range(s.tile_rows):
        guard = ""
        if s.row_tiles > 1:
            lines += [f"add.u32 a, first, {t}; setp.lt.u32 r, a, {s.rows};"]
            guard = "@r "
        lines += [f"{guard}st.global.v4.b32 [p64+{4 * s.outputs * t}], {{inf,inf,inf,inf}};"]
    return [*lines, f"add.u32 i, i, {4 * s.threads * s.splits}; bra BEHIND;", "END:"]
