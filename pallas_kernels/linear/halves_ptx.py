"""Up to four rows: weights become f16, which one instruction does for two codes, and their
scales multiply sums (PTX).

A thread's 16 bytes of a unit lie in one 32-column group, those of the other pair of a quad in the
other, and the tensor core adds over the quad. So its eight columns are four rows of x twice: column
4 h + t has row t's inputs in group h and zeros in the other. Each thread's sums then belong to the
group of its own bytes, whose scale it has.

Inputs are f16, too: those of a row in a group times the power of two that brings their largest to
2^15 and more. Bfloat16 from 2^-32 of it on stays exact, less is off by 2^-40 of it at most.
"""

from pallas_kernels.linear.fragment_ptx import FRAGMENT, STEPS, vector
from pallas_kernels.linear.skinny_shape import Skinny

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
BIAS = 127  # of an exponent
TOP = 2 * BIAS + 15  # less the largest's exponent: that of its power of two
SIZES = 0x7FFF7FFF  # of two bfloat16
HIGHEST = 2 * BIAS - 1  # whose inverse is still a normal number


def registers(s: Skinny, batch: int) -> str:
    own = "lo, hi, " if s.norm is None else ""  # which a norm has, too
    return (
        f".reg .b16 h<2>; .reg .b32 away, xk; .reg .f32 {own}up<{batch}>, nil, k<4>,"
        f" c<{8 * s.tiles}>;"
    )


def place() -> list[str]:
    """``at``: where a thread's inputs of row 0 belong, ``away``: from there to the zeros, ``xk``:
    the first power of two.
    """
    return [
        "mad.lo.u32 at, qi, 16, sm; shr.u32 j, qi, 1; mad.lo.u32 at, j, 256, at;",
        "mul.lo.u32 j, j, 512; sub.u32 away, 256, j; mad.lo.u32 xk, qi, 8, sm;",
        "mov.f32 nil, 0f00000000;",
    ]


def spot(b: int) -> list[str]:
    """``to{b}``: the place of unit u of row i in shared memory."""
    return [f"mad.lo.u32 e, u, {FRAGMENT}, at; mad.lo.u32 to{b}, i, 64, e;"]


def fence(n: int) -> str:
    """Nothing is moved past this n-th branch, which no block takes."""
    return f"setp.eq.u32 p, block, {0xFFFFFFFF - n}; @p bra.uni SUMS;"


def power(s: Skinny, b: int) -> list[str]:
    """Of a task's bf16 in w, ``up``; to shared memory what undoes it."""
    return [
        *raise_group(b),
        f"sub.u32 i, to{b}, sm; shr.u32 e, i, 10; bfe.u32 i, i, 6, 3;",
        "mad.lo.u32 i, e, 8, i; mad.lo.u32 i, i, 4, sm;",
        f"@on{b} st.shared.b32 [i+{4 * s.power_words}], t0;",
    ]


def raise_group(b: int) -> list[str]:
    """The power of two ``up{b}`` of two threads' words w, its inverse t0; clobbers t1."""
    lines = [f"and.b32 t0, w{8 * b}, {SIZES};"]
    for i in range(8 * b + 1, 8 * b + 8):
        lines.append(f"and.b32 t1, w{i}, {SIZES}; max.u16x2 t0, t0, t1;")
    return [
        *lines,
        "shfl.sync.bfly.b32 t1, t0, 1, 31, 0xffffffff; max.u16x2 t0, t0, t1;",
        "shr.u32 t1, t0, 16; max.u16x2 t0, t0, t1; bfe.u32 t0, t0, 7, 8;",
        f"sub.u32 t0, {TOP}, t0; min.u32 t0, t0, {HIGHEST}; shl.b32 t0, t0, 23;",
        f"mov.b32 up{b}, t0; sub.u32 t0, {2 * BIAS << 23}, t0;",
    ]


def convert(b: int) -> list[str]:
    """A task's bf16 to f16 in shared memory, zeros to where the other group's columns are."""
    return [
        *to_halves(b),
        f"add.u32 i, to{b}, away; @on{b} st.shared.v4.f32 [i], {{nil,nil,nil,nil}};",
        f"@on{b} st.shared.v4.f32 [i+512], {{nil,nil,nil,nil}};",
        f"@on{b} st.shared.v4.b32 [to{b}], {vector('w', 8 * b)};",
        f"@on{b} st.shared.v4.b32 [to{b}+512], {vector('w', 8 * b + 4)};",
    ]


def to_halves(b: int) -> list[str]:
    """Eight words w of bf16 to f16 times ``up{b}`` in their place; clobbers lo and hi."""
    lines = []
    for i in range(8 * b, 8 * b + 8):
        lines += [
            f"shl.b32 lo, w{i}, 16; and.b32 hi, w{i}, 0xFFFF0000; mul.f32 lo, lo, up{b};",
            f"mul.f32 hi, hi, up{b}; cvt.rn.f16x2.f32 w{i}, hi, lo;",
        ]
    return lines


def decode(raw: str, out: str, tiles: int) -> list[str]:
    """``tiles`` times eight words of codes to 16 operands, four a step; clobbers h0 and h1."""
    lines = []
    for i in range(8 * tiles):
        m, row, step = i // 8, i // 4 % 2, i % 4
        at = 16 * m + 4 * step + row
        lines += [
            f"mov.b32 {{h0,h1}}, {raw}{i};",
            f"cvt.rn.f16x2.e4m3x2 {out}{at}, h0; cvt.rn.f16x2.e4m3x2 {out}{at + 2}, h1;",
        ]
    return lines


def unit(s: Skinny, u: int) -> list[str]:
    """Unit u of the weights x its inputs, and acc += those of the unit before, by now there.

    Without a fence the compiler decodes units long before their turn and adds their sums at the
    end, in twice the registers.
    """
    own = u % 2
    k = vector("k", 2 * own, 2)
    lines = [
        f"shl.b32 scale, b{u}, 23;",
        *decode(f"r{u}_", "a", s.tiles),
        *[
            f"ld.shared.v4.b32 {vector('v', 4 * h)}, [xs+{FRAGMENT * u + 512 * h}];"
            for h in range(2)
        ],
        f"ld.shared.v2.f32 {k}, [xk+{4 * (s.power_words + 8 * u)}];",
        *[f"mul.f32 k{i}, k{i}, scale;" for i in (2 * own, 2 * own + 1)],
    ]
    for step in range(STEPS):
        for m in range(s.tiles):
            a, v = vector("a", 16 * m + 4 * step), vector("v", 2 * step, 2)
            c = vector("c", 4 * (own * s.tiles + m))
            lines.append(f"{MMA} {c}, {a}, {v}, {c if step else '{nil,nil,nil,nil}'};")
    lines += _add(s, u - 1) if u else []
    return [*lines, fence(u)]


def last(s: Skinny) -> list[str]:
    return [*_add(s, s.units - 1), "SUMS:"]


def _add(s: Skinny, u: int) -> list[str]:
    """acc += the sums of unit u."""
    own, count = u % 2, 4 * s.tiles
    return [
        f"fma.rn.f32 acc{i}, c{own * count + i}, k{2 * own + i % 2}, acc{i};" for i in range(count)
    ]


def join(s: Skinny) -> list[str]:
    """Sums of the two groups to one, in both threads that had them; p: the one that stores."""
    lines = ["setp.lt.u32 p, qi, 2;"]
    for i in range(4 * s.tiles):
        lines.append(f"shfl.sync.bfly.b32 lo, acc{i}, 2, 31, 0xffffffff;")
        lines.append(f"add.f32 acc{i}, acc{i}, lo;")
    return lines
