"""The columns of x in the order of the weights' operands (``fragment_ptx``), for many rows."""

from pallas_kernels.linear.broad_shape import GROUP, GROUP_BYTES, SMS, Broad
from pallas_kernels.linear.fragment_ptx import UNIT, arrange, vector

TURN = 8  # units that a block takes at once
RESIDENT = 8 * SMS  # blocks


def parts(s: Broad) -> int:
    """Blocks that take turns at the units of a group of rows: a block waits for each of its own."""
    return max(1, min(-(-s.units // TURN), RESIDENT // s.groups))


def program(s: Broad) -> list[str]:
    """Operands: x, image (GMEM), group of eight rows, part. A thread takes 8 columns of each of a
    unit's four runs of 16 of a row, so that it writes rows of core matrices. Rows past the end are
    0, as are columns.
    """
    turn = TURN * parts(s)
    lines = [
        ".reg .b32 tid, t, j, u, i, c, w<16>, o<16>; .reg .b64 x, to, wide; .reg .pred p, in;",
        "mov.u32 tid, %tid.x; and.b32 t, tid, 7; bfe.u32 j, tid, 3, 1; shr.u32 u, tid, 4;",
        f"mov.b32 i, $3; mad.lo.u32 u, i, {TURN}, u;",
        f"mad.lo.u32 i, $2, {GROUP}, t; setp.lt.u32 p, i, {s.rows}; mul.wide.u32 x, i, {2 * s.k};",
        f"add.s64 x, x, $0; mul.lo.u32 c, u, {UNIT}; mad.lo.u32 c, j, 8, c;",
        f"mul.wide.u32 wide, c, 2; add.s64 x, x, wide; mul.wide.u32 to, u, {s.groups};",
        "cvt.u64.u32 wide, $2; add.s64 to, to, wide;"
        f" mul.lo.s64 to, to, {GROUP_BYTES}; add.s64 to, to, $1;",
        "mul.lo.u32 i, j, 512; mad.lo.u32 i, t, 16, i; cvt.u64.u32 wide, i; add.s64 to, to, wide;",
        f"UNITS: setp.lt.u32 in, c, {UNIT * s.units}; @!in bra END;",
        *[f"mov.b32 w{i}, 0;" for i in range(16)],
    ]
    for q in range(4):
        lines += [
            f"add.u32 i, c, {16 * q}; setp.lt.and.u32 in, i, {s.k}, p;",
            f"@in ld.global.v4.b32 {vector('w', 4 * q)}, [x+{32 * q}];",
        ]
    for step in range(2):  # 2 j and the next
        for q in range(4):
            w = 4 * q + 2 * step
            lines += arrange(f"w{w}", f"w{w + 1}", f"o{8 * step + q}", f"o{8 * step + 4 + q}")
    return [
        *lines,
        *[f"st.global.v4.b32 [to+{128 * r}], {vector('o', 4 * r)};" for r in range(4)],
        f"add.u32 c, c, {turn * UNIT}; add.s64 x, x, {2 * turn * UNIT};",
        f"add.s64 to, to, {turn * s.groups * GROUP_BYTES}; bra UNITS;",
        "END:",
    ]
