"""A warp's stream of weights through its own slots of shared memory (PTX): 256 columns of 32 rows
at a time. Bulk copies keep all of them on their way; loads to registers would share the few
counters that a warp can wait for. Another warp asks for them, since that takes as long as the
products do.
"""

from pallas_kernels.inline_ptx import BARRIER
from pallas_kernels.linear.fragment_ptx import PIN
from pallas_kernels.output_projection.joint_shape import (
    COLUMNS,
    PART,
    SIDES,
    SLOTS,
    STRIP,
    THREADS,
    WORKERS,
    Joint,
)

SLOT = STRIP * COLUMNS  # bytes
READY = f"barrier.sync {BARRIER}, {THREADS};"  # all threads, once
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def start(s: Joint) -> list[str]:
    """``slot`` and ``full``: a warp's first slot and its barrier, whose phase is to end in parity
    ``par``; the one that says it is empty lies behind all of those.
    """
    return [
        f"mad.lo.u32 slot, warp, {SLOTS * SLOT}, sm; add.u32 slot, slot, {s.ring};",
        f"mad.lo.u32 full, warp, {16 * SLOTS}, sm; add.u32 full, full, {s.bars};",
        f"add.u32 last, full, {8 * SLOTS}; mov.b32 par, 0;",
        f"setp.eq.u32 p, lane, 0; setp.lt.and.u32 p, tid, {WORKERS}, p;",
        *[f"@p mbarrier.init.shared::cta.b64 [full+{8 * i}], 1;" for i in range(2 * SLOTS)],
        f"fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; {READY}",
    ]


def copy(s: Joint) -> list[str]:
    """One lane asks for all rows of all of a warp's weights, each once its slot is empty."""
    lines = [
        f"elect.sync a|q, 0xffffffff; @!q bra END; mov.b32 nx, 0; mov.b32 size, {COLUMNS};",
        "mov.b32 par, 1;",
        f"EMPTY: mbarrier.try_wait.parity.shared::cta.b64 got, [full+{8 * SLOTS}], par;",
        f"@!got bra EMPTY; mul.wide.u32 q64, nx, {s.warps_k * COLUMNS}; add.s64 src, wp, q64;",
        f"sub.u32 a, nx, {s.first_slots}; mul.wide.u32 q64, a, {STRIP * s.outputs};",
        f"add.s64 other, wn, q64; setp.lt.u32 p, nx, {s.first_slots};",
        f"selp.b64 src, src, other, p; selp.b32 b, {s.k}, {s.outputs}, p; mov.b32 c, {SLOT};",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], c;",
    ]
    for row in range(STRIP):
        lines.append(f"mad.wide.u32 other, b, {row}, src;")
        lines.append(f"{COPY} [slot+{COLUMNS * row}], [other], size, [full];")
    return [
        *lines,
        *_turn(),
        f"add.u32 nx, nx, 1; setp.lt.u32 p, nx, {s.all_slots}; @p bra EMPTY; bra END;",
    ]


def wait(name: str) -> list[str]:
    return [f"{name}: mbarrier.try_wait.parity.shared::cta.b64 got, [full], par; @!got bra {name};"]


def leave() -> list[str]:
    """The slot is empty, as soon as all lanes have read it; to the next one and its scales."""
    return [
        f"{PIN} setp.eq.u32 p, lane, 0;",
        f"@p mbarrier.arrive.shared::cta.b64 _, [full+{8 * SLOTS}];",
        f"add.u32 sc, sc, {COLUMNS // 32};",
        *_turn(),
    ]


def _turn() -> list[str]:
    return [
        f"add.u32 slot, slot, {SLOT}; add.u32 full, full, 8;",
        "sub.u32 a, full, last; setp.eq.u32 p, a, 0; @p xor.b32 par, par, 1;",
        f"@p sub.u32 full, full, {8 * SLOTS}; @p sub.u32 slot, slot, {SLOTS * SLOT};",
    ]


def load_scales(s: Joint) -> list[str]:
    """A warp's scales of either half, two words a slot, a word a lane and register;
    ``store_scales`` needs them.
    """
    slot = COLUMNS // 32
    lines = [
        f"mul.lo.u32 a, part, {PART // STRIP}; mad.lo.u32 a, rank, {s.strips}, a;",
        f"add.u32 a, a, strip; mul.lo.u32 a, a, {s.k // 32}; mad.lo.u32 a, kpart, {slot}, a;",
        f"shr.u32 b, lane, 1; mad.lo.u32 a, b, {slot * s.warps_k}, a; and.b32 d, lane, 1;",
        "mad.lo.u32 a, d, 4, a; cvt.u64.u32 q64, a; add.s64 src, $2, q64;",
    ]
    for i in range(first_loads(s)):
        at = 16 * i * slot * s.warps_k
        lines.append(f"{_within(2 * s.first_slots - 32 * i)}ld.global.b32 e{i}, [src+{at}];")
    lines += [
        f"mad.lo.u32 a, rank, {SIDES}, side; mul.lo.u32 a, a, {s.tiles}; add.u32 a, a, b;",
        f"mul.lo.u32 a, a, {s.outputs // 32}; mad.lo.u32 a, part, {PART // 32}, a;",
        f"mad.lo.u32 a, half, {slot}, a; mad.lo.u32 a, d, 4, a; cvt.u64.u32 q64, a;",
        "add.s64 src, $4, q64;",
    ]
    for i in range(second_loads(s)):
        at = 16 * i * (s.outputs // 32)
        lines.append(f"{_within(2 * s.tiles - 32 * i)}ld.global.b32 f{i}, [src+{at}];")
    return lines


def store_scales(s: Joint) -> list[str]:
    """To shared memory, eight bytes a slot; ``sc``: this thread's of the first."""
    lines = [
        f"mad.lo.u32 sc, warp, {s.warp_scales}, sm; add.u32 sc, sc, {s.scales};",
        "mad.lo.u32 a, lane, 4, sc;",
    ]
    for i in range(first_loads(s)):
        lines.append(f"{_within(2 * s.first_slots - 32 * i)}st.shared.b32 [a+{128 * i}], e{i};")
    for i in range(second_loads(s)):
        at = 8 * s.first_slots + 128 * i
        lines.append(f"{_within(2 * s.tiles - 32 * i)}st.shared.b32 [a+{at}], f{i};")
    return [*lines, "shr.u32 a, qi, 1; add.u32 sc, sc, a;"]


def first_loads(s: Joint) -> int:
    return -(-s.first_slots // 16)


def second_loads(s: Joint) -> int:
    return -(-s.tiles // 16)


def _within(count: int) -> str:
    return f"setp.lt.u32 p, lane, {count}; @p " if count < 32 else ""
