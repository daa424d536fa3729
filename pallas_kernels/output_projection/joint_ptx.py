"""Both halves of the output projection as one PTX program: FP8 weights go through shared memory
(``joint_ring_ptx``) to operand registers and become f16 (``linear.halves_ptx``), rows of
activations are the N side of products, four of them twice. Threads whose column belongs to the
other 32-column group than their bytes load zeros, which are in shared memory once.

A warp's weights are one stream: the first of the second half are on their way while outputs of the
first half go through memory to the blocks of their part, which count each other.
"""

from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.linear.fragment_ptx import FRAGMENT, STEPS, UNIT, vector
from pallas_kernels.linear.halves_ptx import (
    BIAS,
    HIGHEST,
    MMA,
    TOP,
    decode,
    raise_group,
    to_halves,
)
from pallas_kernels.output_projection import joint_ring_ptx as ring
from pallas_kernels.output_projection.grouped_ptx import round_outputs
from pallas_kernels.output_projection.joint_shape import (
    BLOCKS,
    COLUMNS,
    PART,
    POWERS,
    SIDES,
    STRIP,
    TOKENS,
    WARPS,
    WORKERS,
    Joint,
)

BATCH = 16  # loads of inputs that a thread has on their way
AT_ONCE = 8 * WARPS  # units of a row that a load takes
UNITS = COLUMNS // UNIT  # of a slot
FEWER = 1 << 16  # parts are
SUMS, STORED = "SUMS", "STORED"  # where branches lead that no block takes
INVERSE = 2 * BIAS << 23  # less a power of two: its inverse
SYNC = f"barrier.sync {BARRIER}, {WORKERS};"


def program(s: Joint) -> list[str]:
    """Operands: o, codes and scales of both halves, a zeroed counter for each part, parts out, what
    blocks exchange (GMEM), SMEM bytes, part, rank in it.
    """
    lines = [*_registers(s), *_start(s), *ring.start(s)]
    lines += [f"setp.lt.u32 p, tid, {WORKERS}; @p bra WORK;", *ring.copy(s), "WORK:"]
    lines += [*_fetch(s, 0), *ring.load_scales(s)]
    for first in range(0, len(_passes(s)), BATCH):
        lines += _fetch(s, first) if first else []
        lines += [_fence(first, SUMS), *_keep(s, first)]
    lines += [*ring.store_scales(s), SYNC, *_first_half(s), *_exchange(s), *_second_half(s)]
    lines.append("END:")
    return [line for text in lines for line in text.strip().splitlines()]


def _fence(n: int, label: str) -> str:
    """Nothing is moved past this n-th branch, which no block takes: ``part`` is small."""
    return f"setp.eq.u32 p, part, {FEWER + n}; @p bra.uni {label};"


def _registers(s: Joint) -> list[str]:
    twice = 2 * s.fours  # of two units in turn
    return [
        ".reg .b32 tid,lane,warp,gi,qi,sm,rank,part,strip,kpart,side,half,spot,undo,at,step;",
        ".reg .b32 middle,pk,nx,put,slot,full,last,par,from,size,sc,left,scale,own,a,b,c,d,t0,t1;",
        f".reg .b32 z<3>,x<32>,v<{8 * twice}>,w<{8 * BATCH}>,r0_<16>,r1_<16>;",
        f".reg .b32 e<{ring.first_loads(s)}>,f<{ring.second_loads(s)}>; .reg .b16 h<2>;",
        f".reg .f32 acc<{8 * s.fours}>,c<{8 * twice}>,k<{2 * twice}>,y<2>,lo,hi,nil,up<{BATCH}>;",
        ".reg .b64 wp,wn,src,other,q64,xp,ep,cp;",
        ".reg .pred p,q,more,big,live,upper,in,got;",
    ]


def _start(s: Joint) -> list[str]:
    """``wp``, ``wn``: the warp's first weights of either half, ``put``: where this thread's first
    sums of the second go in shared memory.
    """
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31;",
        f"bfe.u32 warp, tid, 5, {WARPS.bit_length() - 1};",
        "shr.u32 gi, lane, 2; and.b32 qi, lane, 3; mov.b32 sm, $8; mov.b32 part, $9;",
        "mov.b32 rank, $10;",
        f"and.b32 strip, warp, {s.strips - 1}; div.u32 kpart, warp, {s.strips};",
        # The strip's rows a of the first half, columns b on; warps take turns along the columns.
        f"mul.lo.u32 a, part, {PART}; mad.lo.u32 a, rank, {s.block_rows}, a;",
        f"mad.lo.u32 a, strip, {STRIP}, a; mul.lo.u32 b, kpart, {COLUMNS};",
        "cvt.u64.u32 q64, b; add.s64 wp, $1, q64;",
        f"mul.wide.u32 q64, a, {s.k}; add.s64 wp, wp, q64;",
        # And of the second.
        f"and.b32 side, warp, {SIDES - 1}; shr.u32 half, warp, {SIDES.bit_length() - 1};",
        f"mul.lo.u32 a, rank, {s.block_outputs}; mad.lo.u32 a, side, {s.tiles * STRIP}, a;",
        f"mul.wide.u32 q64, a, {s.outputs}; add.s64 wn, $3, q64; mul.lo.u32 b, part, {PART};",
        f"mad.lo.u32 b, half, {COLUMNS}, b; cvt.u64.u32 q64, b; add.s64 wn, wn, q64;",
        # Sums of either half: of rows 2 (q % 2) on and 16 outputs, which ``_join`` leaves here.
        "setp.ge.u32 upper, qi, 2; and.b32 c, qi, 1; shr.u32 d, qi, 1;",
        f"mul.lo.u32 b, half, {s.rows};",
        f"mad.lo.u32 b, c, 2, b; mul.lo.u32 b, b, {s.block_outputs}; mad.lo.u32 a, d, 16, gi;",
        f"mad.lo.u32 a, side, {s.tiles * STRIP}, a; add.u32 b, b, a; mad.lo.u32 put, b, 4, sm;",
        "shr.u32 c, gi, 2; setp.eq.u32 live, c, d; mov.f32 nil, 0f00000000;",
        # Inputs: four threads take a unit b of a row.
        f"mad.lo.u32 b, warp, 8, gi; mad.lo.u32 spot, b, {FRAGMENT}, sm;",
        "mad.lo.u32 spot, qi, 16, spot;",
        f"mad.lo.u32 undo, b, {POWERS}, sm; mad.lo.u32 undo, d, {POWERS // 2}, undo;",
        f"setp.lt.u32 in, b, {(s.k // UNIT - 1) % AT_ONCE + 1};",
        f"div.u32 d, part, {s.parts // s.groups}; mul.lo.u32 d, d, {s.k};",
        f"mad.lo.u32 d, b, {UNIT}, d; mad.lo.u32 d, qi, 16, d;",
        "mul.wide.u32 xp, d, 2; add.s64 xp, xp, $0;",
        f"and.b32 c, tid, {WORKERS - 1}; mad.lo.u32 c, c, {FRAGMENT // WORKERS}, sm;",
        *[f"st.shared.f32 [c+{s.zeros + at}], nil;" for at in range(0, FRAGMENT // WORKERS, 4)],
    ]


def _passes(s: Joint) -> list[tuple[str, int, int]]:
    """Loads of inputs: a guard where a row has no more units, row, first unit."""
    units = s.k // UNIT
    return [
        ("" if first + AT_ONCE <= units else "@in ", row, first)
        for row in range(s.rows)
        for first in range(0, units, AT_ONCE)
    ]


def _fetch(s: Joint, first: int) -> list[str]:
    lines = []
    for i, (guard, row, unit) in enumerate(_passes(s)[first : first + BATCH]):
        at = 2 * (s.groups * s.k * row + UNIT * unit)
        for half in range(2):
            w = vector("w", 8 * i + 4 * half)
            lines.append(f"{guard}ld.global.v4.b32 {w}, [xp+{at + 16 * half}];")
    return lines


def _keep(s: Joint, first: int) -> list[str]:
    """What ``_fetch`` loaded to shared memory, as each thread will load it: [unit][half][row][quad
    thread][16 bytes].
    """
    lines, tasks = [], _passes(s)[first : first + BATCH]
    for i, (guard, row, unit) in enumerate(tasks):
        at = s.powers + POWERS * unit + 4 * row
        lines += [*raise_group(i), f"{guard}st.shared.b32 [undo+{at}], t0;"]
    for i, (guard, row, unit) in enumerate(tasks):
        lines += to_halves(i)
        for half in range(2):
            at, w = FRAGMENT * unit + 64 * row + 512 * half, vector("w", 8 * i + 4 * half)
            lines.append(f"{guard}st.shared.v4.b32 [spot+{at}], {w};")
    return lines


def _slot(s: Joint, name: str, label: str) -> list[str]:
    """The units of the slot whose turn it is. The first half also adds the last products of the
    slot before; in the second they are of another tile.
    """
    lines = [
        *ring.wait(name),
        f"mad.lo.u32 from, gi, {COLUMNS}, slot; mad.lo.u32 from, qi, 16, from;",
        *_codes(0),
    ]
    for u in range(UNITS):
        lines += _codes(u + 1) if u + 1 < UNITS else []
        lines += [*_unit(s, u), *(_add(s, u - 1) if u or label == SUMS else [])]
        lines.append(_fence(1000 + 1000 * (label == SUMS) + u, label))
    return [*lines, *ring.leave()]


def _codes(u: int) -> list[str]:
    """A unit's codes of rows g, g + 8, g + 16 and g + 24."""
    return [
        f"ld.shared.v4.b32 {vector(f'r{u % 2}_', 4 * r)}, [from+{UNIT * u + 8 * COLUMNS * r}];"
        for r in range(4)
    ]


def _unit(s: Joint, u: int) -> list[str]:
    """c = a unit of 32 weight rows times its inputs, those at ``at``, which goes on."""
    lines = [f"ld.shared.u8 scale, [sc+{2 * u}]; shl.b32 scale, scale, 23;"]
    lines += decode(f"r{u % 2}_", "x", 2)
    for e in range(s.fours):
        own = u % 2 * s.fours + e
        for half in range(2):
            v = vector("v", 8 * own + 4 * half)
            lines.append(f"ld.shared.v4.b32 {v}, [at+{512 * half + 256 * e}];")
        lines.append(f"ld.shared.v2.f32 {vector('k', 2 * own, 2)}, [pk+{POWERS * u + 16 * e}];")
        lines += [f"mul.f32 k{i}, k{i}, scale;" for i in (2 * own, 2 * own + 1)]
        for step in range(STEPS):
            for m in range(2):
                x, v = vector("x", 16 * m + 4 * step), vector("v", 8 * own + 2 * step, 2)
                c = vector("c", 8 * own + 4 * m)
                lines.append(f"{MMA} {c}, {x}, {v}, {c if step else '{nil,nil,nil,nil}'};")
    return [*lines, "add.u32 at, at, step;"]


def _sums(s: Joint, each: int) -> list[int]:
    """The ``each`` first of any four rows' eight, without those that are of no live row."""
    return [i for i in range(8 * s.fours) if i % 8 < each and i // 8 * 4 + i % 2 < s.rows]


def _add(s: Joint, slot: int) -> list[str]:
    """acc += the products of ``slot``, which are there once the next unit's are on their way."""
    lines = []
    for i in _sums(s, 8):
        n = 8 * s.fours * (slot % 2) + i
        lines.append(f"fma.rn.f32 acc{i}, c{n}, k{n // 8 * 2 + n % 2}, acc{i};")
    return lines


def _join(s: Joint) -> list[str]:
    """Sums over both column groups: of 16 weight rows in this thread, of the others in the one that
    has their other part.
    """
    lines = []
    for i in _sums(s, 4):
        lines += [
            f"selp.f32 lo, acc{i}, acc{i + 4}, upper; selp.f32 hi, acc{i + 4}, acc{i}, upper;",
            f"shfl.sync.bfly.b32 lo, lo, 2, 31, 0xffffffff; add.f32 acc{i}, hi, lo;",
        ]
    return lines


def _inputs(s: Joint) -> list[str]:
    """``at``, ``pk``: this thread's inputs of unit b, or zeros in banks that others leave, and what
    undoes the powers of two of its columns.
    """
    return [
        f"and.b32 a, gi, 3; mad.lo.u32 a, a, 4, qi; mul.lo.u32 at, b, {FRAGMENT};",
        "mad.lo.u32 at, a, 16, at; shr.u32 a, qi, 1;",
        f"@!live mad.lo.u32 at, a, 32, {s.zeros}; add.u32 at, at, sm;",
        f"mad.lo.u32 pk, b, {POWERS}, sm; mad.lo.u32 pk, a, {POWERS // 2}, pk;",
        f"and.b32 a, qi, 1; mad.lo.u32 pk, a, 8, pk; add.u32 pk, pk, {s.powers};",
    ]


def _first_half(s: Joint) -> list[str]:
    """All units of the warp; meanwhile the first of the second half are asked for."""
    lines = [
        *_zero(s),
        f"mul.lo.u32 b, kpart, {UNITS};",
        *_inputs(s),
        f"selp.b32 step, {FRAGMENT}, 0, live;",
        # What the first unit adds as the one before it.
        *[f"mov.f32 c{i}, nil;" for i in range(8 * s.fours, 16 * s.fours)],
        *[f"mov.f32 k{i}, nil;" for i in range(2 * s.fours, 4 * s.fours)],
    ]
    lines += [f"mov.b32 left, {s.first_slots};", "FIRST:", *_slot(s, "FULL", SUMS)]
    lines += [
        f"add.u32 pk, pk, {POWERS * UNITS * s.warps_k};",
        f"mad.lo.u32 at, step, {UNITS * (s.warps_k - 1)}, at;",
        "sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra FIRST;",
    ]
    return [*lines, *_add(s, UNITS - 1), f"{SUMS}:", *_join(s)]


def _zero(s: Joint) -> list[str]:
    return [f"mov.f32 acc{i}, nil;" for i in range(8 * s.fours)]


def _exchange(s: Joint) -> list[str]:
    """The first half's outputs, a row and a group of 32 a warp, to memory and from there to all
    blocks of the part, in the order of inputs.
    """
    lines = [
        f"mul.lo.u32 a, kpart, {TOKENS}; and.b32 b, qi, 1; mad.lo.u32 a, b, 2, a;",
        f"mul.lo.u32 a, a, {s.pitch}; and.b32 b, warp, {s.strips - 1};",
        f"mad.lo.u32 a, b, {STRIP}, a; shr.u32 b, qi, 1; mad.lo.u32 a, b, 16, a;",
        f"add.u32 a, a, gi; shl.b32 a, a, 2; add.u32 a, a, sm; add.u32 a, a, {s.sums};",
    ]
    for i in _sums(s, 4):
        place = (i // 8 * 4 + i % 2) * s.pitch + 8 * (i % 4 // 2)
        lines.append(f"st.shared.f32 [a+{4 * place}], acc{i};")
    lines += [
        SYNC,
        # Where the value of a lane's column is in a unit of the second half's inputs.
        f"shr.u32 own, lane, 4; bfe.u32 a, lane, 3, 1; mad.lo.u32 own, a, {FRAGMENT // 32}, own;",
        "and.b32 a, lane, 7; shl.b32 own, own, 4; mad.lo.u32 own, a, 2, own;",
        f"mul.wide.u32 ep, part, {s.part_bytes}; add.s64 ep, ep, $7;",
        "mul.wide.u32 cp, part, 4; add.s64 cp, cp, $5;",
    ]
    for first in range(0, s.rows * s.strips, WARPS):
        label = f"SENT{first}"
        lines += [
            f"add.u32 a, warp, {first}; setp.ge.u32 p, a, {s.rows * s.strips}; @p bra {label};",
            # Row c of activations, output b of the block, those from d on of the part.
            f"div.u32 c, a, {s.strips}; mul.lo.u32 b, c, {s.strips}; sub.u32 b, a, b;",
            f"mul.lo.u32 b, b, {STRIP}; mad.lo.u32 d, rank, {s.block_rows}, b; add.u32 b, b, lane;",
            f"mad.lo.u32 a, c, {s.pitch}, b; shl.b32 a, a, 2; add.u32 a, a, sm;",
            f"ld.shared.f32 y0, [a+{s.sums}];",
        ]
        for n in range(1, s.warps_k):
            lines.append(f"ld.shared.f32 y1, [a+{s.sums + 4 * n * TOKENS * s.pitch}];")
            lines.append("add.f32 y0, y0, y1;")
        lines += [
            "cvt.rn.bf16.f32 h0, y0;",
            *_raise_outputs(s),
            f"shr.u32 a, d, 6; mad.lo.u32 b, a, {FRAGMENT}, own; mad.lo.u32 b, c, 64, b;",
            f"and.b32 a, d, {STRIP}; add.u32 b, b, a; cvt.u64.u32 q64, b;",
            "add.s64 q64, q64, ep; st.global.b16 [q64], h0;",
            f"shr.u32 a, d, 5; mul.lo.u32 a, a, {POWERS // 2}; mad.lo.u32 a, c, 4, a;",
            "cvt.u64.u32 q64, a; add.s64 q64, q64, ep; setp.eq.u32 p, lane, 0;",
            f"@p st.global.b32 [q64+{FRAGMENT * (PART // UNIT)}], z2;",
            f"{label}:",
        ]
    return [*lines, *_gather(s)]


def _gather(s: Joint) -> list[str]:
    """The part's inputs of the second half, once all its blocks have stored theirs; the last one to
    see that leaves the counter as it was.
    """
    vectors = s.part_bytes // 16
    lines = [
        f"{SYNC} setp.ne.u32 p, tid, 0; @p bra ARRIVED; fence.acq_rel.gpu;",
        "atom.acq_rel.gpu.global.add.u32 a, [cp], 1;",
        f"ARRIVE: ld.acquire.gpu.global.b32 a, [cp]; setp.lt.u32 q, a, {BLOCKS}; @q bra ARRIVE;",
        f"atom.acq_rel.gpu.global.add.u32 a, [cp], 1; setp.eq.u32 q, a, {2 * BLOCKS - 1};",
        f"mov.b32 a, 0; @q st.global.b32 [cp], a; ARRIVED: {SYNC}",
        "mul.wide.u32 q64, tid, 16; add.s64 ep, ep, q64; mad.lo.u32 b, tid, 16, sm;",
    ]
    inputs = FRAGMENT * (PART // UNIT)
    for first in range(0, vectors, WORKERS):
        guard = f"setp.lt.u32 p, tid, {vectors - first}; @p " if vectors - first < WORKERS else ""
        w = vector("w", 4 * (first // WORKERS))
        lines.append(f"{guard}ld.global.cg.v4.b32 {w}, [ep+{16 * first}];")
    for first in range(0, vectors, WORKERS):
        guard = f"setp.lt.u32 p, tid, {vectors - first}; @p " if vectors - first < WORKERS else ""
        w = vector("w", 4 * (first // WORKERS))
        at = s.middle if 16 * first < inputs else s.powers + POWERS * (s.k // UNIT) - inputs
        lines.append(f"{guard}st.shared.v4.b32 [b+{at + 16 * first}], {w};")
    return [*lines, SYNC]


def _raise_outputs(s: Joint) -> list[str]:
    """The bf16 h0 of a warp to f16 times a power of two; z2 what undoes it."""
    if s.round:
        # Codes of FP8, whose scale is in z2.
        lines = [*round_outputs(), f"cvt.u32.u16 z0, h0; sub.u32 z1, {INVERSE}, z2;"]
    else:
        lines = [
            "cvt.u32.u16 z0, h0; and.b32 z1, z0, 0x7FFF; redux.sync.max.u32 z1, z1, 0xffffffff;",
            f"shr.u32 z1, z1, 7; sub.u32 z1, {TOP}, z1; min.u32 z1, z1, {HIGHEST};",
            f"shl.b32 z1, z1, 23; sub.u32 z2, {INVERSE}, z1;",
        ]
    return [*lines, "shl.b32 z0, z0, 16; mul.f32 y0, z0, z1; cvt.rn.f16.f32 h0, y0;"]


def _second_half(s: Joint) -> list[str]:
    """Tile after tile of 32 outputs, a part of their columns a warp."""
    lines = [f"mad.lo.u32 b, half, {UNITS}, {s.k // UNIT};", *_inputs(s), "mov.b32 middle, at;"]
    lines += [f"mov.b32 left, {s.tiles};", "SECOND:", *_zero(s), "mov.b32 at, middle;"]
    lines += [*_slot(s, "FULL_AGAIN", STORED), *_add(s, UNITS - 1), f"{STORED}:", *_join(s)]
    return [*lines, *_put(s), "@more bra SECOND;", SYNC, *_store(s)]


def _put(s: Joint) -> list[str]:
    """The sums of a tile to shared memory, those of live rows; steps to the next."""
    lines = ["and.b32 b, qi, 1;"]
    for i in range(0, 8 * s.fours, 8):
        for row in range(i // 2, min(i // 2 + 2, s.rows)):
            lines.append(f"mad.lo.u32 a, b, 2, {row}; setp.lt.u32 p, a, {s.rows};")
            for eight in range(2):
                at = 4 * (row * s.block_outputs + 8 * eight)
                lines.append(f"@p st.shared.f32 [put+{at}], acc{i + row % 2 + 2 * eight};")
    return [
        *lines,
        f"add.u32 put, put, {4 * STRIP}; sub.u32 left, left, 1; setp.ne.u32 more, left, 0;",
    ]


def _store(s: Joint) -> list[str]:
    """Sums over all columns of the part, four outputs a thread."""
    each = s.block_outputs // 4  # vectors of a row
    lines = [f"mul.lo.u32 a, part, {s.rows}; mul.wide.u32 ep, a, {4 * s.hidden};"]
    lines += [
        f"mul.wide.u32 q64, rank, {4 * s.block_outputs}; add.s64 ep, ep, q64; add.s64 ep, ep, $6;"
    ]
    for first in range(0, s.rows * each, WORKERS):
        label = f"KEPT{first}"
        lines += [
            f"add.u32 a, tid, {first}; setp.ge.u32 p, a, {s.rows * each}; @p bra {label};",
            "mad.lo.u32 b, a, 16, sm; ld.shared.v4.f32 {acc0,acc1,acc2,acc3}, [b];",
        ]
        for half in range(1, WARPS // SIDES):
            at = 4 * half * s.rows * s.block_outputs
            lines.append(f"ld.shared.v4.f32 {{acc4,acc5,acc6,acc7}}, [b+{at}];")
            lines += [f"add.f32 acc{i}, acc{i}, acc{4 + i};" for i in range(4)]
        lines += [
            f"div.u32 c, a, {each}; mul.lo.u32 d, c, {each}; sub.u32 d, a, d;",
            f"mul.lo.u32 c, c, {s.hidden}; mad.lo.u32 c, d, 4, c; mul.wide.u32 q64, c, 4;",
            "add.s64 q64, q64, ep; st.global.v4.f32 [q64], {acc0,acc1,acc2,acc3};",
            f"{label}:",
        ]
    return lines
