"""Rows of compress-and-store as PTX: a thread holds 16 neighbouring values, which are pooled,
normed and rotated in registers.

Products and sums whose rounding the reference fixes carry ``.rn``, so that none are fused.
"""

from pallas_kernels.compress.store_shape import LATENT, LATENTS, ROPE, VALUES, WINDOW, Job
from pallas_kernels.inline_ptx import f32

REGISTERS = """
.reg .b32 tid,row,part,req,t,at,pos,start,length,a,b,c,d,x<16>,y<16>,g<16>,h<16>,w<8>,scale,amax;
.reg .b32 page,entry,place,byte,r,s;
.reg .b16 k0,k1;
.reg .b64 p64,q64,base;
.reg .pred p,live,write;
"""


def _vectors(names: list[str], kind: str) -> list[str]:
    """Moves of 16 bytes between p64 and four registers each; ``kind`` is ld or st."""
    lines = []
    for first in range(0, len(names), 4):
        four, place = f"{{{','.join(names[first : first + 4])}}}", f"[p64+{4 * first}]"
        pair = f"{four}, {place}" if kind == "ld" else f"{place}, {four}"
        lines.append(f"{kind}.global.v4.b32 {pair};")
    return lines


def _unpack(names: list[str]) -> list[str]:
    """Pairs of bf16 in w0 .. w7 as float32."""
    return [
        line
        for i in range(len(names) // 2)
        for line in (
            f"shl.b32 {names[2 * i]}, w{i}, 16;",
            f"and.b32 {names[2 * i + 1]}, w{i}, 0xFFFF0000;",
        )
    ]


def _pack(names: list[str]) -> list[str]:
    return [
        f"cvt.rn.bf16x2.f32 w{i}, {names[2 * i + 1]}, {names[2 * i]};"
        for i in range(len(names) // 2)
    ]


def _named(prefix: str, count: int = VALUES) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _scalar(name: str, operand: str) -> list[str]:
    return [f"mul.wide.u32 q64, req, 4; add.s64 p64, {operand}, q64; ld.global.b32 {name}, [p64];"]


def place(job: Job, at: dict[str, str], first_block: int) -> list[str]:
    """row, part (of the row), req, t, start, length, at (the token's number), pos; ``live``: the
    row exists, ``write``: it is to be stored, as row ``place`` of its pool. A row that does not
    exist repeats the last one.
    """
    lines = [
        f"mov.u32 tid, %tid.x; and.b32 part, tid, {job.lanes - 1}; sub.u32 a, blk, {first_block};",
        f"shr.u32 row, tid, {job.lanes.bit_length() - 1};",
        f"mad.lo.u32 row, a, {job.block_rows}, row;",
        f"setp.lt.u32 live, row, {job.rows}; min.u32 row, row, {job.rows - 1};",
        f"div.u32 req, row, {job.groups}; mul.lo.u32 a, req, {job.groups}; sub.u32 t, row, a;",
        *_scalar("start", at["starts"]),
        *_scalar("length", at["lengths"]),
        f"min.s32 length, length, {job.places}; mov.b32 at, t;",
    ]
    if job.ratio == 2:
        lines.append("and.b32 a, start, 1; shl.b32 at, t, 1; sub.u32 at, at, a;")
        lines.append("add.u32 at, at, 1;")
    lines.append("add.u32 pos, start, at; setp.lt.and.s32 write, at, length, live;")
    return [*lines, *(_ring(job, at) if job.kind == WINDOW else _page(job, at))]


def _page(job: Job, at: dict[str, str]) -> list[str]:
    """place: the row of the pool that the group's entry is; ``write`` as far as there is one."""
    return [
        *_scalar("a", at["floors"]),
        "setp.ge.and.s32 write, pos, a, write;",
        f"shr.s32 entry, pos, {job.ratio - 1};",
        f"setp.lt.and.u32 write, entry, {job.pages * job.unit}, write;",
        f"div.u32 b, entry, {job.unit}; mul.lo.u32 c, b, {job.unit}; sub.u32 c, entry, c;",
        f"mad.lo.u32 b, req, {job.pages}, b; mul.wide.u32 q64, b, 4;",
        f"add.s64 p64, {at['table']}, q64; mov.b32 page, 0xFFFFFFFF;",
        "@write ld.global.b32 page, [p64];",
        f"setp.lt.and.u32 write, page, {job.units}, write; mad.lo.u32 place, page, {job.unit}, c;",
    ]


def _ring(job: Job, at: dict[str, str]) -> list[str]:
    """place: the row of the rings that position ``pos`` has; ``write`` unless a later row of the
    chunk takes it or the request has no ring.
    """
    return [
        *_scalar("a", at["slots"]),
        f"setp.lt.and.u32 write, a, {job.units}, write;",
        f"add.s32 b, at, {job.unit}; setp.ge.and.s32 write, b, length, write;",
        f"div.u32 b, pos, {job.unit}; mul.lo.u32 b, b, {job.unit}; sub.u32 b, pos, b;",
        f"mad.lo.u32 place, a, {job.unit}, b;",
    ]


def load(job: Job, at: dict[str, str]) -> list[str]:
    """x0 .. x15: this thread's values of the row."""
    if job.kind == LATENTS and job.ratio == 2:
        return _load_pairs(job, at)
    return [
        f"mul.wide.u32 q64, row, {2 * job.width}; add.s64 p64, {at['x']}, q64;",
        "mul.wide.u32 q64, part, 32; add.s64 p64, p64, q64;",
        *_vectors(_named("w", 8), "ld"),
        *_unpack(_named("x")),
    ]


def _load_pairs(job: Job, at: dict[str, str]) -> list[str]:
    """The gated mean of the group's two tokens, rounded to bf16."""
    pitch = 4 * LATENT
    lines = [
        f"min.u32 c, at, {job.places - 1}; mad.lo.u32 b, req, {job.places}, c;",
        "setp.eq.u32 p, c, 0;",
    ]
    for name, first, second in (("u", "x", "y"), ("g", "g", "h")):
        lines += [
            f"mul.wide.u32 q64, b, {pitch}; add.s64 base, {at[name]}, q64;",
            f"mul.wide.u32 q64, req, {pitch}; add.s64 q64, {at['before_' + name]}, q64;",
            f"sub.s64 p64, base, {pitch}; selp.b64 p64, q64, p64, p;",
            "mul.wide.u32 q64, part, 64; add.s64 p64, p64, q64; add.s64 base, base, q64;",
            *_vectors(_named(first), "ld"),
            "mov.b64 p64, base;",
            *_vectors(_named(second), "ld"),
        ]
    for i in range(VALUES):
        lines += [
            # The gate of the token with the larger score is 1 / (1 + e), the other's e times it.
            f"sub.rn.f32 a, h{i}, g{i}; abs.f32 b, a; mul.rn.f32 b, b, {f32(-1.4426950408889634)};",
            f"ex2.approx.f32 b, b; add.rn.f32 c, b, {f32(1.0)}; rcp.approx.f32 c, c;",
            f"mul.rn.f32 b, b, c; setp.gt.f32 p, a, {f32(0.0)};",
            "selp.b32 d, b, c, p; selp.b32 c, c, b, p;",
            f"mul.rn.f32 x{i}, x{i}, d; mul.rn.f32 c, c, y{i}; add.rn.f32 x{i}, x{i}, c;",
        ]
    return [*lines, *_pack(_named("x")), *_unpack(_named("x"))]


def norm(job: Job, at: dict[str, str]) -> list[str]:
    """RMSNorm over the threads of a row: rounded values as x0 .. x15, and packed as w0 .. w7."""
    lines = ["mul.rn.f32 s, x0, x0;", *[f"fma.rn.f32 s, x{i}, x{i}, s;" for i in range(1, VALUES)]]
    step = 1
    while step < job.lanes:
        lines.append(f"shfl.sync.bfly.b32 a, s, {step}, 31, 0xffffffff; add.rn.f32 s, s, a;")
        step *= 2
    return [
        *lines,
        f"mul.rn.f32 s, s, {f32(1 / job.width)}; add.rn.f32 s, s, {f32(job.eps)};",
        "sqrt.rn.f32 s, s; rcp.rn.f32 s, s;",
        f"mul.wide.u32 q64, part, 32; add.s64 p64, {at['weight']}, q64;",
        *_vectors(_named("w", 8), "ld"),
        *_unpack(_named("y")),
        *[f"mul.rn.f32 x{i}, x{i}, s; mul.rn.f32 x{i}, x{i}, y{i};" for i in range(VALUES)],
        *_pack(_named("x")),
        *_unpack(_named("x")),
    ]


def emit(job: Job, at: dict[str, str]) -> list[str]:
    """The normed row, w0 .. w7, where the key projection reads it."""
    if job.kind != LATENTS:
        return []
    stores = [f"@live {line}" for line in _vectors(_named("w", 8), "st")]
    return [
        f"mul.wide.u32 q64, row, {2 * job.width}; add.s64 p64, {at['out']}, q64;",
        "mul.wide.u32 q64, part, 32; add.s64 p64, p64, q64;",
        *stores,
    ]


def rotate(job: Job, at: dict[str, str], label: str) -> list[str]:
    """The last 64 values of a row turned by its angles and rounded to bf16."""
    first = job.lanes - ROPE // VALUES
    lines = [
        f"setp.lt.u32 p, part, {first}; @p bra {label};",
        f"sub.u32 a, part, {first}; shl.b32 b, row, 2; add.u32 a, a, b; mul.wide.u32 q64, a, 32;",
    ]
    for name, registers in (("cos", "y"), ("sin", "g")):
        lines += [f"add.s64 p64, {at[name]}, q64;", *_vectors(_named(registers, 8), "ld")]
    for i in range(VALUES // 2):
        even, odd = f"x{2 * i}", f"x{2 * i + 1}"
        lines += [
            f"mul.rn.f32 a, {even}, y{i}; mul.rn.f32 b, {odd}, g{i};",
            f"mul.rn.f32 c, {even}, g{i}; mul.rn.f32 d, {odd}, y{i};",
            f"sub.rn.f32 {even}, a, b; add.rn.f32 {odd}, c, d;",
        ]
    return [*lines, *_pack(_named("x")), *_unpack(_named("x")), f"{label}:"]
