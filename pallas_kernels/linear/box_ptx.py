"""Products of FP8 weights that come in boxes of 32 rows by 128 columns, by tensor maps, with eights
of rows of x (PTX).

Weights become f16 in registers. Inputs are f16, too, those of a row in a group of 32 columns times
the power of two that brings their largest to 2^15 and more: bfloat16 from 2^-32 of it on stays
exact, less is off by 2^-40 of it at most. A product takes columns of one group, so that its sums
have one scale: thread 4 g + q holds columns 8 q .. 8 q + 7 of a group, word s of them in k16 step
s, of weights as of inputs. Weight rows are in the order in which the threads of a phase read other
banks: row 2 (g % 4) + g / 4 is thread g's.
"""

from pallas_kernels.linear.fragment_ptx import vector

STRIP = 32  # rows of a box: those of a scale, two products
COLUMNS = 128
GROUP = 32  # columns of a scale
GROUPS = COLUMNS // GROUP
BOX = STRIP * COLUMNS  # bytes
INPUTS = 512  # bytes of eight rows of x in a group: [row][column]
POWERS = 32  # bytes of what undoes their powers of two
SETS = 4  # of sums of one group
LATE = 2  # products later they are added up: by then they are there
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
BIAS = 127  # of an exponent
TOP = 2 * BIAS + 15  # less the largest's exponent: that of its power of two
SIZES = 0x7FFF7FFF  # of two bfloat16
HIGHEST = 2 * BIAS - 1  # whose inverse is still a normal number
EARLY = 1  # boxes that a warp asks for before x: memory has work, and x does not wait for long
COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def registers(eights: int) -> str:
    return (
        f".reg .b32 at, pk, sc, sw, from, r<16>, a<16>, o<{GROUPS}>, v<8>; .reg .b16 h<2>;"
        f" .reg .f32 acc<{8 * eights}>, c<{8 * SETS}>, k<{2 * SETS}>, nil, scale;"
    )


def place() -> list[str]:
    """``o``: where a thread's bytes of a group are in a box. Those of weight row i are in its chunk
    2 group + q / 2, before the map exchanges chunks. Clobbers i, j and e.
    """
    return [
        "and.b32 i, gi, 3; shr.u32 j, gi, 2; mad.lo.u32 i, i, 2, j; mov.f32 nil, 0f00000000;",
        "shr.u32 j, qi, 1; xor.b32 j, j, i; shl.b32 j, j, 4; and.b32 e, qi, 1;",
        f"mad.lo.u32 j, e, 8, j; mad.lo.u32 o0, i, {COLUMNS}, j;",
        *[f"xor.b32 o{m}, o0, {GROUP * m};" for m in range(1, GROUPS)],
    ]


def start(eights: int) -> list[str]:
    """No sums; the first products add none as those before them."""
    return [
        *[f"mov.f32 acc{m}, nil;" for m in range(8 * eights)],
        *[f"mov.f32 c{m}, nil;" for m in range(8 * (SETS - LATE), 8 * SETS)],
        *[f"mov.f32 k{m}, nil;" for m in range(2 * (SETS - LATE), 2 * SETS)],
    ]


def box(eights: int, refill: list[str]) -> list[str]:
    """acc += the box in ``slot`` times inputs from ``at`` on, with scales from ``sc`` on; all go on
    to the next. ``refill`` may overwrite the box.
    """
    lines = ["ld.shared.b32 sw, [sc]; add.u32 sc, sc, 4;", *_codes(0)]
    for group in range(GROUPS):
        lines += _codes(group + 1) if group + 1 < GROUPS else []
        lines += _decode(group)
        lines += refill if group + 1 == GROUPS else []
        lines += _products(eights, group)
    step = eights * GROUPS
    return [*lines, f"add.u32 at, at, {INPUTS * step}; add.u32 pk, pk, {POWERS * step};"]


def last(eights: int) -> list[str]:
    """What is still to be added after the last box."""
    items = range(GROUPS * eights - LATE, GROUPS * eights)
    return [line for item in items for line in _add(eights, item)]


def _codes(group: int) -> list[str]:
    """Eight codes of four rows each: two words."""
    lines = [f"add.u32 from, slot, o{group};"]
    for row in range(4):
        r = vector("r", 8 * (group % 2) + 2 * row, 2)
        lines.append(f"ld.shared.v2.b32 {r}, [from+{8 * COLUMNS * row}];")
    return lines


def _decode(group: int) -> list[str]:
    """Codes to operands a: [product of 16 rows][step][row 8 apart, half of k]."""
    lines = []
    for row in range(4):
        for step in range(2):
            at = 8 * (row // 2) + 4 * step + row % 2
            lines += [
                f"mov.b32 {{h0,h1}}, r{8 * (group % 2) + 2 * row + step};",
                f"cvt.rn.f16x2.e4m3x2 a{at}, h0; cvt.rn.f16x2.e4m3x2 a{at + 2}, h1;",
            ]
    return lines


def _products(eights: int, group: int) -> list[str]:
    """A group's, with eight rows of x after the other, and sums of those before them."""
    lines = [f"bfe.u32 from, sw, {8 * group}, 8; shl.b32 scale, from, 23;"]
    for e in range(eights):
        item = group * eights + e
        k, v = 2 * (item % SETS), 4 * (item % 2)
        lines += [
            f"ld.shared.v4.b32 {vector('v', v)}, [at+{INPUTS * item}];",
            f"ld.shared.v2.f32 {vector('k', k, 2)}, [pk+{POWERS * item}];",
            f"mul.f32 k{k}, k{k}, scale; mul.f32 k{k + 1}, k{k + 1}, scale;",
        ]
        for step in range(2):
            for m in range(2):
                c = vector("c", 8 * (item % SETS) + 4 * m)
                lines.append(
                    f"{MMA} {c}, {vector('a', 8 * m + 4 * step)}, {vector('v', v + 2 * step, 2)},"
                    f" {c if step else '{nil,nil,nil,nil}'};"
                )
        lines += _add(eights, item - LATE)
    return lines


def _add(eights: int, item: int) -> list[str]:
    """acc += the sums of an item of this box, or of the one before it."""
    item %= GROUPS * eights
    own, first = item % SETS, 8 * (item % eights)
    return [
        f"fma.rn.f32 acc{first + i}, c{8 * own + i}, k{2 * own + i % 2}, acc{first + i};"
        for i in range(8)
    ]


def raise_group(i: int) -> list[str]:
    """The power of two ``up{i}`` of four threads' bf16 in four words w each, its inverse t0;
    clobbers t1.
    """
    lines = [f"and.b32 t0, w{4 * i}, {SIZES};"]
    for m in range(4 * i + 1, 4 * i + 4):
        lines.append(f"and.b32 t1, w{m}, {SIZES}; max.u16x2 t0, t0, t1;")
    for lanes in (1, 2):
        lines.append(f"shfl.sync.bfly.b32 t1, t0, {lanes}, 31, 0xffffffff; max.u16x2 t0, t0, t1;")
    return [
        *lines,
        "shr.u32 t1, t0, 16; max.u16x2 t0, t0, t1; bfe.u32 t0, t0, 7, 8;",
        f"sub.u32 t0, {TOP}, t0; min.u32 t0, t0, {HIGHEST}; shl.b32 t0, t0, 23;",
        f"mov.b32 up{i}, t0; sub.u32 t0, {2 * BIAS << 23}, t0;",
    ]


def to_halves(i: int) -> list[str]:
    """These words to f16 times ``up{i}`` in their place; clobbers lo and hi."""
    lines = []
    for m in range(4 * i, 4 * i + 4):
        lines += [
            f"shl.b32 lo, w{m}, 16; and.b32 hi, w{m}, 0xFFFF0000; mul.f32 lo, lo, up{i};",
            f"mul.f32 hi, hi, up{i}; cvt.rn.f16x2.f32 w{m}, hi, lo;",
        ]
    return lines
