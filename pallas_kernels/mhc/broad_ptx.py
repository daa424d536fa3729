"""Sums of products and squares of many rows as PTX: the planes of ``fn`` on the tensor cores.

A warpgroup brings rows to a ring of slots, 64 rows of ``chunk`` columns each, and the planes of the
same columns to two more. One or two others multiply: a thread takes 16 bytes of two rows at a time,
whose squares it adds while the tensor cores are at the 32 columns before. Sums of a slot are
float32 of the tensor cores; those of slots and segments are added in registers.
"""

from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.mhc.broad_shape import BROUGHT, DEEP, PRODUCT_BYTES, TILE, Broad
from pallas_kernels.mhc.fused_ptx import vector
from pallas_kernels.mhc.products_ptx import MIXES, STEP, SUMS, add_quads, squares

SHAPE = f"m64n{3 * MIXES}k16.f32.bf16.bf16"
ACCUMULATORS = 3 * MIXES // 2
OWN = MIXES // 2  # sums of a thread of a tile: three pairs of neighbours of two rows
PIECE = 16  # bytes of a copy
WORKER_REGISTERS, COPY_REGISTERS = 208, 80  # of 168 a thread at the launch of two workers


def program(s: Broad) -> list[str]:
    """Operands: h, image of the planes, sums out [parts, SUMS, padded] (GMEM), SMEM words, tile,
    part.
    """
    return [
        *_registers(s),
        *_start(s),
        *([f"setmaxnreg.inc.sync.aligned.u32 {WORKER_REGISTERS};"] if s.own > 1 else []),
        *_work(s),
        *_store(s),
        "bra END;",
        "BRING:",
        *([f"setmaxnreg.dec.sync.aligned.u32 {COPY_REGISTERS};"] if s.own > 1 else []),
        *_bring(s),
        "END:",
    ]


def _registers(s: Broad) -> list[str]:
    totals = s.own * (OWN + 2)
    return [
        ".reg .b32 tid,wg,warp,lane,gi,qi,sm,slot,par,bslot,bpar,bar,bbar,at,even,odd,row;",
        ".reg .b32 low,high,here,segment,left,a,b,c,t,lo,hi;",
        f".reg .f32 acc<{ACCUMULATORS}>; .reg .b32 f0_<8>,f1_<8>;",
        f".reg .b32 v<{totals}>,s<{totals}>,u<{totals}>;",
        ".reg .b64 q64,d,hp,bp,op; .reg .pred p,got,yes,no,one,other;",
    ]


def _start(s: Broad) -> list[str]:
    lines = [
        "mov.u32 tid, %tid.x; shr.u32 wg, tid, 7; bfe.u32 warp, tid, 5, 2; and.b32 lane, tid, 31;",
        "shr.u32 gi, lane, 2; and.b32 qi, lane, 3; mov.b32 sm, $3;",
        "mov.b32 bslot, 0; setp.ne.u32 p, tid, 0; @p bra READY;",
    ]
    arrivals = (
        (s.full, s.slots, 128),
        (s.empty, s.slots, 4),
        (s.brought, BROUGHT, 1),
        (s.used, BROUGHT, 4 * s.workers),
    )
    for first, slots, count in arrivals:
        lines += [
            f"mbarrier.init.shared::cta.b64 [sm+{first + 8 * i}], {count};" for i in range(slots)
        ]
    return [
        *lines,
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;",
        f"READY: barrier.sync {BARRIER}, {s.threads};",
        f"setp.eq.u32 p, wg, {s.workers}; @p bra BRING;",
    ]


def _wait(label: str, barrier: str, parity: str) -> list[str]:
    return [
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 got, [{barrier}], {parity};",
        f"@!got bra {label};",
    ]


def _advance(slot: str, parity: str, slots: int, by: int = 1) -> list[str]:
    """``by`` slots on; the parity of the barriers turns with the ring."""
    return [
        f"add.u32 {slot}, {slot}, {by}; setp.ge.u32 p, {slot}, {slots};",
        f"@p sub.u32 {slot}, {slot}, {slots}; @p xor.b32 {parity}, {parity}, 1;",
    ]


def _bring(s: Broad) -> list[str]:
    """A warp copies whole pieces of rows, 16 bytes a lane; one thread the planes. In odd rows the
    halves of 128 bytes change places, so that a warp's loads of two rows meet in no bank.
    """
    across = s.row_bytes // PIECE
    down = 128 // across
    share = s.k // s.parts
    lines = [
        f"and.b32 c, tid, 127; setp.ne.u32 other, c, 0; and.b32 a, c, {across - 1};",
        f"shr.u32 b, c, {across.bit_length() - 1}; mad.lo.u32 row, $4, {s.tile}, b;",
        f"mul.wide.u32 q64, $5, {2 * share}; mov.b64 hp, $0; add.s64 hp, hp, q64;",
        f"mul.wide.u32 q64, a, {PIECE}; add.s64 hp, hp, q64; mov.b64 bp, $1;",
        f"mul.wide.u32 q64, $5, {share // DEEP * PRODUCT_BYTES}; add.s64 bp, bp, q64;",
        f"and.b32 c, b, 1; shl.b32 c, c, 2; xor.b32 a, a, c; mul.lo.u32 at, b, {s.row_bytes};",
        f"mad.lo.u32 at, a, {PIECE}, at; add.u32 at, at, sm;",
        # Empty slots: their barriers' phase before the first counts as done.
        "mov.b32 slot, 0; mov.b32 par, 1; mov.b32 bpar, 1;",
        f"mov.b32 left, {s.segments * s.chunks};",
        "CHUNK: mad.lo.u32 bbar, bslot, 8, sm; @other bra PLANES;",
        *_wait("USED", f"bbar+{s.used}", "bpar"),
        f"add.u32 bbar, bbar, {s.brought}; mad.lo.u32 low, bslot, {s.plane_bytes}, sm;",
        f"add.u32 low, low, {s.planes}; mov.b32 high, {s.plane_bytes};",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bbar], high;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [low], [bp], high, [bbar];",
        "PLANES: bar.warp.sync 0xffffffff;",
        *[f"add.s64 bp, bp, {s.plane_bytes};", *_advance("bslot", "bpar", BROUGHT)],
    ]
    for m in range(s.tiles):
        lines += [
            "mad.lo.u32 bar, slot, 8, sm;",
            *_wait(f"EMPTY{m}", f"bar+{s.empty}", "par"),
            f"mad.lo.u32 b, slot, {s.slot_bytes}, at;",
        ]
        for i in range(TILE // down):  # rows behind the last are the last again
            lines += [
                f"add.u32 c, row, {TILE * m + down * i}; min.u32 c, c, {s.rows - 1};",
                f"mul.wide.u32 q64, c, {2 * s.k}; add.s64 q64, q64, hp;",
                f"cp.async.cg.shared.global [b+{down * i * s.row_bytes}], [q64], {PIECE};",
            ]
        lines.append(f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar+{s.full}];")
        lines += _advance("slot", "par", s.slots)
    return [
        *lines,
        f"add.s64 hp, hp, {s.row_bytes}; sub.u32 left, left, 1; setp.ne.u32 p, left, 0;",
        "@p bra CHUNK;",
    ]


def _totals(s: Broad) -> range:
    return range(s.own * (OWN + 2))


def _work(s: Broad) -> list[str]:
    """v: sums of a segment of the tiles owned, mixes then squares of either row; s and u: of those
    before, that wait for their partner.
    """
    lines = [
        "mov.b32 slot, wg; mov.b32 par, 0; mov.b32 bpar, 0; mov.b32 segment, 0;",
        f"mov.b32 high, {256 >> 4}; setp.eq.u32 yes, 0, 0; setp.ne.u32 no, 0, 0;",
        "setp.eq.u32 one, lane, 0;",
        f"mad.lo.u32 a, warp, 16, gi; mul.lo.u32 row, a, {s.row_bytes};",
        "mad.lo.u32 row, qi, 16, row; and.b32 a, gi, 1; mad.lo.u32 row, a, 64, row;",
        f"SEGMENT: mov.b32 left, {s.chunks};",
        *[f"mov.b32 v{i}, 0;" for i in _totals(s)],
        "MULTIPLY: mad.lo.u32 bbar, bslot, 8, sm;",
        *_wait("BROUGHT", f"bbar+{s.brought}", "bpar"),
        f"mad.lo.u32 low, bslot, {s.plane_bytes}, sm; add.u32 low, low, {s.planes};",
        # No swizzle: K-adjacent core matrices lie 128 bytes apart, groups of mixes 256 (high).
        f"bfe.u32 low, low, 4, 14; or.b32 low, low, {8 << 16};",
        # The broadcast tells the compiler that descriptors are uniform.
        "shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;",
    ]
    for own in range(s.own):
        lines += _slot(s, own)
    lines += [
        f"@one mbarrier.arrive.shared::cta.b64 _, [bbar+{s.used}];",
        *_advance("bslot", "bpar", BROUGHT),
        "sub.u32 left, left, 1; setp.ne.u32 p, left, 0; @p bra MULTIPLY;",
    ]
    for own in range(s.own):
        for half in range(2):
            lines += add_quads(f"v{own * (OWN + 2) + OWN + half}")
    return [*lines, *_pair(s)]


def _pair(s: Broad) -> list[str]:
    """((1 + 2) + (3 + 4)) of a part of four segments, (1 + 2) of one of two."""

    def add(name: str) -> list[str]:
        return [f"add.f32 v{i}, {name}{i}, v{i};" for i in _totals(s)]

    def keep(name: str) -> list[str]:
        return [f"mov.b32 {name}{i}, v{i};" for i in _totals(s)]

    if s.segments == 1:
        return []
    turn = "add.u32 segment, segment, 1; bra SEGMENT;"
    lines = ["and.b32 a, segment, 1; setp.ne.u32 p, a, 0; @p bra SECOND;", *keep("s"), turn]
    lines += ["SECOND:", *add("s")]
    if s.segments == 2:
        return lines
    lines += ["setp.eq.u32 p, segment, 3; @p bra FOURTH;", *keep("u"), turn]
    return [*lines, "FOURTH:", *add("u")]


def _load(s: Broad, unit: int) -> list[str]:
    """32 columns of rows g and g + 8 of the warp."""
    half, at = unit % 2, 128 * (unit // 2)
    base = ("even", "odd")[half]
    return [
        f"ld.shared.v4.b32 {vector(f'f{half}_', 4 * r)}, [{base}+{at + 8 * r * s.row_bytes}];"
        for r in range(2)
    ]


def _slot(s: Broad, own: int) -> list[str]:
    first = own * (OWN + 2)
    units = s.chunk // STEP
    lines = [
        "mad.lo.u32 bar, slot, 8, sm;",
        *_wait(f"FULL{own}", f"bar+{s.full}", "par"),
        f"mad.lo.u32 at, slot, {s.slot_bytes}, sm; add.u32 even, at, row; xor.b32 odd, row, 64;",
        "add.u32 odd, at, odd;",
        *_load(s, 0),
    ]
    for unit in range(units):
        name = f"f{unit % 2}_"
        for word in range(8):
            lines += squares(f"{name}{word}", f"v{first + OWN + word // 4}")
        lines.append("wgmma.fence.sync.aligned;")
        for j in range(2):
            a = f"{{{name}{2 * j},{name}{2 * j + 4},{name}{2 * j + 1},{name}{2 * j + 5}}}"
            lines += [
                f"add.u32 here, low, {(2 * unit + j) * (PRODUCT_BYTES >> 4)};",
                "mov.b64 d, {here, high};",
                f"wgmma.mma_async.sync.aligned.{SHAPE} {_accumulators()}, {a}, d,"
                f" {'yes' if unit or j else 'no'}, 1, 1, 0;",
            ]
        lines.append("wgmma.commit_group.sync.aligned;")
        if unit:  # the operands of the unit before are free
            lines.append("wgmma.wait_group.sync.aligned 1;")
        if unit + 1 < units:
            lines += _load(s, unit + 1)
    lines += [
        f"@one mbarrier.arrive.shared::cta.b64 _, [bar+{s.empty}];",
        "wgmma.wait_group.sync.aligned 0;",
    ]
    for i in range(OWN):
        third, second = i + 2 * OWN, i + OWN
        lines += [
            f"add.f32 acc{second}, acc{third}, acc{second};",
            f"add.f32 acc{i}, acc{second}, acc{i}; add.f32 v{first + i}, v{first + i}, acc{i};",
        ]
    return [*lines, *_advance("slot", "par", s.slots, s.workers)]


def _accumulators() -> str:
    return "{" + ",".join(f"acc{i}" for i in range(ACCUMULATORS)) + "}"


def _store(s: Broad) -> list[str]:
    """Neighbouring rows are neighbouring words."""
    lines = [
        f"mul.lo.u32 a, qi, 2; mad.lo.u32 a, $5, {SUMS}, a; mad.lo.u32 b, $4, {s.tile}, gi;",
        f"mad.lo.u32 b, wg, {TILE}, b; mad.lo.u32 b, warp, 16, b;",
        f"mul.wide.u32 op, a, {4 * s.padded}; mul.wide.u32 q64, b, 4; add.s64 op, op, q64;",
        "add.s64 op, op, $2; setp.eq.u32 p, qi, 0;",
    ]
    for own in range(s.own):
        for half in range(2):
            at, first = 4 * (own * s.workers * TILE + 8 * half), own * (OWN + 2)
            for j in range(3):
                for e in range(2):
                    place = at + 4 * s.padded * (8 * j + e)
                    lines.append(f"st.global.b32 [op+{place}], v{first + 4 * j + 2 * half + e};")
            place = at + 4 * s.padded * MIXES
            lines.append(f"@p st.global.b32 [op+{place}], v{first + OWN + half};")
    return lines
