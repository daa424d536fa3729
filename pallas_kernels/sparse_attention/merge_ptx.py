"""The end of the attention kernel, as PTX: outputs of the blocks of a cluster in one softmax, the
inverse rotation, the stores.
"""

import math

from pallas_kernels.inline_ptx import f32
from pallas_kernels.sparse_attention.attend_shape import (
    BARRIER_CONSUMERS,
    CONSUMERS,
    MAX_HEADS,
    QUERY_BYTES,
    ROPE,
    WIDTH,
    Attend,
)

# All threads of a cluster meet; after SHOW they see what the others stored in shared memory before.
SHOW = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
ARRIVE = "barrier.cluster.arrive.relaxed.aligned;"
WAIT = "barrier.cluster.wait.acquire.aligned;"
MEET = f"{ARRIVE} {WAIT}"


def rotate(word: str, j: int, *, inverse: bool) -> list[str]:
    """A pair of dims of a bf16x2 word by angle j of cs and sn."""
    signs = ("", "neg.f32 d, d;") if inverse else ("neg.f32 d, d;", "")
    return [
        f"shl.b32 even, {word}, 16; and.b32 odd, {word}, 0xFFFF0000;",
        f"mov.b32 d, odd; {signs[0]} mul.f32 turned0, d, sn{j};",
        f"fma.rn.f32 turned0, even, cs{j}, turned0;",
        f"mov.b32 d, even; {signs[1]} mul.f32 turned1, d, sn{j};",
        f"fma.rn.f32 turned1, odd, cs{j}, turned1;",
        f"cvt.rn.bf16x2.f32 {word}, turned1, turned0;",
    ]


def place_outputs() -> list[str]:
    """A warpgroup's outputs o times inv to shared memory, over the queries, as bf16."""
    lines = [
        f"mad.lo.u32 place, wg, {4 * 128 * MAX_HEADS}, sm; mad.lo.u32 place, head, 128, place;",
        "mad.lo.u32 place, gr, 16, place; mad.lo.u32 place, quad, 4, place;",
    ]
    for j in range(8):
        lines += [f"xor.b32 c, place, {16 * j};"]
        for block in range(4):
            for h in range(2):
                first = 4 * (8 * block + j) + 2 * h
                lines += [
                    f"mul.f32 a, o{first}, inv{h}; mul.f32 b, o{first + 1}, inv{h};",
                    "cvt.rn.bf16x2.f32 a, b, a;",
                    f"st.shared.b32 [c+{128 * MAX_HEADS * block + 1024 * h}], a;",
                ]
    return lines


def merge(s: Attend) -> list[str]:
    """Consumers meet, take the heads of their block in turn, and stay while others read theirs."""
    alone = f"barrier.sync {BARRIER_CONSUMERS}, {CONSUMERS};"
    share = s.heads // s.splits
    return [
        SHOW if s.splits > 1 else alone,
        # A thread has eight dims of every fourth head.
        "and.b32 b, tid, 63; shr.u32 seen, tid, 6; setp.ge.u32 more, b, 56; sub.u32 a, b, 56;",
        f"shl.b32 a, a, 2; mad.lo.u32 a, query, {ROPE // 2}, a; mul.wide.s32 q64, a, 4;",
        "add.s64 da, cosines, q64; add.s64 db, sines, q64;",
        "@more ld.global.v4.b32 {cs0,cs1,cs2,cs3}, [da];",
        "@more ld.global.v4.b32 {sn0,sn1,sn2,sn3}, [db];",
        f"shr.u32 a, b, 3; mad.lo.u32 place, a, {128 * MAX_HEADS}, sm; mul.wide.u32 q64, b, 16;",
        "and.b32 quad, b, 7; add.s64 out, out, q64;",
        f"HEAD: setp.ge.u32 p, seen, {share}; @p bra LEAVE;",
        f"mad.lo.u32 head, split, {share}, seen; and.b32 a, head, 7; xor.b32 a, a, quad;",
        "shl.b32 a, a, 4; mad.lo.u32 a, head, 128, a; add.u32 a, a, place;",
        *(_one_block() if s.splits == 1 else _blocks(s)),
        "@!more bra STORE;",
        *[line for j in range(4) for line in rotate(f"w{j}", j, inverse=True)],
        f"STORE: mad.lo.u32 a, row, {s.heads}, head; mul.wide.u32 q64, a, {2 * WIDTH};",
        "add.s64 src, out, q64; st.global.v4.b32 [src], {w0,w1,w2,w3};",
        "add.u32 seen, seen, 4; bra HEAD;",
        "LEAVE: bar.warp.sync 0xffffffff;",
        MEET if s.splits > 1 else "",
        "bra DONE;",
    ]


def _one_block() -> list[str]:
    return [
        "ld.shared.v4.b32 {x0,x1,x2,x3}, [a];",
        "prmt.b32 w0, x0, x1, 0x5410; prmt.b32 w1, x2, x3, 0x5410;",
        "prmt.b32 w2, x0, x1, 0x7632; prmt.b32 w3, x2, x3, 0x7632;",
    ]


def _blocks(s: Attend) -> list[str]:
    """Each block's outputs by its part of the sum, in the order of the blocks."""
    lines = [
        f"mul.lo.u32 c, query, {s.groups}; sub.u32 c, row, c; mad.lo.u32 c, c, {s.heads}, head;",
        "mad.lo.u32 b, head, 8, sm; mul.wide.u32 q64, c, 4; add.s64 src, sinks, q64;",
        f"ld.global.b32 sink0, [src]; mul.f32 sink0, sink0, {f32(math.log2(math.e))};",
        "mov.b32 mx0, sink0;",
    ]
    for r in range(s.splits):
        names = ",".join(f"o{4 * r + j}" for j in range(4))
        m, weight = f"o{64 + r}", f"o{80 + r}"
        lines += [
            f"mapa.shared::cluster.u32 c, b, {r}; mapa.shared::cluster.u32 d, a, {r};",
            f"ld.shared::cluster.v2.b32 {{{m},{weight}}}, [c+{QUERY_BYTES}];",
            f"ld.shared::cluster.v4.b32 {{{names}}}, [d]; max.f32 mx0, mx0, {m};",
        ]
    lines += ["sub.f32 sink0, sink0, mx0; ex2.approx.ftz.f32 inv0, sink0;"]
    for r in range(s.splits):
        m, weight = f"o{64 + r}", f"o{80 + r}"
        lines += [
            f"sub.f32 {m}, {m}, mx0; ex2.approx.ftz.f32 {m}, {m};",
            f"mul.f32 {weight}, {weight}, {m}; add.f32 inv0, inv0, {weight};",
        ]
    lines += ["rcp.approx.ftz.f32 inv0, inv0;", *[f"mov.b32 o{96 + j}, 0;" for j in range(8)]]
    for r in range(s.splits):
        lines.append(f"mul.f32 c, o{80 + r}, inv0;")
        for j in range(4):
            word = f"o{4 * r + j}"
            lines += [
                f"shl.b32 even, {word}, 16; and.b32 odd, {word}, 0xFFFF0000;",
                f"fma.rn.f32 o{96 + j}, even, c, o{96 + j};",
                f"fma.rn.f32 o{100 + j}, odd, c, o{100 + j};",
            ]
    lines += [f"cvt.rn.bf16x2.f32 w{j}, o{97 + 2 * j}, o{96 + 2 * j};" for j in range(4)]
    return lines
