"""Both halves of the output projection as one PTX program: FP8 weights go from memory to operand
registers (``linear.fragment_ptx``), rows of activations are the N side of the products.

A warp's weights are one stream: the first of the second half are on their way while outputs of the
first half cross the cluster. A block stores these to the others once all run, and before it
arrives, so that nobody waits for a block to stay.
"""

from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.linear.fragment_ptx import (
    MEET,
    PIN,
    STEPS,
    UNIT,
    arrange,
    decode_unit,
    spread_scale,
    vector,
)
from pallas_kernels.linear.skinny_ptx import FRAGMENT, LOAD
from pallas_kernels.output_projection.grouped_ptx import round_outputs
from pallas_kernels.output_projection.joint_shape import (
    BLOCKS,
    DEPTH,
    PART,
    STRIP,
    THREADS,
    TOKENS,
    WARPS,
    Joint,
)

BATCH = 4  # loads of inputs that a thread has on their way
AT_ONCE = 8 * WARPS  # a load takes a unit of as many rows


def program(s: Joint) -> list[str]:
    """Operands: o, codes and scales of both halves, parts out (GMEM), SMEM bytes, cluster, rank in
    it.
    """
    lines = [*_registers(), *_start(s), *_fetch(s, 0)]
    for slot in range(DEPTH):
        lines += [*_load(s.k, slot, UNIT * slot), f"ld.global.u8 b{slot}, [sp+{2 * slot}];"]
    lines += [PIN, f"add.s64 wp, wp, {UNIT * DEPTH}; add.s64 sp, sp, {2 * DEPTH};"]
    for first in range(0, _passes(s), BATCH):
        lines += _fetch(s, first) if first else []
        lines += _keep(s, first)
    lines += [f"barrier.sync {BARRIER}, {THREADS};", *_first_half(s), *_exchange(s)]
    lines += _second_half(s)
    return [line for text in lines for line in text.strip().splitlines()]


def _registers() -> list[str]:
    return [
        ".reg .b32 tid,lane,warp,gi,qi,sm,rank,part,strip,kpart,at,left,scale;",
        f".reg .b32 a,b,c,d,t0,t1,t2,x<32>,v<8>,b<{DEPTH}>,w<{8 * BATCH}>,to<{BATCH}>;",
        *[f".reg .b32 r{slot}_<16>;" for slot in range(DEPTH)],
        f".reg .b32 z<3>,far<{BLOCKS}>; .reg .f32 acc<8>,y<2>; .reg .b16 h0;",
        ".reg .b64 wp,sp,wn,sn,op,q64; .reg .pred p,more,big;",
    ]


def _start(s: Joint) -> list[str]:
    """``wp``, ``sp``: this thread's first codes and scales of the first half, ``wn``, ``sn`` of the
    second, ``op``: its first outputs.
    """
    half = s.hidden // BLOCKS
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "shr.u32 gi, lane, 2; and.b32 qi, lane, 3; mov.b32 sm, $6; mov.b32 part, $7;",
        "mov.b32 rank, $8; barrier.cluster.arrive.relaxed;",
        f"and.b32 strip, warp, {s.strips - 1}; div.u32 kpart, warp, {s.strips};",
        # Rows a and columns b of the first half.
        f"mul.lo.u32 a, part, {PART}; mad.lo.u32 a, rank, {s.block_rows}, a;",
        f"mad.lo.u32 a, strip, {STRIP}, a; mul.lo.u32 b, kpart, {s.units * UNIT};",
        f"shr.u32 c, a, 5; mul.lo.u32 c, c, {s.k // 32}; shr.u32 d, b, 5; add.u32 c, c, d;",
        "shr.u32 d, qi, 1; add.u32 c, c, d; cvt.u64.u32 q64, c; add.s64 sp, $2, q64;",
        f"add.u32 a, a, gi; mul.wide.u32 wp, a, {s.k}; mad.lo.u32 b, qi, 16, b;",
        "cvt.u64.u32 q64, b; add.s64 wp, wp, q64; add.s64 wp, wp, $1;",
        # And of the second.
        f"mul.lo.u32 a, rank, {half}; mad.lo.u32 a, warp, {s.tiles * STRIP}, a;",
        f"mul.lo.u32 b, part, {PART}; shr.u32 d, b, 5; shr.u32 c, qi, 1; add.u32 d, d, c;",
        "cvt.u64.u32 sn, d; add.s64 sn, sn, $4; mov.b32 strip, a; add.u32 a, a, gi;",
        f"mul.wide.u32 wn, a, {s.outputs}; mad.lo.u32 b, qi, 16, b; cvt.u64.u32 q64, b;",
        "add.s64 wn, wn, q64; add.s64 wn, wn, $3;",
        f"mul.lo.u32 b, part, {s.rows}; mad.lo.u32 b, qi, 2, b;",
        f"mul.wide.u32 op, b, {4 * s.hidden}; mul.wide.u32 q64, a, 4;",
        "add.s64 op, op, q64; add.s64 op, op, $5;",
    ]


def _load(pitch: int, slot: int, at: int, pointer: str = "wp") -> list[str]:
    """A unit's codes of rows g, g + 8, g + 16 and g + 24."""
    return [
        f"{LOAD} {vector(f'r{slot}_', 4 * r)}, [{pointer}+{at + 8 * pitch * r}];" for r in range(4)
    ]


def _passes(s: Joint) -> int:
    return -(-s.rows * (s.k // UNIT) // AT_ONCE)


def _fetch(s: Joint, first: int) -> list[str]:
    """Loads of inputs: four threads take a unit of a row."""
    lines, items = [], s.rows * (s.k // UNIT)
    for i in range(min(BATCH, _passes(s) - first)):
        lines += [
            f"mad.lo.u32 a, warp, 8, gi; add.u32 a, a, {AT_ONCE * (first + i)};",
            f"setp.lt.u32 p, a, {items}; min.u32 a, a, {items - 1};",
            f"div.u32 b, a, {s.rows}; mul.lo.u32 c, b, {s.rows}; sub.u32 c, a, c;",
            f"mul.lo.u32 d, b, {FRAGMENT}; mad.lo.u32 d, c, 64, d; mad.lo.u32 to{i}, qi, 16, d;",
            f"div.u32 d, part, {s.parts // s.groups}; mad.lo.u32 d, c, {s.groups}, d;",
            f"mul.lo.u32 d, d, {s.k}; mad.lo.u32 d, b, {UNIT}, d; mad.lo.u32 d, qi, 16, d;",
            "mul.wide.u32 q64, d, 2; add.s64 q64, q64, $0;",
            *[
                f"@p ld.global.v4.b32 {vector('w', 8 * i + 4 * half)}, [q64+{16 * half}];"
                for half in range(2)
            ],
            f"add.u32 to{i}, to{i}, sm; @!p mov.b32 to{i}, 0xFFFFFFFF;",
        ]
    return lines


def _keep(s: Joint, first: int) -> list[str]:
    """What ``_fetch`` loaded to shared memory, as each thread will load it: [unit][half][lane][16
    bytes].
    """
    lines = []
    for i in range(min(BATCH, _passes(s) - first)):
        lines.append(f"setp.ne.u32 p, to{i}, 0xFFFFFFFF;")
        for step in range(STEPS):
            at = 8 * i + 2 * step
            lines += arrange(f"w{at}", f"w{at + 1}", f"v{2 * step}", f"v{2 * step + 1}")
        for half in range(2):
            lines.append(f"@p st.shared.v4.b32 [to{i}+{512 * half}], {vector('v', 4 * half)};")
    return lines


def _unit(slot: int, offset: int) -> list[str]:
    """acc += a unit of 32 weight rows times its inputs, at ``at`` in shared memory."""
    lines = spread_scale("scale", f"b{slot}")
    for m in range(2):
        raw = [f"r{slot}_{8 * m + i}" for i in range(8)]
        lines += decode_unit(raw, [f"x{16 * m + i}" for i in range(16)], "scale")
    for half in range(2):
        lines.append(f"ld.shared.v4.b32 {vector('v', 4 * half)}, [at+{offset + 512 * half}];")
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
    lines = [
        *_zero(),
        f"mul.lo.u32 at, kpart, {s.units * FRAGMENT}; mad.lo.u32 at, lane, 16, at;",
        "add.u32 at, at, sm;",
    ]
    turns = s.units // DEPTH - 1
    if turns:
        lines += [f"mov.b32 left, {turns};", "FIRST:"]
        for slot in range(DEPTH):
            lines += [*_unit(slot, FRAGMENT * slot), *_load(s.k, slot, UNIT * slot)]
            lines += [f"ld.global.u8 b{slot}, [sp+{2 * slot}];", PIN]
        lines += [
            f"add.s64 wp, wp, {UNIT * DEPTH}; add.s64 sp, sp, {2 * DEPTH};",
            f"add.u32 at, at, {FRAGMENT * DEPTH};",
            "sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra FIRST;",
        ]
    lines += _scales_of_tile(s)
    for slot in range(DEPTH):
        lines += [*_unit(slot, FRAGMENT * slot), *_load(s.outputs, slot, UNIT * slot, "wn")]
        lines += [f"ld.global.u8 b{slot}, [sp+{2 * slot}];", PIN]
    return lines


def _zero() -> list[str]:
    return [f"mov.f32 acc{i}, 0f00000000;" for i in range(8)]


def _scales_of_tile(s: Joint) -> list[str]:
    """``sp``: scales of the tile whose rows begin at ``strip``."""
    return [f"shr.u32 a, strip, 5; mul.wide.u32 q64, a, {s.outputs // 32}; add.s64 sp, sn, q64;"]


def _exchange(s: Joint) -> list[str]:
    """The first half's outputs, a row and a group of 32 a warp, to all blocks' shared memory in the
    order of inputs.
    """
    lines = [
        f"mul.lo.u32 a, kpart, {TOKENS}; mad.lo.u32 a, qi, 2, a; mul.lo.u32 a, a, {s.pitch};",
        f"and.b32 b, warp, {s.strips - 1}; mad.lo.u32 a, b, {STRIP}, a; add.u32 a, a, gi;",
        f"shl.b32 a, a, 2; add.u32 a, a, sm; add.u32 a, a, {s.sums};",
    ]
    for i in range(8):
        place = i % 2 * s.pitch + 8 * (i // 2)
        lines.append(f"st.shared.f32 [a+{4 * place}], acc{i};")
    lines.append(f"barrier.sync {BARRIER}, {THREADS}; barrier.cluster.wait.acquire;")
    lines += [f"mapa.shared::cluster.u32 far{r}, sm, {r};" for r in range(BLOCKS)]
    groups = s.block_rows // STRIP
    for first in range(0, s.rows * groups, WARPS):
        label = f"SENT{first}"
        lines += [
            f"add.u32 a, warp, {first}; setp.ge.u32 p, a, {s.rows * groups}; @p bra {label};",
            # Row c of activations, output b of the block, d of the part.
            f"div.u32 c, a, {groups}; mul.lo.u32 b, c, {groups}; sub.u32 b, a, b;",
            f"mad.lo.u32 b, b, {STRIP}, lane; mad.lo.u32 d, rank, {s.block_rows}, b;",
            f"mad.lo.u32 a, c, {s.pitch}, b; shl.b32 a, a, 2; add.u32 a, a, sm;",
            f"ld.shared.f32 y0, [a+{s.sums}];",
        ]
        for n in range(1, s.warps_k):
            lines.append(f"ld.shared.f32 y1, [a+{s.sums + 4 * n * TOKENS * s.pitch}];")
            lines.append("add.f32 y0, y0, y1;")
        lines += ["cvt.rn.bf16.f32 h0, y0;", *(round_outputs() if s.round else [])]
        lines += [
            # Column d of a unit: 16 q + 4 step + 2 l + h.
            f"shr.u32 a, d, 6; mul.lo.u32 a, a, {FRAGMENT}; mad.lo.u32 a, c, 64, a;",
            "bfe.u32 b, d, 4, 2; mad.lo.u32 a, b, 16, a; bfe.u32 b, d, 3, 1;",
            "mad.lo.u32 a, b, 512, a; bfe.u32 b, d, 2, 1; mad.lo.u32 a, b, 8, a;",
            "and.b32 b, d, 1; mad.lo.u32 a, b, 4, a; bfe.u32 b, d, 1, 1; mad.lo.u32 a, b, 2, a;",
        ]
        for r in range(BLOCKS):
            lines.append(f"add.u32 b, far{r}, a; st.shared::cluster.b16 [b+{s.middle}], h0;")
        lines.append(f"{label}:")
    return [*lines, MEET]


def _second_half(s: Joint) -> list[str]:
    """Tile after tile of 32 outputs; the last has a copy of the code without loads at its end."""
    lines = [f"mad.lo.u32 at, lane, 16, sm; add.u32 at, at, {s.middle};"]
    if s.tiles > 1:
        lines += [f"mov.b32 left, {s.tiles - 1};", "SECOND:", *_tile(s, more=True)]
        lines += ["sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra SECOND;"]
    return [*lines, *_tile(s, more=False)]


def _tile(s: Joint, *, more: bool) -> list[str]:
    """A tile's units; those of ``DEPTH`` further on are asked for meanwhile, if there are ``more``
    of the next tile.
    """
    lines, last = _zero(), PART // UNIT - DEPTH
    for u in range(PART // UNIT):
        slot = u % DEPTH
        if u == last and more:
            lines += [f"add.u32 strip, strip, {STRIP}; add.s64 wn, wn, {STRIP * s.outputs};"]
            lines += _scales_of_tile(s)
        lines += _unit(slot, FRAGMENT * u)
        ahead = u + DEPTH if u < last else u - last
        if u < last or more:
            lines += [*_load(s.outputs, slot, UNIT * ahead, "wn")]
            lines += [f"ld.global.u8 b{slot}, [sp+{2 * ahead}];", PIN]
    return [*lines, *_store(s)]


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
