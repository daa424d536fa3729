"""The launch before the decode kernel for more than eight rows, in PTX: every block makes the plan
for itself, the first one stores it, and all share the token images.
"""

from pallas_kernels.moe_experts.decode_plan import TILE
from pallas_kernels.moe_experts.decode_shape import Part, Shape
from pallas_kernels.moe_experts.repack import Chunk

THREADS = 512
WARPS = THREADS // 32
SYNC = f"barrier.sync 8, {THREADS};"
BATCH = 4  # vectors of an image that a thread has on their way


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


class Places:
    """Bytes in shared memory: pairs counted by 32 of them and expert, items by expert, their sums
    by 32 experts, and the plan.
    """

    def __init__(self, s: Shape):
        self.runs, self.experts = -(-s.rows * s.k // 32), _up(s.experts, 32)
        self.groups = self.experts // 32
        self.items = 4 * self.runs * s.experts
        self.sums = self.items + 4 * self.experts
        self.expert = self.sums + 4 * self.groups
        self.pairs = self.expert + 4 * s.items
        self.words = self.pairs // 4 + TILE * s.items


def program(s: Shape, *, shared: bool) -> list[str]:
    """Operands: ids, weights, x, plan (``decode_plan.PlanLayout``), routed and shared image (GMEM),
    shared memory, block. Without ``shared`` its image is zero.
    """
    at = Places(s)
    rounds = -(-s.rows * s.k // THREADS)
    lines = [
        ".reg .b32 tid, lane, warp, i, t, u, v, n, to, place, item, total, step, row, g, c, far;",
        f".reg .b32 e<{rounds}>, rank<{rounds}>, q<{max(at.runs, at.groups)}>;",
        f".reg .b32 low, v<{4 * BATCH}>, w<4>; .reg .b64 d, from<{BATCH}>, next, to64;",
        f".reg .pred p, ok, more, tail<{BATCH}>, live<{BATCH}>, in<{BATCH}>;",
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "shl.b32 to, tid, 2; add.u32 to, to, $6; mov.b32 v, 0; mov.b32 u, 0xffffffff;",
    ]
    lines += _fill(at.runs * s.experts, 0, "v") + _fill(TILE * s.items, at.pairs, "u")
    lines += [
        *_count(s, at, rounds),
        *_order(s, at, rounds),
        "setp.ne.u32 p, $7, 0; @p bra IMAGES;",
    ]
    lines += [*_store(s, at), f"IMAGES: mad.lo.u32 u, $7, {THREADS}, tid;"]
    lines += [f"mov.b32 step, {s.blocks * THREADS}; mul.lo.u32 total, n, {s.d}; mov.b32 i, u;"]
    lines += _image(s, at, s.up, "$4")
    lines += [f"mov.b32 total, {s.shared_items * s.shared_tokens * s.d // TILE}; mov.b32 i, u;"]
    return [*lines, *_image(s, at, s.up8, "$5", s.rows if shared else 0)]


def _fill(words: int, at: int, value: str) -> list[str]:
    lines = []
    for i in range(0, words, THREADS):
        guard = ""
        if words - i < THREADS:
            lines.append(f"setp.lt.u32 p, tid, {words - i};")
            guard = "@p "
        lines.append(f"{guard}st.shared.b32 [to+{at + 4 * i}], {value};")
    return lines


def _count(s: Shape, at: Places, rounds: int) -> list[str]:
    """A thread's pairs: expert e and how many of its warp with the same one come before; then how
    many of earlier warps, and the items of each expert.
    """
    lines = []
    for r in range(rounds):
        lines += [
            f"add.u32 i, tid, {THREADS * r}; setp.lt.u32 ok, i, {s.rows * s.k};",
            f"mul.wide.u32 d, i, 4; add.s64 d, d, $0; mov.b32 e{r}, 0xffffffff;",
            f"@ok ld.global.nc.b32 e{r}, [d]; setp.lt.u32 ok, e{r}, {s.experts};",
            f"selp.b32 e{r}, e{r}, 0xffffffff, ok;",
        ]
    lines.append(SYNC)
    for r in range(rounds):
        lines.append(f"mov.b32 rank{r}, 0; mov.b32 t, 0;")
        for j in range(32):
            lines += [
                f"shfl.sync.idx.b32 v, e{r}, {j}, 31, 0xffffffff; setp.eq.u32 p, v, e{r};",
                f"@p add.u32 t, t, 1; setp.gt.and.u32 p, lane, {j}, p;",
                f"@p add.u32 rank{r}, rank{r}, 1;",
            ]
        lines += [
            f"setp.lt.u32 ok, e{r}, {s.experts}; setp.eq.and.u32 ok, rank{r}, 0, ok;",
            f"{_counter(s, r)} @ok st.shared.b32 [i], t;",
        ]
    lines.append(SYNC)
    for first in range(0, at.experts, THREADS):
        lines += [f"add.u32 i, tid, {first}; setp.lt.u32 ok, i, {s.experts}; mov.b32 t, 0;"]
        column = [4 * (run * s.experts + first) for run in range(at.runs)]
        lines += [f"@ok ld.shared.b32 q{run}, [to+{c}];" for run, c in enumerate(column)]
        for run, c in enumerate(column):
            lines.append(f"@ok st.shared.b32 [to+{c}], t; @ok add.u32 t, t, q{run};")
        lines += [
            f"add.u32 t, t, {TILE - 1}; shr.u32 t, t, 3; setp.lt.u32 p, i, {at.experts};",
            f"@p st.shared.b32 [to+{at.items + 4 * first}], t;",
        ]
    return [*lines, SYNC]


def _counter(s: Shape, r: int) -> str:
    """i: where the count of this warp's pairs of expert e is."""
    return (
        f"add.u32 i, warp, {WARPS * r}; mad.lo.u32 i, i, {s.experts}, e{r}; shl.b32 i, i, 2;"
        " add.u32 i, i, $6;"
    )


def _order(s: Shape, at: Places, rounds: int) -> list[str]:
    """Items by ascending expert: n of them, their experts and pairs."""
    lines = []
    for first in range(0, at.groups, WARPS):
        lines += [
            f"add.u32 i, warp, {first}; setp.lt.u32 ok, i, {at.groups}; mov.b32 t, 0;",
            f"@ok ld.shared.b32 t, [to+{at.items + 128 * first}]; mov.b32 u, t;",
        ]
        for distance in (1, 2, 4, 8, 16):
            lines += [
                f"shfl.sync.up.b32 v, u, {distance}, 0, 0xffffffff;",
                f"setp.ge.u32 p, lane, {distance}; @p add.u32 u, u, v;",
            ]
        lines += [
            f"sub.u32 t, u, t; @ok st.shared.b32 [to+{at.items + 128 * first}], t;",
            "setp.eq.and.u32 ok, lane, 31, ok; shl.b32 i, i, 2; add.u32 i, i, $6;",
            f"@ok st.shared.b32 [i+{at.sums}], u;",
        ]
    lines.append(f"{SYNC} mov.b32 n, 0;")
    for g in range(at.groups):
        lines.append(f"ld.shared.b32 q{g}, [$6+{at.sums + 4 * g}]; add.u32 n, n, q{g};")
    for r in range(rounds):
        lines += [
            f"setp.lt.u32 ok, e{r}, {s.experts}; selp.b32 e{r}, e{r}, 0, ok; shr.u32 t, e{r}, 5;",
            f"{_counter(s, r)} mov.b32 place, 0; @ok ld.shared.b32 place, [i];",
            f"add.u32 place, place, rank{r};",
            f"shl.b32 i, e{r}, 2; add.u32 i, i, $6; ld.shared.b32 item, [i+{at.items}];",
        ]
        for g in range(at.groups - 1):
            lines.append(f"setp.gt.u32 p, t, {g}; @p add.u32 item, item, q{g};")
        lines += [
            "shr.u32 i, place, 3; add.u32 item, item, i; and.b32 place, place, 7;",
            f"mad.lo.u32 i, item, {TILE}, place; shl.b32 i, i, 2; add.u32 i, i, $6;",
            f"add.u32 t, tid, {THREADS * r}; @ok st.shared.b32 [i+{at.pairs}], t;",
            "setp.eq.and.u32 ok, place, 0, ok; shl.b32 i, item, 2; add.u32 i, i, $6;",
            f"@ok st.shared.b32 [i+{at.expert}], e{r};",
        ]
    return [*lines, SYNC]


def _store(s: Shape, at: Places) -> list[str]:
    """The plan; experts behind the last item are left as they were."""
    to, lines = s.plan, ["setp.eq.u32 p, tid, 0; @p st.global.b32 [$3], n;"]
    lines.append("mul.wide.u32 d, tid, 4; add.s64 d, d, $3;")
    for i in range(0, s.items, THREADS):
        lines += [
            f"add.u32 t, tid, {i}; setp.lt.u32 p, t, n;",
            f"@p ld.shared.b32 v, [to+{at.expert + 4 * i}];",
            f"@p st.global.b32 [d+{4 * (to.expert + i)}], v;",
        ]
    for i in range(0, TILE * s.items, THREADS):
        lines += [
            f"setp.lt.u32 p, tid, {TILE * s.items - i};",
            f"@p ld.shared.b32 v, [to+{at.pairs + 4 * i}];",
            f"@p st.global.b32 [d+{4 * (to.pairs + i)}], v; setp.ge.and.s32 ok, v, 0, p;",
            "mul.wide.u32 next, v, 4; add.s64 next, next, $1; mov.b32 t, 0;",
            f"@ok ld.global.nc.b32 t, [next]; @p st.global.b32 [d+{4 * (to.weights + i)}], t;",
        ]
    # Rows of the shared expert's tiles, then counters.
    rows = s.shared_items * s.shared_tokens
    total = rows + to.counter_count
    for i in range(0, total, THREADS):
        lines += [
            f"add.u32 t, tid, {i}; setp.lt.u32 p, t, {s.rows}; selp.b32 v, t, 0xffffffff, p;",
            f"setp.lt.u32 p, t, {rows}; selp.b32 v, v, 0, p;",
            f"setp.lt.u32 p, t, {total}; @p st.global.b32 [d+{4 * (to.rows + i)}], v;",
        ]
    return lines


def _image(s: Shape, at: Places, part: Part, target: str, rows: int | None = None) -> list[str]:
    """``decode_plan.image``, vectors i, i + step .. below ``total``: eight columns of a token each.
    Tokens are those of the plan's items, or the first ``rows`` rows.
    """
    chunk, tokens = part.chunk, part.tokens
    each, most = tokens * s.d // TILE, s.items * s.d + BATCH * s.blocks * THREADS
    name = "R" if rows is None else "S"
    lines = [f"{name}LOOP: setp.ge.u32 more, i, total; @more bra {name}DONE;"]
    for b in range(BATCH):
        lines += [
            f"setp.lt.u32 in{b}, i, total;",
            *divide("item", "i", each, most),
            f"mul.lo.u32 t, item, {each}; sub.u32 t, i, t;",
            *divide("g", "t", tokens, each),
            f"mul.lo.u32 c, g, {tokens}; sub.u32 t, t, c;",
            f"mad.lo.u32 t, item, {tokens}, t; add.u32 i, i, step;",
        ]
        if rows is None:
            lines += [
                "shl.b32 t, t, 2; add.u32 t, t, $6; mov.b32 row, 0xffffffff;",
                f"@in{b} ld.shared.b32 row, [t+{at.pairs}]; setp.ge.s32 live{b}, row, 0;",
                *divide("row", "row", s.k, s.rows * s.k),
            ]
        else:
            lines.append(f"mov.b32 row, t; setp.lt.and.u32 live{b}, row, {rows}, in{b};")
        lines += load(chunk, s.d, b)
    lines.append(f"mul.lo.u32 t, step, {BATCH}; sub.u32 i, i, t;")
    for b in range(BATCH):
        lines += [
            *mix(b),
            f"mul.wide.u32 to64, i, 16; add.s64 to64, to64, {target}; add.u32 i, i, step;",
            f"@in{b} st.global.v4.b32 [to64], {{w0,w1,w2,w3}};",
        ]
    return [*lines, f"bra {name}LOOP; {name}DONE:"]


def load(chunk: Chunk, d: int, b: int) -> list[str]:
    """v4b ..: the columns of vector b, whose token is ``row`` if live{b} and whose place among
    those of the token is ``g``. Columns c and 32 + c of a unit lie side by side (``order``), but
    for a unit of 32.
    """
    return [
        *divide("t", "g", chunk.bk // 8, d // 8),
        f"mul.lo.u32 c, t, {chunk.bk // 8}; sub.u32 g, g, c;",
        f"mul.lo.u32 t, t, {2 * chunk.bk}; mad.lo.u32 t, row, {2 * d}, t;",
        f"and.b32 c, g, 7; shl.b32 c, c, 3; setp.ge.u32 tail{b}, g, {8 * chunk.units};",
        f"@tail{b} shl.b32 c, c, 1; shr.u32 g, g, 3; shl.b32 g, g, 7; add.u32 c, c, g;",
        f"add.u32 t, t, c; cvt.u64.u32 from{b}, t; add.s64 from{b}, from{b}, $2;",
        f"selp.b32 far, 8, 64, tail{b}; cvt.u64.u32 next, far; add.s64 next, next, from{b};",
        *[f"mov.b32 v{4 * b + j}, 0;" for j in range(4)],
        f"@live{b} ld.global.nc.v2.b32 {{v{4 * b},v{4 * b + 1}}}, [from{b}];",
        f"@live{b} ld.global.nc.v2.b32 {{v{4 * b + 2},v{4 * b + 3}}}, [next];",
    ]


def mix(b: int) -> list[str]:
    """w0 .. w3: vector b as it lies in the image."""
    lines = []
    for word, half in enumerate((0, 0, 1, 1)):
        pick = ("0x5410", "0x7632")[word % 2]
        lines += [
            f"prmt.b32 w{word}, v{4 * b + half}, v{4 * b + 2 + half}, {pick};",
            f"selp.b32 w{word}, v{4 * b + word}, w{word}, tail{b};",
        ]
    return lines


def divide(quotient: str, number: str, by: int, most: int) -> list[str]:
    """The quotient of a number up to ``most``, in three instructions where div has twenty."""
    if by & by - 1 == 0:
        return [f"shr.u32 {quotient}, {number}, {by.bit_length() - 1};"]
    shift = 0
    while most * (-(1 << 32 + shift) % by) >= 1 << 32 + shift:
        shift += 1
    return [
        f"mul.wide.u32 next, {number}, {-(-(1 << 32 + shift) // by)};",
        f"mov.b64 {{low,{quotient}}}, next; shr.u32 {quotient}, {quotient}, {shift};",
    ]
