"""The rows of a list, dequantised into shared memory, as PTX: the first tile by all warpgroups, the
others by the producing one.

A stage holds a tile of rows as bf16, in blocks of 64 dims with wgmma's 128-byte swizzle, so that it
serves as K and, transposed, as V. Within eight dims they lie in the order 0 4 1 5 2 6 3 7, the one
that an FP4 word gives for free. A thread holds the same 32 dims of every eighth row.
"""

from pallas_kernels.sparse_attention.attend_shape import (
    LATENT_BYTES,
    MAX_SCALE_BYTE,
    PRODUCERS,
    QUERY_BYTES,
    SHIFT,
    WINDOW_BYTES,
    Attend,
)

AND_OR = 0xEA  # lop3 truth table of (a & b) | c
BOTH = 0x00010001
WINDOW_DEPTH, LATENT_DEPTH = 4, 8  # groups in flight
LOAD = "ld.volatile.global.b32"


def divide(out: str, value: str, by: int) -> str:
    """The assembler divides by any constant in twenty instructions."""
    if by & (by - 1):
        return f"div.u32 {out}, {value}, {by};"
    return f"shr.u32 {out}, {value}, {by.bit_length() - 1};"


def registers(s: Attend) -> list[str]:
    count = -(-s.tiles * s.tile // PRODUCERS)
    lines = [
        ".reg .b32 t,chunk,cursor,gw,wend,lend,gi,stage,turn,at,at1,at2,at3,off,lists,bar;",
        ".reg .b32 owner,pos,floor,low,first,last,slot,column,y<4>,u<2>,m0,m1,big;",
        ".reg .b64 from,mine,wmine;",
        f".reg .b32 e<{count}>,v<{count}>; .reg .pred in<{count}>,ok<{count}>,okay,got;",
    ]
    lines += [f".reg .b32 c{k}_<9>;" for k in range(WINDOW_DEPTH)]
    lines += [f".reg .b32 l{k}_<5>;" for k in range(LATENT_DEPTH)]
    return lines


def look_up(s: Attend, book: str = "sm") -> list[str]:
    """The list: the stored row of each slot of this block, -1 for none; last: how many slots up to
    a warp's last in use. It goes to ``s.list`` behind ``book``. query: the query row.

    Every load has an address and no predicate, and what uses it stands behind a branch, never
    taken, that the assembler moves nothing over: all loads of a kind are in flight at once.
    """
    slots = range(-(-s.tiles * s.tile // PRODUCERS))
    issued = "setp.eq.u32 p, sm, 0xFFFFFFFF; @p bra DONE;"
    lines = [
        f"mul.wide.u32 q64, query, 4; add.s64 from, position, q64; {LOAD} pos, [from];",
        f"mul.lo.u32 a, request, {s.per_request}; mul.wide.u32 q64, a, 4;",
        f"add.s64 from, position, q64; {LOAD} first, [from];",
        f"mul.wide.u32 q64, request, 4; add.s64 from, floors, q64; {LOAD} floor, [from];",
        f"add.s64 from, owners, q64; {LOAD} owner, [from];",
    ]
    for k in slots:
        lines += _slot(s, k)
        if s.selected:
            lines += [
                f"sub.s32 a, slot, {s.window}; max.s32 a, a, 0; min.s32 a, a, {s.selected - 1};",
                f"mad.lo.u32 a, query, {s.selected}, a; mul.wide.u32 q64, a, 4;",
                f"add.s64 from, selected, q64; {LOAD} e{k}, [from];",
            ]
        else:
            lines.append(f"mov.b32 e{k}, 0xFFFFFFFF;")
    lines += [
        issued,
        f"sub.s32 first, first, {s.window - 1}; sub.s32 low, pos, {s.window - 1};",
        "max.s32 low, low, floor; mov.b32 last, 0;",
    ]
    for k in slots:
        lines += [
            *_slot(s, k),
            f"setp.lt.and.u32 in{k}, slot, {s.window}, okay;",
            f"sub.u32 a, slot, {s.window}; setp.lt.and.u32 ok{k}, a, {s.selected}, okay;",
            f"add.s32 column, low, slot; setp.le.and.s32 in{k}, column, pos, in{k};",
            *(_ring_row(s, k) if s.ring else _window_row(s, k)),
            f"setp.lt.and.u32 ok{k}, e{k}, {s.pages * s.page}, ok{k};",
            f"selp.b32 c, e{k}, 0, ok{k}; {divide('c', 'c', s.page)}",
            f"mad.lo.u32 c, request, {s.pages}, c; selp.b32 c, a, c, in{k};",
            f"selp.b64 from, written, table, in{k}; mul.wide.u32 q64, c, 4;",
            f"add.s64 from, from, q64; {LOAD} v{k}, [from]; @in{k} mov.b32 e{k}, a;",
        ]
    lines.append(issued)
    for k in slots:
        lines += _list_row(s, k, book)
    return [*lines, "redux.sync.max.u32 last, last, 0xffffffff;"]


def _slot(s: Attend, k: int) -> list[str]:
    """slot: the thread's k-th of the row's list; okay: whether it is one of this block."""
    return [
        f"add.u32 slot, t, {PRODUCERS * k}; setp.lt.u32 okay, slot, {s.share};",
        f"mad.lo.u32 slot, split, {s.share}, slot;",
    ]


def _window_row(s: Attend, k: int) -> list[str]:
    """a: the row of position ``column`` among the request's own; ``written``: is it there."""
    return [
        f"sub.s32 a, column, first; setp.lt.and.u32 in{k}, a, {s.window_rows}, in{k};",
        f"mad.lo.u32 a, request, {s.window_rows}, a;",
    ]


def _ring_row(s: Attend, k: int) -> list[str]:
    """a: where position ``column`` lies in its owner's ring; ``written``: what lies there."""
    return [
        f"setp.ge.and.s32 in{k}, column, 0, in{k};",
        f"setp.lt.and.u32 in{k}, owner, {s.owners}, in{k}; {divide('a', 'column', s.ring)}",
        f"mul.lo.u32 a, a, {s.ring}; sub.u32 a, column, a; mad.lo.u32 a, owner, {s.ring}, a;",
    ]


def _list_row(s: Attend, k: int, book: str) -> list[str]:
    there = f"setp.ne.and.u32 in{k}, v{k}, 0, in{k};"
    if s.ring:
        there = f"setp.eq.and.u32 in{k}, v{k}, column, in{k};"
    return [
        f"add.u32 slot, t, {PRODUCERS * k}; mad.lo.u32 column, split, {s.share}, slot;",
        f"add.s32 column, column, low; {there}",
        f"setp.lt.and.u32 ok{k}, v{k}, {s.pool_pages}, ok{k};",
        f"{divide('a', f'e{k}', s.page)} sub.u32 a, v{k}, a; mad.lo.u32 a, a, {s.page}, e{k};",
        f"mov.b32 b, 0xFFFFFFFF; @in{k} mov.b32 b, e{k}; @ok{k} mov.b32 b, a;",
        f"shl.b32 c, slot, 2; add.u32 c, c, {book};",
        f"setp.lt.u32 okay, slot, {s.tiles * s.tile}; @okay st.shared.b32 [c+{s.list}], b;",
        "setp.ge.s32 okay, b, 0; add.u32 slot, slot, 1; @okay max.u32 last, last, slot;",
    ]


def places(s: Attend) -> list[str]:
    return [
        f"ld.shared.b32 end, [sm+{s.used}]; add.u32 end, end, {s.tile - 1};",
        divide("end", "end", s.tile) if s.tiles > 1 else "mov.b32 end, 1;",
        "max.u32 end, end, 1;",
        f"mul.lo.u32 c, end, {s.eights}; mul.lo.u32 b, split, {s.share};",
        f"sub.s32 gw, {s.window}, b; max.s32 gw, gw, 0; min.u32 gw, gw, {s.share};",
        "shr.u32 gw, gw, 3; min.u32 gw, gw, c;",
        # This thread's 32 dims, and where their first 16 bytes go in a block of eight rows.
        "and.b32 a, lane, 7; shr.u32 chunk, lane, 3; mad.lo.u32 chunk, warp, 4, chunk;",
        "and.b32 b, chunk, 1; shl.b32 b, b, 2; xor.b32 b, b, a; shl.b32 b, b, 4;",
        f"shr.u32 off, chunk, 1; mad.lo.u32 off, off, {128 * s.tile}, b;",
        "mad.lo.u32 off, a, 128, off;",
        f"add.u32 off, off, sm; add.u32 off, off, {QUERY_BYTES};",
        f"shl.b32 lists, a, 2; add.u32 lists, lists, sm; add.u32 lists, lists, {s.list};",
        "mad.lo.u32 wend, gw, 32, lists; mad.lo.u32 lend, c, 32, lists;",
        "mul.wide.u32 q64, chunk, 32; add.s64 wmine, window, q64;",
        "mul.wide.u32 q64, chunk, 16; add.s64 mine, pool, q64;",
    ]


def _begin(s: Attend, label: str) -> list[str]:
    """Wait until the stage is free, at its first group."""
    return [
        f"setp.ne.u32 p, gi, 0; @p bra FREE{label};",
        f"shl.b32 bar, stage, 3; add.u32 bar, bar, sm; add.u32 bar, bar, {s.empty};",
        f"WAIT{label}: mbarrier.try_wait.parity.shared::cta.b64 got, [bar], turn;",
        f"@!got bra WAIT{label};",
        f"FREE{label}:",
        *pieces(),
    ]


def pieces() -> list[str]:
    return ["xor.b32 at1, at, 16; xor.b32 at2, at, 32; xor.b32 at3, at, 48;"]


def _end(s: Attend, label: str) -> list[str]:
    """Step to the next group; a full stage is handed over."""
    return [
        "add.u32 cursor, cursor, 32; add.u32 gi, gi, 1; add.u32 at, at, 1024;",
        f"setp.ne.u32 p, gi, {s.eights}; @p bra KEEP{label};",
        "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;",
        "shl.b32 bar, stage, 3; add.u32 bar, bar, sm;",
        f"@leader mbarrier.arrive.shared::cta.b64 _, [bar+{s.full}];",
        "mov.b32 gi, 0; xor.b32 stage, stage, 1; setp.eq.u32 p, stage, 0;",
        "@p xor.b32 turn, turn, 1;",
        f"mad.lo.u32 at, stage, {s.stage_bytes}, off;",
        f"KEEP{label}:",
    ]


def _row(bytes_: int, base: str, ahead: int, end: str) -> list[str]:
    """``from``: this thread's codes in the group ``ahead`` of the cursor; p: whether they exist."""
    return [
        f"add.u32 a, cursor, {32 * ahead}; setp.lt.u32 p, a, {end};",
        "mov.b32 b, 0xFFFFFFFF; @p ld.shared.b32 b, [a]; setp.ge.s32 p, b, 0;",
        f"mul.wide.u32 from, b, {bytes_}; add.s64 from, from, {base};",
    ]


def _scale(first: int, step: int) -> str:
    """``from``: from a thread's codes on to their scale, ``first`` - ``step`` * chunk bytes."""
    return (
        f"mul.lo.u32 b, chunk, {step}; sub.u32 b, {first}, b; cvt.u64.u32 q64, b;"
        "add.s64 from, from, q64;"
    )


def _load_window(k: int, ahead: int) -> list[str]:
    zero = " ".join(f"mov.b32 c{k}_{j}, 0;" for j in range(9))
    lines = [zero, *_row(WINDOW_BYTES, "wmine", ahead, "wend")]
    for half in range(2):
        names = ",".join(f"c{k}_{4 * half + j}" for j in range(4))
        lines.append(f"@p ld.global.nc.v4.b32 {{{names}}}, [from+{16 * half}];")
    return [*lines, _scale(512, 31), f"@p ld.global.nc.u8 c{k}_8, [from];"]


def convert_window(k: int, ahead: int = 0) -> list[str]:
    """E4M3 codes as bf16 bits are 2^-120 of their values. Stored ``ahead`` bytes behind at."""
    bias = (120 - SHIFT) * 128 * BOTH
    lines = [
        f"min.u32 big, c{k}_8, {MAX_SCALE_BYTE}; mad.lo.u32 m0, big, {128 * BOTH:#x}, {bias:#x};"
    ]
    for j in range(4):
        for i in range(4):
            select = i << 4 | (4 + i) << 12
            lines += [
                f"prmt.b32 u0, c{k}_{2 * j}, c{k}_{2 * j + 1}, {select:#x}; shr.u32 u1, u0, 4;",
                f"and.b32 u1, u1, 0x07F007F0; lop3.b32 u1, u0, 0x80008000, u1, {AND_OR:#x};",
                f"mul.rn.bf16x2 y{i}, u1, m0;",
            ]
        lines.append(f"st.shared.v4.b32 [at{j or ''}+{ahead}], {{y0,y1,y2,y3}};")
    return lines


def _load_latent(k: int, ahead: int) -> list[str]:
    zero = " ".join(f"mov.b32 l{k}_{j}, 0;" for j in range(5))
    names = ",".join(f"l{k}_{j}" for j in range(4))
    return [
        zero,
        *_row(LATENT_BYTES, "mine", ahead, "lend"),
        f"@p ld.global.nc.v4.b32 {{{names}}}, [from];",
        _scale(256, 14),
        f"@p ld.global.nc.u16 l{k}_4, [from];",
    ]


def convert_latent(name: str, scales: str, ahead: int = 0) -> list[str]:
    """E2M1 codes as bf16 bits are 2^-126 of their values, E4M3 scales 2^-120."""
    lift = (120 + 126 - SHIFT) // 2 + 127
    lines = [f"mov.b32 big, {lift * 128 * BOTH:#x};"]
    for i in range(2):
        lines += [
            f"prmt.b32 m{i}, {scales}, {scales}, {0x1111 * i:#x}; shr.u32 m{i}, m{i}, 4;",
            f"and.b32 m{i}, m{i}, 0x07F007F0; mul.rn.bf16x2 m{i}, m{i}, big;",
            f"mul.rn.bf16x2 m{i}, m{i}, big;",
        ]
    for j in range(4):
        word = f"{name}{j}"
        for i in range(4):
            left = 6 - 4 * i
            move = f"shl.b32 u0, {word}, {left};" if left > 0 else f"shr.u32 u0, {word}, {-left};"
            signed, turn = word, ""
            if i < 3:
                signed, turn = "u1", f"shl.b32 u1, {word}, {12 - 4 * i};"
            lines += [
                f"{move} and.b32 u0, u0, 0x01C001C0; {turn}",
                f"lop3.b32 u0, {signed}, 0x80008000, u0, {AND_OR:#x};",
                f"mul.rn.bf16x2 y{i}, u0, m{j // 2};",
            ]
        lines.append(f"st.shared.v4.b32 [at{j or ''}+{ahead}], {{y0,y1,y2,y3}};")
    return lines


def first_tile(s: Attend) -> list[str]:
    """Tile 0 into stage 0: the warpgroups take groups in turn, all loads in flight at once."""
    count = -(-s.eights // 3)
    lines = [line for k in range(count) for line in _load_any(s, k)]
    for k in range(count):
        lines += [
            f"add.u32 a, wg, {3 * k}; setp.ge.u32 p, a, {s.eights}; @p bra FILLED;",
            "mad.lo.u32 at, a, 1024, off;",
            *pieces(),
            f"setp.ge.u32 p, a, gw; @p bra LATENT{k};",
            *convert_window(k),
            f"bra NEXT{k};",
            f"LATENT{k}:",
            *convert_latent(f"c{k}_", f"c{k}_8"),
            f"NEXT{k}:",
        ]
    return [*lines, "FILLED:"]


def _load_any(s: Attend, k: int) -> list[str]:
    zero = " ".join(f"mov.b32 c{k}_{j}, 0;" for j in range(9))
    low, high = (",".join(f"c{k}_{j}" for j in range(i, i + 4)) for i in (0, 4))
    return [
        f"{zero} add.u32 column, wg, {3 * k}; setp.lt.u32 p, column, {s.eights};",
        "mad.lo.u32 a, column, 32, lists; mov.b32 b, 0xFFFFFFFF; @p ld.shared.b32 b, [a];",
        "setp.ge.s32 p, b, 0; setp.lt.and.u32 got, column, gw, p;",
        "setp.ge.and.u32 okay, column, gw, p;",
        f"mul.wide.u32 q64, b, {WINDOW_BYTES}; add.s64 from, wmine, q64;",
        f"@got ld.global.nc.v4.b32 {{{low}}}, [from];",
        f"@got ld.global.nc.v4.b32 {{{high}}}, [from+16];",
        "mov.b32 a, b;",
        _scale(512, 31),
        f"@got ld.global.nc.u8 c{k}_8, [from];",
        f"mul.wide.u32 q64, a, {LATENT_BYTES}; add.s64 from, mine, q64;",
        f"@okay ld.global.nc.v4.b32 {{{low}}}, [from];",
        _scale(256, 14),
        f"@okay ld.global.nc.u16 c{k}_8, [from];",
    ]


def produce(s: Attend) -> list[str]:
    """Fill stages with the tiles after the first, until the used slots are through."""
    return [
        f"add.u32 cursor, lists, {32 * s.eights}; mov.b32 gi, 0; mov.b32 stage, 1;",
        f"mov.b32 turn, 1; add.u32 at, off, {s.stage_bytes};",
        *_window_groups(s),
        *_latent_groups(s),
    ]


def _window_groups(s: Attend) -> list[str]:
    lines = []
    for k in range(WINDOW_DEPTH):
        lines += _load_window(k, k)
    lines.append("WINDOW:")
    for k in range(WINDOW_DEPTH):
        lines += ["setp.ge.u32 p, cursor, wend; @p bra LATENTS;", *_begin(s, f"W{k}")]
        lines += [*convert_window(k), *_load_window(k, WINDOW_DEPTH), *_end(s, f"W{k}")]
    return [*lines, "bra WINDOW;"]


def _latent_groups(s: Attend) -> list[str]:
    lines = ["LATENTS:"]
    for k in range(LATENT_DEPTH):
        lines += _load_latent(k, k)
    lines.append("LATENT:")
    for k in range(LATENT_DEPTH):
        lines += ["setp.ge.u32 p, cursor, lend; @p bra PRODUCED;", *_begin(s, f"L{k}")]
        lines += [
            *convert_latent(f"l{k}_", f"l{k}_4"),
            *_load_latent(k, LATENT_DEPTH),
            *_end(s, f"L{k}"),
        ]
    return [*lines, "bra LATENT;", "PRODUCED:"]
