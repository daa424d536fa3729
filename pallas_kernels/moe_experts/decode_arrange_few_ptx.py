"""The launch before the decode kernel for up to eight rows, in PTX: the first block makes the plan,
each thread of the others a vector of an image.
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
    """Bytes in shared memory: a bit an expert that is reached, then pairs and weights of the
    plan.
    """

    def __init__(self, s: Shape):
        if s.rows * s.k > THREADS:
            raise ValueError(f"{s.k=} must be at most {THREADS // s.rows} for {s.rows=}")
        self.bits = -(-s.experts // 32)
        self.pairs = 4 * self.bits
        self.words = self.bits + 2 * TILE * s.items


def program(s: Shape, *, shared: bool) -> list[str]:
    """Operands: ids, weights, x, plan (``decode_plan.PlanLayout``), routed and shared image (GMEM),
    shared memory, block. Without ``shared`` its image is zero.
    """
    count = image_blocks(s)
    return [
        ".reg .b32 tid, e, weight, i, t, u, v, n, item, at, bit, row, g, c, far, low, v<4>, w<4>;",
        ".reg .b64 d, plan, from0, next; .reg .pred p, live, ok, tail0, live0;",
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
        *(_slots(s) if s.joint else _by_expert(at)),
    ]
    lines += [
        "setp.eq.u32 p, tid, 0; @p st.global.b32 [$3], n;",
        "mul.wide.u32 d, item, 4; add.s64 d, d, $3;",
        f"@ok st.global.b32 [d+{4 * to.expert}], e;",
        *divide("row", "tid", s.k, THREADS),
        f"mad.lo.u32 t, item, {TILE}, row; shl.b32 t, t, 2;",
        f"add.u32 t, t, $6; @ok st.shared.b32 [t+{at.pairs}], tid;",
        f"@ok st.shared.b32 [t+{at.pairs + 4 * TILE * s.items}], weight; {SYNC}",
    ]
    for first in range(0, 2 * TILE * s.items, THREADS):
        lines += [
            f"setp.lt.u32 p, tid, {2 * TILE * s.items - first};",
            f"@p ld.shared.b32 v, [at+{at.pairs + 4 * first}];",
            f"@p st.global.b32 [plan+{4 * (to.pairs + first)}], v;",
        ]
    return lines


def _slots(s: Shape) -> list[str]:
    """An item for each slot, so that all sums are written; expert 0 with weight 0 where no expert
    is reached.
    """
    return [
        "selp.b32 e, e, 0, ok; selp.b32 weight, weight, 0, ok; mov.b32 item, tid;",
        f"mov.b32 n, {s.k}; setp.lt.u32 ok, tid, n;",
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
    pairs = at.bits + TILE * s.items
    for first in range(0, at.words, THREADS):
        lines += [
            f"add.u32 t, tid, {first}; setp.lt.u32 p, t, {pairs}; selp.b32 v, 0xffffffff, 0, p;",
            f"setp.lt.u32 p, t, {at.bits}; selp.b32 v, 0, v, p;",
            f"setp.lt.u32 p, t, {at.words}; @p st.shared.b32 [at+{4 * first}], v;",
        ]
    for first in range(0, TILE + to.counter_count, THREADS):
        lines += [
            f"add.u32 t, tid, {first}; setp.lt.u32 p, t, {s.rows}; selp.b32 v, t, 0xffffffff, p;",
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
