"""The end of a row of ``seesaw_ptx``: both warpgroups' sums, the sink, the inverse rotation, the
stores.
"""

from pallas_kernels.inline_ptx import f32
from pallas_kernels.sparse_attention.attend_ptx import LOG2E, thread
from pallas_kernels.sparse_attention.attend_shape import (
    BARRIER_CONSUMERS,
    CONSUMERS,
    MAX_HEADS,
    ROPE,
    SHIFT,
    WIDTH,
    Seesaw,
)
from pallas_kernels.sparse_attention.merge_ptx import place_outputs, rotate

MEET = f"barrier.sync {BARRIER_CONSUMERS}, {CONSUMERS};"


def finish(s: Seesaw) -> list[str]:
    """Normalised outputs to shared memory, over the queries."""
    lines = [
        *thread(),
        *[
            f"shfl.sync.bfly.b32 a, l{h}, {lanes}, 31, 0xffffffff; add.f32 l{h}, l{h}, a;"
            for h in range(2)
            for lanes in (1, 2)
        ],
        "mad.lo.u32 head, warp, 16, gr; setp.eq.u32 p, quad, 0; mad.lo.u32 c, head, 4, sm;",
        f"mad.lo.u32 a, wg, {4 * MAX_HEADS}, c;",
        f"@p st.shared.b32 [a+{s.sums}], l0; @p st.shared.b32 [a+{s.sums + 32}], l1;",
    ]
    for h in range(2):
        lines += [
            f"add.u32 a, head, {8 * h}; setp.lt.u32 p, a, {s.heads};",
            "mul.wide.u32 q64, a, 4; add.s64 src, sinks, q64;",
            f"mov.b32 sink{h}, 0; @p ld.global.b32 sink{h}, [src];",
        ]
    lines += [
        # Eight dims of every fourth head are this thread's to store.
        "and.b32 b, tid, 63; setp.ge.u32 more, b, 56; sub.u32 a, b, 56;",
        f"shl.b32 a, a, 2; mad.lo.u32 a, row, {ROPE // 2}, a; mul.wide.s32 q64, a, 4;",
        "add.s64 da, cosines, q64; add.s64 db, sines, q64;",
        "@more ld.global.v4.b32 {cs0,cs1,cs2,cs3}, [da];",
        "@more ld.global.v4.b32 {sn0,sn1,sn2,sn3}, [db];",
        f"{MEET} xor.b32 a, wg, 1; mad.lo.u32 a, a, {4 * MAX_HEADS}, c;",
        f"ld.shared.b32 x0, [a+{s.sums}]; ld.shared.b32 x1, [a+{s.sums + 32}];",
    ]
    for h in range(2):
        lines += [
            f"add.f32 l{h}, l{h}, x{h};",
            f"mul.f32 sink{h}, sink{h}, {f32(LOG2E)}; max.f32 a, m{h}_, sink{h};",
            f"sub.f32 b, m{h}_, a; ex2.approx.ftz.f32 b, b; sub.f32 c, sink{h}, a;",
            f"ex2.approx.ftz.f32 c, c; fma.rn.f32 c, l{h}, b, c; div.full.f32 inv{h}, b, c;",
            f"mul.f32 inv{h}, inv{h}, {f32(2.0**SHIFT)};",
        ]
    return [*lines, *place_outputs()]


def store(s: Seesaw) -> list[str]:
    """Outputs from shared memory, rotated back, to their row."""
    count = s.heads // 4
    lines = [
        f"{MEET} and.b32 b, tid, 63; shr.u32 seen, tid, 6;",
        f"shr.u32 a, b, 3; mad.lo.u32 place, a, {128 * MAX_HEADS}, sm; and.b32 c, b, 7;",
        "mad.lo.u32 place, seen, 128, place; xor.b32 a, c, seen; shl.b32 a, a, 4;",
        "add.u32 a, a, place; xor.b32 c, c, seen; xor.b32 c, c, 4; shl.b32 c, c, 4;",
        "add.u32 c, c, place;",
        f"mad.lo.u32 d, row, {s.heads}, seen; mul.wide.u32 q64, d, {2 * WIDTH};",
        "add.s64 src, out, q64; mul.wide.u32 q64, b, 16; add.s64 src, src, q64;",
    ]
    for i in range(count):
        names = ",".join(f"o{4 * i + j}" for j in range(4))
        lines.append(f"ld.shared.v4.b32 {{{names}}}, [{'ca'[i % 2 == 0]}+{512 * i}];")
    lines.append(MEET)
    for i in range(count):
        x = [f"o{4 * i + j}" for j in range(4)]
        lines += [
            f"prmt.b32 w0, {x[0]}, {x[1]}, 0x5410; prmt.b32 w1, {x[2]}, {x[3]}, 0x5410;",
            f"prmt.b32 w2, {x[0]}, {x[1]}, 0x7632; prmt.b32 w3, {x[2]}, {x[3]}, 0x7632;",
            *[f"mov.b32 {x[j]}, w{j};" for j in range(4)],
        ]
    lines.append("@!more bra STORE;")
    for i in range(4 * count):
        lines += rotate(f"o{i}", i % 4, inverse=True)
    lines.append("STORE:")
    for i in range(count):
        names = ",".join(f"o{4 * i + j}" for j in range(4))
        lines.append(f"st.global.v4.b32 [src+{2 * WIDTH * 4 * i}], {{{names}}};")
    return lines
