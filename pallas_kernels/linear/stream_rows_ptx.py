"""x of a block of the streamed kernel (``stream_ptx``), normed or not, to shared memory as threads
will load it: f16 times powers of two, [group of columns][row][64 bytes].
"""

from pallas_kernels.linear import box_ptx
from pallas_kernels.linear.box_ptx import GROUP
from pallas_kernels.linear.fragment_ptx import divide, vector
from pallas_kernels.linear.stream_shape import Stream

BATCH = 20  # loads of x that a thread has on their way


def meet(s: Stream) -> str:
    return f"barrier.sync 0, {s.threads};"


def _passes(s: Stream) -> int:
    return -(-s.groups // s.abreast)


def batch(s: Stream) -> int:
    return min(_passes(s), BATCH)


def place(s: Stream) -> list[str]:
    """Four threads take a group of a row: where x has it, ``xp``, and the block, ``spot``."""
    shift = s.span.bit_length() - 1
    return [
        f"shr.u32 e, tid, 2; shr.u32 group, e, {shift}; and.b32 e, e, {s.span - 1};",
        f"mad.lo.u32 group, sharer, {s.abreast // s.sharers}, group;",
        f"setp.lt.u32 live, e, {s.rows}; mad.lo.u32 i, group, {8 * s.eights}, e;",
        "mad.lo.u32 spot, i, 64, sm; mad.lo.u32 spot, qi, 16, spot;",
        f"mad.lo.u32 undo, i, 4, sm; mad.lo.u32 j, group, {GROUP}, column;",
        f"mad.lo.u32 j, qi, 8, j; mul.wide.u32 xp, j, 2; mul.wide.u32 wide, e, {2 * s.k};",
        "add.s64 xp, xp, wide; add.s64 xp, xp, x;",
    ]


def fetch(s: Stream, n: int, i: int) -> list[str]:
    """The n-th load of x, zeros past the end of K; ``on``: the group is of this part."""
    inside, at = (n + 1) * s.abreast <= s.groups, 64 * s.abreast * n
    lines = [
        f"add.u32 j, group, {n * s.abreast};",
        f"mov.pred on{i}, live;" if inside else f"setp.lt.and.u32 on{i}, j, {s.groups}, live;",
    ]
    guard = f"on{i}"
    if not s.exact:
        lines += [f"mov.b32 w{4 * i + m}, 0;" for m in range(4)]
        lines.append(f"mad.lo.u32 j, j, {GROUP}, column; setp.lt.and.u32 p, j, {s.k}, on{i};")
        guard = "p"
    return [*lines, f"@{guard} ld.global.v4.b32 {vector('w', 4 * i)}, [xp+{at}];"]


def gain_loads(s: Stream) -> int:
    return -(-GROUP * s.groups // (8 * s.threads))


def load_gains(s: Stream) -> list[str]:
    """The norm's weight, eight columns a thread and load; 0 past the end of K."""
    lines = [
        f"mad.lo.u32 j, tid, 8, column; mul.wide.u32 wide, j, 2;"
        f" add.s64 wide, wide, ${s.operands - 1};"
    ]
    for n in range(gain_loads(s)):
        lines += [f"mov.b32 g{4 * n + m}, 0;" for m in range(4)]
        lines += [
            f"add.u32 i, j, {8 * s.threads * n}; setp.lt.u32 p, i, {s.k};",
            f"add.u32 i, tid, {s.threads * n}; setp.lt.and.u32 p, i, {4 * s.groups}, p;",
            f"@p ld.global.v4.b32 {vector('g', 4 * n)}, [wide+{16 * s.threads * n}];",
        ]
    return lines


def store_gains(s: Stream) -> list[str]:
    lines = ["mad.lo.u32 j, tid, 16, sm;"]
    for n in range(gain_loads(s)):
        lines += [
            f"add.u32 i, tid, {s.threads * n}; setp.lt.u32 p, i, {4 * s.groups};",
            f"@p st.shared.v4.b32 [j+{s.gains + 16 * s.threads * n}], {vector('g', 4 * n)};",
        ]
    return [
        *lines,
        "mad.lo.u32 gain, group, 64, sm; mad.lo.u32 gain, qi, 16, gain; mov.f32 ss, 0f00000000;",
        meet(s),
    ]


def store(s: Stream) -> list[str]:
    """All of this part's x to shared memory, as threads will load it: [group][row][64 bytes]."""
    lines, passes, count = [], _passes(s), batch(s)
    for first in range(0, passes, count):
        some = range(first, min(first + count, passes))
        for n in some if first else ():
            lines += fetch(s, n, n - first)
        for n in some:
            lines += _keep(s, n, n - first)
    return [*lines, *(_store_squares(s) if s.norm is not None else [])]


def _keep(s: Stream, n: int, i: int) -> list[str]:
    """What ``_fetch`` loaded, as f16 times a power of two, and what undoes it."""
    place = n * s.abreast * 8 * s.eights  # of a row of a group
    return [
        *(_weighed(s, n, i) if s.norm is not None else []),
        *box_ptx.raise_group(i),
        f"setp.eq.and.u32 p, qi, 0, on{i};",
        *_send(s, "p", "b32", "undo", s.powers + 4 * place, "t0"),
        *box_ptx.to_halves(i),
        *_send(s, f"on{i}", "v4.b32", "spot", 64 * place, vector("w", 4 * i)),
    ]


def _send(s: Stream, guard: str, kind: str, base: str, at: int, value: str) -> list[str]:
    """A store to this place of all sharers."""
    if s.sharers == 1:
        return [f"@{guard} st.shared.{kind} [{base}+{at}], {value};"]
    lines = []
    for n in range(s.sharers):
        lines += [
            f"mad.lo.u32 j, part, {s.sharers}, {n}; mapa.shared::cluster.u32 j, {base}, j;",
            f"@{guard} st.shared::cluster.{kind} [j+{at}], {value};",
        ]
    return lines


def _weighed(s: Stream, n: int, i: int) -> list[str]:
    """x times the norm's weight in its place; ss += x's squares."""
    lines = [f"@on{i} ld.shared.v4.b32 {vector('g', 0)}, [gain+{s.gains + 64 * s.abreast * n}];"]
    for m in range(4 * i, 4 * i + 4):
        lines += [
            f"shl.b32 lo, w{m}, 16; and.b32 hi, w{m}, 0xFFFF0000;",
            f"shl.b32 glo, g{m % 4}, 16; and.b32 ghi, g{m % 4}, 0xFFFF0000;",
            f"@on{i} fma.rn.f32 ss, lo, lo, ss; @on{i} fma.rn.f32 ss, hi, hi, ss;",
            f"mul.f32 lo, lo, glo; mul.f32 hi, hi, ghi; cvt.rn.bf16x2.f32 w{m}, hi, lo;",
        ]
    return lines


def _store_squares(s: Stream) -> list[str]:
    """A row's sum over the groups that a quad took, or all quads of a warp."""
    lines, lanes = [], [1, 2, *(4 << n for n in range(3) if s.span <= 1 << n)]
    for n in lanes:
        lines.append(f"shfl.sync.bfly.b32 lo, ss, {n}, 31, 0xffffffff; add.f32 ss, ss, lo;")
    return [
        *lines,
        f"shr.u32 e, tid, 2; {divide('i', 'e', max(8, s.span))} and.b32 j, e, {s.span - 1};",
        f"and.b32 e, e, {max(8, s.span) - 1}; setp.eq.u32 p, qi, 0;",
        f"setp.lt.and.u32 p, e, {s.span}, p; mad.lo.u32 i, sharer, {s.addends // s.sharers}, i;",
        f"mad.lo.u32 i, i, {s.span}, j; mad.lo.u32 i, i, 4, sm;",
        *_send(s, "p", "f32", "i", s.squares, "ss"),
    ]


def total(s: Stream, row: str) -> list[str]:
    """ss: the sum of a row's addends."""
    lines = [f"mad.lo.u32 i, {row}, 4, sm; mov.f32 ss, 0f00000000;"]
    for n in range(s.addends):
        lines.append(f"ld.shared.f32 lo, [i+{s.squares + 4 * s.span * n}]; add.f32 ss, ss, lo;")
    return lines
