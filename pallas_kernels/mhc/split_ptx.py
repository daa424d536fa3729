"""Mixing coefficients of few rows as PTX: many blocks take ``fn`` from memory at once.

A block sums 256 columns, one step a warp, and stores the sums of its rows. A second launch adds
them and iterates, a block a row. The order of addition depends on K alone. The places of K within
a product are permuted so that a thread loads 16 bytes.
"""

from dataclasses import dataclass

from pallas_kernels.inline_ptx import BARRIER, f32
from pallas_kernels.mhc import products_ptx
from pallas_kernels.mhc.fused_ptx import vector
from pallas_kernels.mhc.products_ptx import LOG2E, MIXES, STEP, SUMS, add_quads, split, squares

WARPS = 8
OUT = ("pre", "post", "comb")
THREADS = 32 * WARPS
COLUMNS = WARPS * STEP  # of a block
WORDS = 32  # of a row's sums in memory: mixes, the sum of squares, and what is not written
PITCH = 40  # words of a row of sums in shared memory: a warp's stores meet in no bank


@dataclass(frozen=True)
class Split:
    """Launches over ``rows`` of ``k`` columns, by blocks of 16 ``tiles`` rows."""

    rows: int
    k: int
    tiles: int
    iters: int
    eps: float
    norm_eps: float

    def __post_init__(self) -> None:
        products_ptx.check(self.k, self.iters)
        if self.tiles not in (1, 2, 4):
            raise ValueError(f"{self.tiles=} must be 1, 2 or 4")

    @property
    def tile(self) -> int:
        return 16 * self.tiles

    @property
    def parts(self) -> int:
        return self.k // COLUMNS

    @property
    def sum_words(self) -> int:
        """Words of shared memory of the launch that sums columns."""
        return WARPS * self.tile * PITCH


def _flat(lines: list[str]) -> list[str]:
    return [line for text in lines for line in text.strip().splitlines()]


def sums_program(s: Split) -> list[str]:
    """Operands: h, fn, base, scale, sums out [rows, parts, WORDS] (GMEM), SMEM words, tile, part.

    The parameters of the second launch are fetched to L2 meanwhile.
    """
    operands = "mov.b64 sums, $4; mov.b32 sm, $5; mov.b32 tile, $6; mov.b32 part, $7;"
    return _flat([*_start(s), operands, *_sums(s), "STORED:"])


def coefficients_program(s: Split) -> list[str]:
    """Operands: sums, base, scale, pre, post, comb (GMEM), SMEM words, row."""
    operands = [f"mov.b64 {name}, ${i};" for i, name in enumerate(("sums", "bp", "sp", *OUT))]
    operands.append("mov.b32 sm, $6; mov.b32 row, $7;")
    return _flat([*_start(s), *operands, *_coefficients(s), "END:"])


def _start(s: Split) -> list[str]:
    sums = max(s.parts // WARPS, WARPS)
    return [
        ".reg .b32 tid,lane,warp,quad,sm,tile,part,row,first,a,b,c,lo,hi,t;",
        ".reg .b32 m,z,big,r,base,scale,own,left,s,g,e,k<16>,u<4>,y<4>,x<4>;",
        f".reg .b32 f<24>,h<{8 * s.tiles}>,w<36>,acc<{12 * s.tiles}>,q<{2 * s.tiles}>,v<{sums}>;",
        f".reg .b64 q64,fp,hp<{2 * s.tiles}>,bp,sp,ip,op,sums,pre,post,comb;",
        ".reg .pred p,on,one,two;",
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5; and.b32 quad, lane, 3;",
    ]


def _sums(s: Split) -> list[str]:
    lines = [
        f"shr.u32 a, lane, 2; mul.lo.u32 b, part, {COLUMNS}; mad.lo.u32 b, warp, {STEP}, b;",
        "mad.lo.u32 b, quad, 8, b;",
        f"mad.lo.u32 c, a, {s.k}, b; mul.wide.u32 q64, c, 4; mov.b64 fp, $1; add.s64 fp, fp, q64;",
        *_load_fn(s),
        "mul.wide.u32 q64, b, 2; mov.b64 bp, $0; add.s64 bp, bp, q64;",
        f"mul.lo.u32 first, tile, {s.tile}; add.u32 a, a, first;",
    ]
    for j in range(2 * s.tiles):  # rows behind the last are the last again
        lines += [
            f"add.u32 c, a, {8 * j}; min.u32 c, c, {s.rows - 1};",
            f"mul.wide.u32 q64, c, {2 * s.k}; add.s64 hp{j}, bp, q64;",
        ]
    lines += [
        *_load_streams(s),
        "or.b32 c, tid, part; or.b32 c, c, tile; setp.eq.u32 p, c, 0;",
        "mov.b64 bp, $2; @p prefetch.global.L2 [bp]; mov.b64 bp, $3; @p prefetch.global.L2 [bp];",
        *[f"mov.b32 acc{e}, 0;" for e in range(12 * s.tiles)],
        *[f"mov.b32 q{e}, 0;" for e in range(2 * s.tiles)],
        *split(12),
        *_multiply(s),
    ]
    for word in range(8 * s.tiles):
        lines += squares(f"h{word}", f"q{word // 4}")
    return [*lines, *_share(s), *_store(s)]


def _load_fn(s: Split) -> list[str]:
    """Eight columns a thread of three rows of fn."""
    lines = []
    for n in range(3):
        for half in range(2):
            names = vector("f", 8 * n + 4 * half)
            lines.append(f"ld.global.nc.v4.b32 {names}, [fp+{4 * (8 * n * s.k + 4 * half)}];")
    return lines


def _load_streams(s: Split) -> list[str]:
    """Eight columns a thread of two rows of h a tile."""
    load = "ld.global.nc.L1::no_allocate.v4.b32"
    return [f"{load} {vector('h', 4 * j)}, [hp{j}];" for j in range(2 * s.tiles)]


def _multiply(s: Split) -> list[str]:
    lines = []
    for part in (2, 1, 0):
        for deep in range(2):
            for tile in range(s.tiles):
                first = 8 * tile + 2 * deep
                left = f"{{h{first},h{first + 4},h{first + 1},h{first + 5}}}"
                for n in range(3):
                    b = 12 * part + 4 * n + 2 * deep
                    out = vector("acc", 12 * tile + 4 * n)
                    lines.append(
                        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                        f" {out}, {left}, {{w{b},w{b + 1}}}, {out};"
                    )
    return lines


def _share(s: Split) -> list[str]:
    """The warp's sums to shared memory."""
    lines = [
        f"shr.u32 b, lane, 2; mad.lo.u32 a, warp, {s.tile}, b; mul.lo.u32 a, a, {4 * PITCH};",
        "add.u32 a, a, sm; mad.lo.u32 b, quad, 8, a; setp.eq.u32 p, quad, 0;",
    ]
    for j in range(2 * s.tiles):
        at = 4 * 8 * j * PITCH
        for n in range(3):
            first = 12 * (j // 2) + 4 * n + 2 * (j % 2)
            lines.append(f"st.shared.v2.b32 [b+{at + 32 * n}], {{acc{first},acc{first + 1}}};")
        lines += add_quads(f"q{j}")
        lines.append(f"@p st.shared.b32 [a+{at + 4 * MIXES}], q{j};")
    return [*lines, f"barrier.sync {BARRIER}, {THREADS};"]


def _store(s: Split) -> list[str]:
    """A warp adds the eight sums of every eighth row, a lane a word."""
    lines = [
        f"setp.ge.u32 p, lane, {SUMS}; @p bra STORED;",
        f"mad.lo.u32 a, warp, {PITCH}, lane; shl.b32 a, a, 2; add.u32 a, a, sm;",
        "add.u32 first, first, warp;",
        f"mad.lo.u32 b, first, {s.parts}, part; mad.lo.u32 b, b, {WORDS}, lane;",
        "mul.wide.u32 q64, b, 4; add.s64 op, sums, q64;",
    ]
    for i in range(s.tile // WARPS):
        at = 4 * WARPS * i * PITCH
        lines += [
            f"add.u32 c, first, {WARPS * i}; setp.ge.u32 p, c, {s.rows}; @p bra STORED;",
            *[f"ld.shared.b32 v{w}, [a+{at + 4 * w * s.tile * PITCH}];" for w in range(WARPS)],
            *add("v", WARPS),
            f"st.global.b32 [op+{4 * WARPS * i * s.parts * WORDS}], v0;",
        ]
    return lines


def add(name: str, count: int) -> list[str]:
    """The sum of ``count`` registers in the first of them, by pairs."""
    lines, at = [], list(range(count))
    while len(at) > 1:
        for a, b in zip(at[::2], at[1::2], strict=False):
            lines.append(f"add.f32 {name}{a}, {name}{a}, {name}{b};")
        at = at[::2]
    return lines


def _coefficients(s: Split) -> list[str]:
    """Of ``row``; a warp adds the sums of every eighth part."""
    each = s.parts // WARPS
    lines = [
        f"mad.lo.u32 a, row, {s.parts}, warp; mad.lo.u32 a, a, {WORDS}, lane;",
        "mul.wide.u32 q64, a, 4; add.s64 ip, sums, q64;",
        f"setp.lt.u32 on, lane, {SUMS}; mov.b32 base, 0; mov.b32 scale, 0;",
    ]
    for i in range(each):
        at = 4 * WORDS * i * WARPS
        lines.append(f"mov.b32 v{i}, 0; @on ld.global.cg.b32 v{i}, [ip+{at}];")
    return [
        *lines,
        f"setp.lt.u32 p, lane, {MIXES}; mul.wide.u32 q64, lane, 4;",
        "add.s64 ip, bp, q64; @p ld.global.nc.b32 base, [ip];",
        "shr.u32 b, lane, 2; min.u32 b, b, 2; mul.wide.u32 q64, b, 4;",
        "add.s64 ip, sp, q64; @p ld.global.nc.b32 scale, [ip];",
        *add("v", each),
        "shl.b32 a, tid, 2; add.u32 a, a, sm; st.shared.b32 [a], v0;",
        f"barrier.sync {BARRIER}, {THREADS}; setp.ne.u32 p, warp, 0; @p bra END;",
        *[f"ld.shared.b32 v{w}, [a+{128 * w}];" for w in range(WARPS)],
        *add("v", WARPS),
        *finish(s),
    ]


def finish(s: Split) -> list[str]:
    """A warp's coefficients of ``row`` to ``pre``, ``post``, ``comb``, from v0: a lane's sum."""
    return [*_mixes(s), *_sinkhorn(s)]


def _shuffle(out: str, value: str, kind: str, lane: int) -> str:
    return f"shfl.sync.{kind}.b32 {out}, {value}, {lane}, 31, 0xffffffff;"


def _mixes(s: Split) -> list[str]:
    """A lane a mix: pre and post are stored, own is what Sinkhorn's iterations begin with."""
    lines = [
        _shuffle("r", "v0", "idx", MIXES),
        f"fma.rn.f32 r, r, {f32(1 / s.k)}, {f32(s.norm_eps)}; rsqrt.approx.ftz.f32 r, r;",
        "mul.f32 m, v0, r; fma.rn.f32 m, m, scale, base; mov.b32 big, m;",
    ]
    for step in (1, 2):
        lines += [_shuffle("t", "big", "bfly", step), "max.f32 big, big, t;"]
    lines += [
        "setp.lt.u32 one, lane, 4; setp.lt.u32 two, lane, 8;",
        f"sub.f32 t, m, big; mul.f32 t, t, {f32(LOG2E)}; mul.f32 z, m, {f32(-LOG2E)};",
        "selp.b32 t, z, t, two; ex2.approx.ftz.f32 z, t; mov.b32 r, z;",
    ]
    for step in (1, 2):
        lines += [_shuffle("t", "r", "bfly", step), "add.f32 r, r, t;"]
    return [
        *lines,
        f"add.f32 t, z, {f32(1.0)}; selp.b32 r, t, r, two; rcp.approx.ftz.f32 r, r;",
        f"fma.rn.f32 own, z, r, {f32(s.eps)};",
        f"add.f32 t, r, {f32(s.eps)}; add.f32 r, r, r; selp.b32 t, t, r, one;",
        "and.b32 a, lane, 3; mad.lo.u32 a, row, 4, a; mul.wide.u32 q64, a, 4;",
        "mov.b64 op, post; @one mov.b64 op, pre; add.s64 op, op, q64; @two st.global.b32 [op], t;",
    ]


def _sinkhorn(s: Split) -> list[str]:
    """comb = u k y / s: each half step multiplies one of the vectors by the products of the other
    three sums, so that no reciprocal is waited for; g, made meanwhile, brings s back to about 1.
    """
    lines = [_shuffle(f"k{e}", "own", "idx", 8 + e) for e in range(16)]
    for j in range(4):
        lines += [
            f"add.f32 y{j}, k{j}, k{4 + j}; add.f32 t, k{8 + j}, k{12 + j};"
            f"add.f32 y{j}, y{j}, t; add.f32 y{j}, y{j}, {f32(s.eps)};"
            f"rcp.approx.ftz.f32 y{j}, y{j}; mov.b32 u{j}, {f32(1.0)};"
        ]
    lines += [f"mov.b32 s, {f32(1.0)}; mov.b32 g, s;"]
    if s.iters > 1:  # a loop: as many instructions in a row would have to be fetched
        lines += [f"mov.b32 left, {s.iters - 1};", "ITERATE:"]
        lines += _half(s, "u", "y", 4, 1) + _half(s, "y", "u", 1, 4)
        lines += ["sub.u32 left, left, 1; setp.ne.u32 p, left, 0; @p bra ITERATE;"]
    lines += ["rcp.approx.ftz.f32 s, s;"]
    lines += [
        "and.b32 b, lane, 3; shr.u32 a, lane, 2; sub.u32 a, a, 2;",
        "mov.b32 t, y0; mov.b32 z, u0;",
    ]
    for e in range(1, 4):
        lines += [f"setp.eq.u32 p, b, {e}; selp.b32 t, y{e}, t, p;"]
        lines += [f"setp.eq.u32 p, a, {e}; selp.b32 z, u{e}, z, p;"]
    return [
        *lines,
        "mul.f32 own, own, z; mul.f32 own, own, t; mul.f32 own, own, s;",
        "setp.lt.u32 p, lane, 24; setp.ge.and.u32 p, lane, 8, p;",
        "mad.lo.u32 a, row, 16, lane; sub.u32 a, a, 8; mul.wide.u32 q64, a, 4;",
        "add.s64 op, comb, q64; @p st.global.b32 [op], own;",
    ]


def _half(s: Split, new: str, old: str, along: int, across: int) -> list[str]:
    """new of each i from its sums over j of k[i * along + j * across] old[j]."""
    lines = [f"mul.f32 e, s, {f32(s.eps)};"]
    lines += [f"mul.f32 w{i}, k{along * i}, {old}0;" for i in range(4)]
    for j in range(1, 4):
        lines += [f"fma.rn.f32 w{i}, k{along * i + across * j}, {old}{j}, w{i};" for i in range(4)]
    return [
        *lines,
        *[f"fma.rn.f32 w{i}, {new}{i}, w{i}, e; mul.f32 {new}{i}, {new}{i}, g;" for i in range(4)],
        "mul.f32 lo, w0, w1; mul.f32 hi, w2, w3;",
        *[f"mul.f32 x{i}, w{i ^ 1}, {'hi' if i < 2 else 'lo'};" for i in range(4)],
        "mul.f32 s, lo, hi; mul.f32 s, s, g;",
        *[f"mul.f32 {new}{i}, {new}{i}, x{i};" for i in range(4)],
        "rcp.approx.ftz.f32 g, s; mul.f32 g, g, g; mul.f32 g, g, g;",
    ]
