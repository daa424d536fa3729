"""x to shared memory for the kernel for few rows, in the order of its operands (``fragment_ptx``),
times the weight of a norm if one goes before.
"""

from pallas_kernels.linear.fragment_ptx import STEPS, UNIT, arrange, divide, vector
from pallas_kernels.linear.skinny_shape import THREADS, WARPS, Skinny

FRAGMENT = 1024  # bytes of a unit of eight rows of x


def meet() -> str:
    return f"barrier.sync 0, {THREADS};"


def input_registers(s: Skinny) -> list[str]:
    bases = 1 + max(base for base, _ in _passes(s))
    lines = [
        f".reg .b32 to<{bases}>, j<{bases}>, w<8>; .reg .b64 from<{bases}>;",
        f".reg .pred last, on<{bases}>;",
    ]
    if s.norm is not None:
        lines.append(".reg .b64 norm; .reg .b32 g<8>; .reg .f32 ss, lo, hi, glo, ghi;")
    return lines


def _passes(s: Skinny) -> list[tuple[int, int]]:
    """Of each pass over x: the one whose rows it takes, and how many units further on."""
    rows, items = min(s.rows, s.tokens), 8 * WARPS
    if items % rows == 0:
        return [(0, b * items // rows) for b in range(s.passes)]
    if rows % items == 0:
        return [(b % (rows // items), b // (rows // items)) for b in range(s.passes)]
    return [(b, 0) for b in range(s.passes)]


def _guard(s: Skinny, b: int, base: int) -> str:
    """Of pass b: all but the last one are full."""
    return f"on{base}" if b == base or 8 * WARPS * (b + 1) <= s.items else "last"


def fetch(s: Skinny) -> list[str]:
    """Copies of x to shared memory, all at once: four threads take a unit of a row, each to where
    none but itself reads it; and of the norm's weight. Rows that are not live are left out, columns
    past the end of K are 0.
    """
    lines = []
    for b, (base, further) in enumerate(_passes(s)):
        lines += _item(s, b) if b == base else []
        guard = _guard(s, b, base)
        if guard == "last":
            lines += [
                f"add.u32 f, warp, {WARPS * b}; mad.lo.u32 f, f, 8, gi;",
                f"setp.lt.and.u32 last, f, {s.items}, on{base};",
            ]
        to, at = further * FRAGMENT * s.tokens // 8, 2 * UNIT * further
        pieces = [(f"to{base}+{to + 512 * h}", f"from{base}+{at + 16 * h}") for h in range(2)]
        lines += _copy(s, guard, f"j{base}", UNIT * further, pieces)
    if s.norm is not None:
        for first in range(0, s.units * UNIT // 8, THREADS):
            lines += [
                f"add.u32 f, tid, {first}; setp.lt.u32 p, f, {s.units * UNIT // 8};",
                "mad.lo.u32 j, f, 8, column; mul.wide.u32 wide, j, 2; add.s64 wide, wide, norm;",
                "mad.lo.u32 e, f, 16, sm;",
                *_copy(s, "p", "j", 0, [(f"e+{4 * s.norm_words}", "wide")]),
            ]
    return [*lines, "cp.async.commit_group;"]


def _item(s: Skinny, b: int) -> list[str]:
    """What this thread takes in pass b, if anything (``on``): where it lies, where it goes, its
    first column.
    """
    rows = min(s.rows, s.tokens)
    return [
        # f: item, u: unit, i: row.
        f"add.u32 f, warp, {WARPS * b}; mad.lo.u32 f, f, 8, gi;",
        f"{divide('u', 'f', rows)} mul.lo.u32 i, u, {rows}; sub.u32 i, f, i;",
        f"setp.lt.u32 p, f, {s.items}; setp.lt.and.u32 on{b}, i, live, p;",
        f"mad.lo.u32 e, u, {FRAGMENT * s.tokens // 8}, sm; shr.u32 f, i, 3;",
        f"mad.lo.u32 e, f, {FRAGMENT}, e; and.b32 f, i, 7; mad.lo.u32 e, f, 64, e;",
        f"mad.lo.u32 to{b}, qi, 16, e;",
        f"add.u32 i, tok0, i; mul.wide.u32 wide, i, {2 * s.k}; add.s64 wide, wide, x;",
        f"mad.lo.u32 j{b}, u, {UNIT}, column; mad.lo.u32 j{b}, qi, 16, j{b};",
        f"mul.wide.u32 other, j{b}, 2; add.s64 from{b}, wide, other;",
    ]


def _copy(
    s: Skinny, guard: str, column: str, further: int, pieces: list[tuple[str, str]]
) -> list[str]:
    """16 bytes (to, from) each, zeros if the column so much further is past the end of K."""
    lines, size = [], "16"
    if not s.exact:
        lines.append(f"add.u32 t0, {column}, {further}; setp.lt.u32 in, t0, {s.k};")
        lines.append("selp.b32 t0, 16, 0, in;")
        size = "16, t0"
    copies = (f"cp.async.cg.shared.global [{to}], [{at}], {size};" for to, at in pieces)
    return [*lines, *[f"@{guard} {copy}" for copy in copies]]


def keep(s: Skinny, later: int) -> list[str]:
    """What ``fetch`` copied, before ``later`` groups of copies, in its place as each thread will
    load it: [unit][group of eight rows][half][lane][16 bytes].
    """
    lines = [f"cp.async.wait_group {later};"]
    if s.norm is not None:
        lines.append(meet())  # a thread reads the norm's weight that others copied
    for b, (base, further) in enumerate(_passes(s)):
        guard, at = _guard(s, b, base), further * FRAGMENT * s.tokens // 8
        places = [f"[to{base}+{at + 512 * half}]" for half in range(2)]
        for half, place in enumerate(places):
            lines.append(f"@{guard} ld.shared.v4.b32 {vector('w', 4 * half)}, {place};")
        if s.norm is not None:
            lines += _weighed(s, guard, base, further)
        for step in range(STEPS):
            w = 2 * step
            lines += arrange(f"w{w}", f"w{w + 1}", f"v{w}", f"v{w + 1}")
        for half, place in enumerate(places):
            lines.append(f"@{guard} st.shared.v4.b32 {place}, {vector('v', 4 * half)};")
    return lines


def _weighed(s: Skinny, guard: str, base: int, further: int) -> list[str]:
    """A pass's x times the norm's weight in its place, and the sum of its squares to shared memory:
    [unit][group of eight rows][row].
    """
    weight = 4 * s.norm_words + 2 * UNIT * further
    lines = [
        # e: unit and group, f: unit.
        f"sub.u32 i, to{base}, sm; shr.u32 e, i, 10; {divide('f', 'e', s.tokens // 8)}",
        f"mad.lo.u32 f, f, {2 * UNIT}, sm; mad.lo.u32 f, qi, 32, f; mov.f32 ss, 0f00000000;",
    ]
    for half in range(2):
        words = vector("g", 4 * half)
        lines.append(f"@{guard} ld.shared.v4.b32 {words}, [f+{weight + 16 * half}];")
    for i in range(8):
        lines += [
            f"shl.b32 lo, w{i}, 16; and.b32 hi, w{i}, 0xFFFF0000;",
            f"shl.b32 glo, g{i}, 16; and.b32 ghi, g{i}, 0xFFFF0000;",
            "fma.rn.f32 ss, lo, lo, ss; fma.rn.f32 ss, hi, hi, ss;",
            f"mul.f32 lo, lo, glo; mul.f32 hi, hi, ghi; cvt.rn.bf16x2.f32 w{i}, hi, lo;",
        ]
    for lanes in (1, 2):
        lines.append(f"shfl.sync.bfly.b32 lo, ss, {lanes}, 31, 0xffffffff; add.f32 ss, ss, lo;")
    return [
        *lines,
        f"setp.eq.and.u32 p, qi, 0, {guard};",
        "bfe.u32 i, i, 6, 3; mad.lo.u32 i, e, 8, i; mad.lo.u32 i, i, 4, sm;",
        f"@p st.shared.f32 [i+{4 * (s.square_words + s.tokens * further)}], ss;",
    ]


def squares(s: Skinny) -> list[str]:
    """Each live row's sum of squares in this block's columns to shared memory."""
    at = s.square_words
    lines = [
        "setp.ge.u32 p, tid, live; @p bra SQUARES; mad.lo.u32 i, tid, 4, sm;",
        "mov.f32 ss, 0f00000000;",
    ]
    for u in range(s.units):
        lines.append(f"ld.shared.f32 lo, [i+{4 * (at + u * s.tokens)}]; add.f32 ss, ss, lo;")
    return [*lines, f"st.shared.f32 [i+{4 * (at + s.units * s.tokens)}], ss;", "SQUARES:"]
