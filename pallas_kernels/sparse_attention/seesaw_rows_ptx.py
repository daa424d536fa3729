"""The rows of ``seesaw_ptx``'s lists, dequantised into shared memory by one warpgroup, as PTX.

A tile holds window rows or latents alone, so that its eight groups are one run of instructions: the
assembler has the next group's at hand where one's has to wait.
"""

from pallas_kernels.sparse_attention.attend_shape import (
    BARRIER_PRODUCERS,
    LATENT_BYTES,
    PRODUCERS,
    QUERY_BYTES,
    WINDOW_BYTES,
    Seesaw,
)
from pallas_kernels.sparse_attention.rows_ptx import (
    LATENT_DEPTH,
    WINDOW_DEPTH,
    convert_latent,
    convert_window,
    divide,
    look_up,
    pieces,
)


def produce(s: Seesaw) -> list[str]:
    return [
        ".reg .b32 next; .reg .b64 wscales,scales;",
        *_places(s),
        "LOOK:",
        "mov.b32 query, row;",
        divide("request", "query", s.per_request),
        *look_up(s, "book"),
        f"mad.lo.u32 a, warp, 4, book; @leader st.shared.b32 [a+{s.used}], last;",
        f"barrier.sync {BARRIER_PRODUCERS}, {PRODUCERS};",
        f"ld.shared.v4.b32 {{y0,y1,y2,y3}}, [book+{s.used}];",
        "max.u32 y0, y0, y1; max.u32 y2, y2, y3; max.u32 lend, y0, y2;",
        f"add.u32 lend, lend, {s.tile - 1};",
        f"shr.u32 lend, lend, {s.tile.bit_length() - 1}; max.u32 lend, lend, 1;",
        f"min.u32 wend, lend, {s.window // s.tile}; sub.u32 lend, lend, wend;",
        "and.b32 a, lane, 7; mad.lo.u32 cursor, a, 4, book;",
        f"add.u32 cursor, cursor, {s.list};",
        *[line for k in range(WINDOW_DEPTH) for line in _load_window(k, "cursor", 32 * k)],
        *_tiles(s, "WINDOW", "wend", _window_groups(s)),
        *(_latents(s) if s.selected else []),
        f"add.u32 book, book, {s.book_bytes}; add.u32 a, sm, {3 * s.book_bytes};",
        "setp.ge.u32 p, book, a; @p mov.b32 book, sm;",
        f"add.u32 row, row, {s.grid}; setp.lt.u32 p, row, {s.rows}; @p bra LOOK;",
    ]


def _places(s: Seesaw) -> list[str]:
    """This thread's 32 dims, and where their first 16 bytes go in a block of eight rows."""
    return [
        "and.b32 a, lane, 7; shr.u32 chunk, lane, 3; mad.lo.u32 chunk, warp, 4, chunk;",
        "and.b32 b, chunk, 1; shl.b32 b, b, 2; xor.b32 b, b, a; shl.b32 b, b, 4;",
        f"shr.u32 off, chunk, 1; mad.lo.u32 off, off, {128 * s.tile}, b;",
        "mad.lo.u32 off, a, 128, off;",
        f"add.u32 off, off, sm; add.u32 off, off, {QUERY_BYTES};",
        "mad.wide.u32 wmine, chunk, 32, window; mad.wide.u32 mine, chunk, 16, pool;",
        "mad.wide.u32 wscales, chunk, 1, window; add.s64 wscales, wscales, 512;",
        "mad.wide.u32 scales, chunk, 2, pool; add.s64 scales, scales, 256;",
    ]


def _tiles(s: Seesaw, label: str, count: str, groups: list[str]) -> list[str]:
    """``count`` tiles: wait until the stage of tile g is free, fill it, hand it over. next: where
    the list goes on, or the same tile behind the last one.
    """
    return [
        f"{label}: sub.u32 {count}, {count}, 1; setp.eq.u32 p, {count}, 0;",
        f"add.u32 next, cursor, {4 * s.tile}; selp.b32 next, cursor, next, p;",
        "and.b32 stage, g, 1; mad.lo.u32 bar, stage, 8, sm;",
        "bfe.u32 turn, g, 1, 1; xor.b32 turn, turn, 1;",
        f"{label}_FREE: mbarrier.try_wait.parity.shared::cta.b64 got, [bar+{s.empty}], turn;",
        f"@!got bra {label}_FREE;",
        f"mad.lo.u32 at, stage, {s.stage_bytes}, off;",
        *pieces(),
        *groups,
        "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;",
        f"@leader mbarrier.arrive.shared::cta.b64 _, [bar+{s.full}];",
        f"add.u32 g, g, 1; add.u32 cursor, cursor, {4 * s.tile};",
        f"setp.ne.u32 p, {count}, 0; @p bra {label};",
    ]


def _window_groups(s: Seesaw) -> list[str]:
    lines = []
    for k in range(s.eights):
        ahead, inside = k + WINDOW_DEPTH, k + WINDOW_DEPTH < s.eights
        where = ("cursor", 32 * ahead) if inside else ("next", 32 * (ahead - s.eights))
        lines += convert_window(k % WINDOW_DEPTH, 1024 * k)
        lines += _load_window(k % WINDOW_DEPTH, *where)
    return lines


def _load_window(k: int, at: str, ahead: int) -> list[str]:
    lines = [
        " ".join(f"mov.b32 c{k}_{j}, 0;" for j in range(9)),
        f"ld.shared.b32 b, [{at}+{ahead}]; setp.ge.s32 p, b, 0;",
        f"mad.wide.u32 from, b, {WINDOW_BYTES}, wmine;",
        f"mad.wide.u32 q64, b, {WINDOW_BYTES}, wscales;",
    ]
    for half in range(2):
        names = ",".join(f"c{k}_{4 * half + j}" for j in range(4))
        lines.append(f"@p ld.global.nc.v4.b32 {{{names}}}, [from+{16 * half}];")
    return [*lines, f"@p ld.global.nc.u8 c{k}_8, [q64];"]


def _latents(s: Seesaw) -> list[str]:
    groups = []
    for k in range(LATENT_DEPTH):
        groups += convert_latent(f"l{k}_", f"l{k}_4", 1024 * k)
        groups += _load_latent(k, "next", 32 * k)
        if k == LATENT_DEPTH // 2 - 1:
            # Never taken: the assembler would put off this half's loads until after the other's.
            groups.append("setp.eq.u32 p, sm, 0xFFFFFFFF; @p bra DONE;")
    return [
        "setp.eq.u32 p, lend, 0; @p bra FILLED_ALL;",
        *[line for k in range(LATENT_DEPTH) for line in _load_latent(k, "cursor", 32 * k)],
        *_tiles(s, "LATENT", "lend", groups),
        "FILLED_ALL:",
    ]


def _load_latent(k: int, at: str, ahead: int) -> list[str]:
    """Of a slot without a row the pool's first, times a scale of 0: its codes are finite."""
    names = ",".join(f"l{k}_{j}" for j in range(4))
    return [
        f"mov.b32 l{k}_4, 0; ld.shared.b32 b, [{at}+{ahead}]; setp.ge.s32 p, b, 0;",
        f"max.s32 b, b, 0; mad.wide.u32 from, b, {LATENT_BYTES}, mine;",
        f"mad.wide.u32 q64, b, {LATENT_BYTES}, scales;",
        f"ld.global.nc.v4.b32 {{{names}}}, [from]; @p ld.global.nc.u16 l{k}_4, [q64];",
    ]
