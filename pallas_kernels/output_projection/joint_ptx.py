"""Both halves of the output projection as one PTX program: FP8 weights go from memory through a
ring in shared memory to operand registers (``linear.fragment_ptx``), rows of activations are the N
side of the products.

A warp's weights are one stream of units: the first of the second half are on their way while
outputs of the first half cross the cluster. A thread reads only what it copied itself, so that
warps wait for nobody but their own copies, in order. A block stores its outputs to the others once
all run; each goes on when it has all, so that it stays for what is sent to it, and nobody waits for
stores of its own.
"""

from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.linear.fragment_ptx import (
    PIN,
    STEPS,
    UNIT,
    arrange,
    decode_unit,
    divide,
    spread_scale,
    vector,
)
from pallas_kernels.output_projection.grouped_ptx import round_outputs
from pallas_kernels.output_projection.joint_shape import (
    BLOCKS,
    PART,
    PIECE,
    STRIP,
    THREADS,
    TOKENS,
    TURN,
    UNIT_BYTES,
    WARPS,
    Joint,
)

COPY = "cp.async.cg.shared.global"
SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
COMMIT = "cp.async.commit_group;"
TILE = PART // UNIT  # units


def program(s: Joint) -> list[str]:
    """Operands: o, codes and scales of both halves, parts out (GMEM), SMEM bytes, cluster, rank in
    it.
    """
    lines = [*_registers(s), *_start(s), *_inputs(s), *_scales(s)]
    lines += [COMMIT, *_place(s), *_stream("wa", s.k)]
    for u in range(s.depth):
        lines += [*_copy(s.k, UNIT * u, u), COMMIT]
    # All blocks run, and their barriers are ready.
    lines += [f"add.s64 wp, wp, {UNIT * s.depth};", "barrier.cluster.wait.acquire;"]
    lines.append(f"cp.async.wait_group {s.depth};")
    lines += [f"barrier.sync {BARRIER}, {THREADS};", *_first_half(s), *_exchange(s)]
    lines += _second_half(s)
    return [line for text in lines for line in text.strip().splitlines()]


def _registers(s: Joint) -> list[str]:
    tasks = _tasks(s)
    return [
        ".reg .b32 tid,lane,warp,gi,qi,sm,bar,rank,part,strip,kpart,mine,at,sc,slot,end,left,tile;",
        ".reg .b32 a,b,c,d,t0,t1,t2,scale,r<16>,x<32>,w<8>,v<8>; .reg .f32 acc<8>;",
        f".reg .b32 far,told,task<{tasks}>,z<{3 * tasks}>,sent<{4 * tasks}>; .reg .b16 h<{tasks}>;",
        f".reg .f32 y<{s.warps_k * tasks}>; .reg .b64 wp,wa,wb,xp,sp,sn,op,q64;",
        ".reg .pred p,more,next,big;",
    ]


def _start(s: Joint) -> list[str]:
    """``wa``, ``wb``: the warp's codes of both halves, ``sp``, ``sn``: its scales."""
    half = s.hidden // BLOCKS
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "shr.u32 gi, lane, 2; and.b32 qi, lane, 3; mov.b32 sm, $6; mov.b32 part, $7;",
        f"mov.b32 rank, $8; add.u32 bar, sm, {s.barrier}; setp.eq.u32 p, tid, 0; @!p bra BEGUN;",
        f"mbarrier.init.shared::cta.b64 [bar], 1; mov.b32 a, {2 * s.rows * PART};",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], a;",
        "fence.mbarrier_init.release.cluster;",
        "BEGUN: barrier.cluster.arrive.relaxed;",
        f"and.b32 strip, warp, {s.strips - 1}; {divide('kpart', 'warp', s.strips)}",
        # Rows from a and columns from b of the first half.
        f"mul.lo.u32 a, part, {PART}; mad.lo.u32 a, rank, {s.block_rows}, a;",
        f"mad.lo.u32 a, strip, {STRIP}, a; mul.lo.u32 b, kpart, {s.units * UNIT};",
        f"mul.wide.u32 wa, a, {s.k}; cvt.u64.u32 q64, b; add.s64 wa, wa, q64; add.s64 wa, wa, $1;",
        f"shr.u32 a, a, 5; shr.u32 b, b, 5; mad.lo.u32 a, a, {s.k // 32}, b;",
        "cvt.u64.u32 sp, a; add.s64 sp, sp, $2;",
        # And of the second.
        f"mul.lo.u32 a, rank, {half}; mad.lo.u32 a, warp, {s.tiles * STRIP}, a;",
        f"mul.lo.u32 b, part, {PART}; mul.wide.u32 wb, a, {s.outputs}; cvt.u64.u32 q64, b;",
        "add.s64 wb, wb, q64; add.s64 wb, wb, $3; shr.u32 c, a, 5; shr.u32 b, b, 5;",
        f"mad.lo.u32 c, c, {s.outputs // 32}, b; cvt.u64.u32 sn, c; add.s64 sn, sn, $4;",
        f"mul.lo.u32 b, part, {s.rows}; mad.lo.u32 b, qi, 2, b; add.u32 a, a, gi;",
        f"mul.wide.u32 op, b, {4 * s.hidden}; mul.wide.u32 q64, a, 4;",
        "add.s64 op, op, q64; add.s64 op, op, $5;",
    ]


def _inputs(s: Joint) -> list[str]:
    """Copies rows of o to [unit][half][row][quad thread][16 bytes]."""
    lines = [
        f"{divide('a', 'part', s.parts // s.groups)} mul.lo.u32 a, a, {2 * s.k};",
        f"mad.lo.u32 a, tid, {PIECE}, a; cvt.u64.u32 xp, a; add.s64 xp, xp, $0;",
        f"shr.u32 a, tid, 3; mad.lo.u32 a, a, {s.fragment}, sm; and.b32 b, tid, 1;",
        f"mad.lo.u32 a, b, {s.fragment // 2}, a; bfe.u32 b, tid, 1, 2;",
        f"mad.lo.u32 a, b, {PIECE}, a;",
    ]
    for first in range(0, 2 * s.k, PIECE * THREADS):
        for row in range(s.rows):
            to = first // (2 * UNIT) * s.fragment + 4 * PIECE * row
            source = 2 * row * s.groups * s.k + first
            lines.append(f"{COPY} [a+{to}], [xp+{source}], {PIECE};")
    return lines


def _scales(s: Joint) -> list[str]:
    """Copies the warp's scales; ``sc``: those of this thread's columns."""
    first = 2 * s.units
    return [
        f"mad.lo.u32 sc, warp, {s.warp_scales}, sm; add.u32 sc, sc, {s.scales};",
        f"mad.lo.u32 a, lane, {PIECE}, sc; setp.lt.u32 p, lane, {first // PIECE};",
        f"mad.wide.u32 q64, lane, {PIECE}, sp; @p {COPY} [a], [q64], {PIECE};",
        f"mad.wide.u32 q64, lane, {s.outputs // 32}, sn; setp.lt.u32 p, lane, {s.tiles};",
        f"@p {COPY} [a+{first}], [q64], {PIECE}; shr.u32 a, qi, 1; add.u32 sc, sc, a;",
    ]


def _place(s: Joint) -> list[str]:
    """``slot``: this thread's place in the ring, which starts again at ``end``; ``mine``: its place
    in a unit of inputs. Rows past the last are the last again.
    """
    ring = s.depth * UNIT_BYTES
    return [
        f"mad.lo.u32 slot, warp, {ring}, sm; mad.lo.u32 slot, lane, {PIECE}, slot;",
        f"add.u32 slot, slot, {s.codes}; add.u32 end, slot, {ring};",
        f"min.u32 a, gi, {s.rows - 1}; mad.lo.u32 mine, a, {4 * PIECE}, sm;",
        f"mad.lo.u32 mine, qi, {PIECE}, mine;",
    ]


def _stream(base: str, pitch: int) -> list[str]:
    """``wp``: this thread's codes of the rows at ``base``."""
    return [f"mad.wide.u32 wp, gi, {pitch}, {base}; mad.wide.u32 wp, qi, {PIECE}, wp;"]


def _copy(pitch: int, at: int, slot: int, guard: str = "") -> list[str]:
    """A unit's codes of rows g, g + 8, g + 16 and g + 24."""
    return [
        f"{guard}{COPY}.L2::128B [slot+{slot * UNIT_BYTES + 512 * r}],"
        f" [wp+{at + 8 * pitch * r}], {PIECE};"
        for r in range(4)
    ]


def _turns(
    s: Joint, label: str, turns: int, pitch: int, guard: str = "", *, arranged: bool = True
) -> list[str]:
    """Two units after two, each of which makes room for the one ``depth`` further on."""
    if not turns:
        return []
    lines = [f"mov.b32 left, {turns};", f"{label}:"] if turns > 1 else []
    for u in range(TURN):
        lines.append(f"cp.async.wait_group {s.depth - 1};")
        for r in range(4):
            place = u * UNIT_BYTES + 512 * r
            lines.append(f"ld.shared.v4.b32 {vector('r', 4 * r)}, [slot+{place}];")
        lines += [*_copy(pitch, UNIT * u, u, guard), COMMIT, PIN, *_unit(s, u, arranged)]
    lines += [
        f"add.s64 wp, wp, {TURN * UNIT}; add.u32 sc, sc, {2 * TURN};",
        f"add.u32 at, at, {TURN * s.fragment}; add.u32 slot, slot, {TURN * UNIT_BYTES};",
        f"setp.eq.u32 p, slot, end; @p sub.u32 slot, slot, {s.depth * UNIT_BYTES};",
    ]
    if turns > 1:
        lines.append(f"sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra {label};")
    return lines


def _unit(s: Joint, u: int, arranged: bool) -> list[str]:
    """acc += a unit of 32 weight rows times its inputs, which may be in the order of columns."""
    lines = [f"ld.shared.u8 scale, [sc+{2 * u}];", *spread_scale("scale", "scale")]
    for half in range(2):
        place = u * s.fragment + half * s.fragment // 2
        four = vector("v" if arranged else "w", 4 * half)
        lines.append(f"ld.shared.v4.b32 {four}, [at+{place}];")
    for i in () if arranged else range(0, 2 * STEPS, 2):
        lines += arrange(f"w{i}", f"w{i + 1}", f"v{i}", f"v{i + 1}")
    for m in range(2):
        raw = [f"r{8 * m + i}" for i in range(8)]
        lines += decode_unit(raw, [f"x{16 * m + i}" for i in range(16)], "scale")
    for step in range(STEPS):
        for m in range(2):
            acc = vector("acc", 4 * m)
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                f" {acc}, {vector('x', 16 * m + 4 * step)}, {vector('v', 2 * step, 2)}, {acc};"
            )
    return lines


def _first_half(s: Joint) -> list[str]:
    """All units of the warp; the last ones make room for the second half's first."""
    return [
        *_zero(),
        f"mad.lo.u32 at, kpart, {s.units * s.fragment}, mine;",
        *_turns(s, "FIRST", (s.units - s.depth) // TURN, s.k, arranged=False),
        *_stream("wb", s.outputs),
        *_turns(s, "LAST", s.depth // TURN, s.outputs, arranged=False),
    ]


def _zero() -> list[str]:
    return [f"mov.f32 acc{i}, 0f00000000;" for i in range(8)]


def _tasks(s: Joint) -> int:
    """Rows by groups of 32 outputs of the first half that a warp adds up and sends."""
    return -(-s.rows * s.strips // WARPS)


def _exchange(s: Joint) -> list[str]:
    """The first half's outputs to all blocks' shared memory, as inputs of the second."""
    return [
        *_publish(s),
        f"barrier.sync {BARRIER}, {THREADS};",
        *_add(s),
        *round_outputs(_tasks(s) if s.round else 0),
        *_send(s),
        "SENT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [bar], 0;",
        "@!p bra SENT;",
    ]


def _publish(s: Joint) -> list[str]:
    """The warp's sums to shared memory, [warps_k, tokens, pitch], once no warp needs inputs."""
    lines = [
        f"mul.lo.u32 a, kpart, {TOKENS}; mad.lo.u32 a, qi, 2, a; mul.lo.u32 a, a, {s.pitch};",
        f"mad.lo.u32 a, strip, {STRIP}, a; add.u32 a, a, gi; mad.lo.u32 a, a, 4, sm;",
        f"barrier.sync {BARRIER}, {THREADS};",
    ]
    for i in range(8):
        place = i % 2 * s.pitch + 8 * (i // 2)
        lines.append(f"st.shared.f32 [a+{4 * place}], acc{i};")
    return lines


def _add(s: Joint) -> list[str]:
    """h: outputs of the warp's tasks, task: their places. Past the last is the last again."""
    lines = []
    for i in range(_tasks(s)):
        lines += [
            f"add.u32 a, warp, {WARPS * i}; min.u32 a, a, {s.rows * s.strips - 1};",
            # Row b, group a.
            f"{divide('b', 'a', s.strips)} and.b32 a, a, {s.strips - 1};",
            f"mul.lo.u32 task{i}, b, {4 * PIECE}; mad.lo.u32 task{i}, a, {2 * PIECE}, task{i};",
            f"mad.lo.u32 a, a, {STRIP}, lane; mad.lo.u32 a, b, {s.pitch}, a;",
            "mad.lo.u32 a, a, 4, sm;",
        ]
        for n in range(s.warps_k):
            place = 4 * n * TOKENS * s.pitch
            lines.append(f"ld.shared.f32 y{s.warps_k * i + n}, [a+{place}];")
    for i in range(_tasks(s)):
        first = s.warps_k * i
        lines += [f"add.f32 y{first}, y{first}, y{first + n};" for n in range(1, s.warps_k)]
        lines.append(f"cvt.rn.bf16.f32 h{i}, y{first};")
    return lines


def _send(s: Joint) -> list[str]:
    """32 outputs, arranged, are four pieces: a lane sends one of them to one block."""
    half = s.fragment // 2
    lines = [
        f"mad.lo.u32 d, rank, {s.fragment}, sm; add.u32 d, d, {s.middle};",
        f"bfe.u32 a, lane, 3, 1; mad.lo.u32 c, a, {half}, d; shr.u32 a, lane, 4;",
        f"mad.lo.u32 c, a, {PIECE}, c; bfe.u32 a, lane, 2, 1; mad.lo.u32 c, a, 8, c;",
        "and.b32 a, lane, 1; mad.lo.u32 c, a, 4, c;",
        "bfe.u32 a, lane, 1, 1; mad.lo.u32 c, a, 2, c;",
    ]
    for i in range(_tasks(s)):
        lines.append(f"add.u32 a, c, task{i}; st.shared.b16 [a], h{i};")
    lines += [
        f"{PIN} and.b32 a, lane, 1; mad.lo.u32 d, a, {half}, d; bfe.u32 a, lane, 1, 1;",
        f"mad.lo.u32 d, a, {PIECE}, d; shr.u32 a, lane, 2; mapa.shared::cluster.u32 far, d, a;",
        "mapa.shared::cluster.u32 told, bar, a;",
    ]
    sent = [vector("sent", 4 * i) for i in range(_tasks(s))]
    for i, four in enumerate(sent):
        lines.append(f"add.u32 a, d, task{i}; ld.shared.v4.b32 {four}, [a];")
    for i, four in enumerate(sent):
        lines += [
            f"add.u32 b, warp, {WARPS * i}; setp.lt.u32 p, b, {s.rows * s.strips};",
            f"add.u32 b, far, task{i}; @p {SEND} [b], {four}, [told];",
        ]
    return lines


def _second_half(s: Joint) -> list[str]:
    """Tile after tile of 32 outputs; the last units of one make room for the next one's first."""
    return [
        f"mov.b32 tile, {s.tiles}; TILE:",
        *_zero(),
        f"add.u32 at, mine, {s.middle};",
        *_turns(s, "NEAR", (TILE - s.depth) // TURN, s.outputs),
        f"add.s64 wp, wp, {STRIP * s.outputs - PART}; setp.ne.u32 next, tile, 1;",
        *_turns(s, "FAR", s.depth // TURN, s.outputs, "@next "),
        *_store(s),
        "sub.u32 tile, tile, 1; setp.ne.u32 more, tile, 0; @more bra TILE;",
    ]


def _store(s: Joint) -> list[str]:
    """The sums of a tile, those of live rows; steps to the next."""
    lines = []
    for token in range(2):
        if token < s.rows:
            lines.append(f"mad.lo.u32 a, qi, 2, {token}; setp.lt.u32 p, a, {s.rows};")
            for eight in range(4):
                at = 4 * (token * s.hidden + 8 * eight)
                lines.append(f"@p st.global.f32 [op+{at}], acc{token + 2 * eight};")
    return [*lines, f"add.s64 op, op, {4 * STRIP};"]
