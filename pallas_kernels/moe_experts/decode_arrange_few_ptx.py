"""The launch before the decode kernel for up to eight rows, in PTX: the first block makes the plan,
each thread of the others a vector of an image.

For sums in parts each part of a row has to be written. The slots of a row that reach no expert take
places of the row in items of experts that it does not reach, where its weight is 0; there are
enough of them as soon as there are as many items as slots.
"""

from pallas_kernels.moe_experts.decode_arrange_ptx import divide, load, mix
from pallas_kernels.moe_experts.decode_plan import TILE
from pallas_kernels.moe_experts.decode_shape import Part, Shape

THREADS = 256
SYNC = f"barrier.sync 8, {THREADS};"


def image_blocks(s: Shape) -> int:
    """Blocks of an image, which is D vectors."""
    return -(-s.d // THREADS)


class Places:
    """Bytes in shared memory: a bit an expert that is reached and, for sums in parts, words of a
    bit a slot of a row that is not; then pairs and weights of the plan.
    """

    def __init__(self, s: Shape):
        if s.rows * s.k > THREADS:
            raise ValueError(f"{s.k=} must be at most {THREADS // s.rows} for {s.rows=}")
        self.bits = -(-s.experts // 32)
        self.spread = s.joint and s.rows > 1
        self.zeros = self.bits + TILE * self.spread
        self.pairs = 4 * self.zeros
        self.words = self.zeros + 2 * TILE * s.items


def program(s: Shape, *, shared: bool) -> list[str]:
    """Operands: ids, weights, x, plan (``decode_plan.PlanLayout``), routed and shared image (GMEM),
    shared memory, block. Without ``shared`` its image is zero.
    """
    count = image_blocks(s)
    return [
        ".reg .b32 tid, e, weight, i, t, u, v, n, item, at, bit, row, g, c, far, low, v<4>, w<4>;",
        ".reg .b64 d, plan, from0, next; .reg .pred p, live, ok, tail0, live0;",
        *([".reg .b32 pair, lost, left; .reg .pred none, free;"] if s.joint else []),
        "mov.u32 tid, %tid.x; setp.ne.u32 p, $7, 0; @p bra IMAGES;",
        *_plan(s),
        f"bra END; IMAGES: sub.u32 u, $7, 1; setp.ge.u32 p, u, {count}; @p bra SHARED;",
        *_image(s, s.up, "$4", s.rows),
        f"bra END; SHARED: sub.u32 u, u, {count};",
        *_image(s, s.up8, "$5", s.rows if shared else 0),
        "END:",
    ]


def _plan(s: Shape) -> list[str]:
    """A pair a thread. Experts behind the last item stay unwritten."""
    at, to = Places(s), s.plan
    lines = [
        f"setp.lt.u32 live, tid, {s.rows * s.k}; mov.b32 e, 0xffffffff; mov.b32 weight, 0;",
        "mul.wide.u32 d, tid, 4; add.s64 from0, d, $0; add.s64 next, d, $1; add.s64 plan, d, $3;",
        "@live ld.global.nc.b32 e, [from0]; @live ld.global.nc.b32 weight, [next];",
        "shl.b32 at, tid, 2; add.u32 at, at, $6;",
        *_clear(s, at),
        f"{SYNC} setp.lt.u32 ok, e, {s.experts};",
        *(_slots(s) if s.joint and not at.spread else _by_expert(at)),
        *(_enough(s) if at.spread else []),
    ]
    lines += [
        "setp.eq.u32 p, tid, 0; @p st.global.b32 [$3], n;",
        "mul.wide.u32 d, item, 4; add.s64 d, d, $3;",
        f"@ok st.global.b32 [d+{4 * to.expert}], e;",
        *divide("row", "tid", s.k, THREADS),
        *(_part(s, at) if s.joint else []),
        f"mad.lo.u32 t, item, {TILE}, row; shl.b32 t, t, 2;",
        f"add.u32 t, t, $6; @ok st.shared.b32 [t+{at.pairs}], {'pair' if s.joint else 'tid'};",
        f"@ok st.shared.b32 [t+{at.pairs + 4 * TILE * s.items}], weight; {SYNC}",
    ]
    if at.spread:
        lines += [
            f"and.b32 row, tid, {TILE - 1}; shl.b32 t, row, 2; add.u32 t, t, $6;",
            f"ld.shared.b32 lost, [t+{4 * at.bits}]; add.u32 row, t, {at.pairs};",
        ]
    for first in range(0, 2 * TILE * s.items, THREADS):
        lines += [
            f"setp.lt.u32 p, tid, {2 * TILE * s.items - first};",
            f"@p ld.shared.b32 v, [at+{at.pairs + 4 * first}];",
            *(_take(s, at, first) if at.spread and first < TILE * s.items else []),
            f"@p st.global.b32 [plan+{4 * (to.pairs + first)}], v;",
        ]
    return lines


def _slots(s: Shape) -> list[str]:
    """An item for each slot of one row; expert 0 with weight 0 where no expert is reached."""
    return [
        "selp.b32 e, e, 0, ok; selp.b32 weight, weight, 0, ok; mov.b32 item, tid;",
        f"mov.b32 n, {s.k}; setp.lt.u32 ok, tid, n;",
    ]


def _enough(s: Shape) -> list[str]:
    """At least as many items as slots: expert 0 for the rest of them."""
    to = s.plan.expert
    return [
        f"setp.ge.u32 p, tid, n; setp.lt.and.u32 p, tid, {s.k}, p; mov.b32 v, 0;",
        f"@p st.global.b32 [plan+{4 * to}], v; max.u32 n, n, {s.k};",
    ]


def _part(s: Shape, at: Places) -> list[str]:
    """pair: where the pair's sum lies; slots that reach no expert are noted."""
    lines = [
        f"mul.lo.u32 t, row, {s.k}; sub.u32 t, tid, t;",
        f"mad.lo.u32 pair, t, {s.down.splits * s.rows}, row;",
    ]
    if at.spread:
        lines += [
            "mov.b32 bit, 1; shl.b32 bit, bit, t; not.pred free, ok; and.pred free, free, live;",
            f"shl.b32 t, row, 2; add.u32 t, t, $6; @free red.shared.or.b32 [t+{4 * at.bits}], bit;",
        ]
    return lines


def _take(s: Shape, at: Places, first: int) -> list[str]:
    """v: word ``first`` + tid of the pairs. Of the places that a row does not use, one takes its
    first slot in ``lost``, the next the second. Weights, which lie behind, find none left.
    """
    return [
        "setp.eq.and.s32 free, v, -1, p; setp.ne.and.u32 free, lost, 0, free;",
        f"@!free bra KEEP{first}; mov.b32 left, lost; add.u32 u, at, {at.pairs + 4 * first};",
        f"BACK{first}: setp.eq.u32 none, left, 0; setp.eq.or.u32 none, u, row, none;",
        f"@none bra TAKE{first}; sub.u32 u, u, {4 * TILE}; ld.shared.b32 t, [u];",
        "setp.eq.s32 free, t, -1; sub.u32 t, left, 1;",
        f"@free and.b32 left, left, t; bra BACK{first};",
        f"TAKE{first}: setp.eq.u32 none, left, 0; @none bra KEEP{first};",
        "sub.u32 t, left, 1; xor.b32 t, t, left; shr.u32 t, t, 1; popc.b32 t, t;",
        f"and.b32 v, tid, {TILE - 1}; mad.lo.u32 v, t, {s.down.splits * s.rows}, v;",
        f"KEEP{first}:",
    ]


def _by_expert(at: Places) -> list[str]:
    """Items by ascending expert: as many come first as experts below it are reached."""
    lines = [
        "shr.u32 i, e, 5; shl.b32 v, i, 2; add.u32 v, v, $6; and.b32 t, e, 31; mov.b32 bit, 1;",
        f"shl.b32 bit, bit, t; @ok red.shared.or.b32 [v], bit; {SYNC} mov.b32 n, 0;",
        "sub.u32 bit, bit, 1; mov.b32 item, 0; @ok ld.shared.b32 item, [v];",
        "and.b32 item, item, bit; popc.b32 item, item;",
    ]
    for word in range(at.bits):
        lines += [
            f"ld.shared.b32 t, [$6+{4 * word}]; popc.b32 t, t; add.u32 n, n, t;",
            f"setp.gt.u32 p, i, {word}; @p add.u32 item, item, t;",
        ]
    return lines


def _clear(s: Shape, at: Places) -> list[str]:
    """What depends on no id: an empty plan in shared memory, rows and counters in memory."""
    to, lines = s.plan, []
    pairs = at.zeros + TILE * s.items
    for first in range(0, at.words, THREADS):
        lines += [
            f"add.u32 t, tid, {first}; setp.lt.u32 p, t, {pairs}; selp.b32 v, 0xffffffff, 0, p;",
            f"setp.lt.u32 p, t, {at.zeros}; selp.b32 v, 0, v, p;",
            f"setp.lt.u32 p, t, {at.words}; @p st.shared.b32 [at+{4 * first}], v;",
        ]
    for first in range(0, TILE + to.counter_count, THREADS):
        lines += [
            f"add.u32 t, tid, {first}; setp.lt.u32 p, t, {s.rows}; selp.b32 v, t, 0xffffffff, p;",
            *([f"@p add.u32 v, v, {s.k * s.down.splits * s.rows};"] if s.joint else []),
            f"setp.lt.u32 p, t, {TILE}; selp.b32 v, v, 0, p;",
            f"setp.lt.u32 p, t, {TILE + to.counter_count};",
            f"@p st.global.b32 [plan+{4 * (to.rows + first)}], v;",
        ]
    return lines


def _image(s: Shape, part: Part, target: str, rows: int) -> list[str]:
    """``decode_plan.image`` of the first ``rows`` rows: vector i of block u is eight columns of
    token i % 8.
    """
    return [
        f"mad.lo.u32 i, u, {THREADS}, tid; setp.lt.u32 p, i, {s.d}; and.b32 row, i, {TILE - 1};",
        f"setp.lt.and.u32 live0, row, {rows}, p; shr.u32 g, i, 3;",
        *load(part.chunk, s.d, 0),
        *mix(0),
        f"mul.wide.u32 d, i, 16; add.s64 d, d, {target};",
        "@p st.global.v4.b32 [d], {w0,w1,w2,w3};",
    ]
