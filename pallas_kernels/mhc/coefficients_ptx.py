"""Mixing coefficients of rows of four streams as PTX: products on the tensor cores, then Sinkhorn.

``fn`` in float32 is the exact sum of three bf16 numbers, so the products are exact and the sums
float32. K is cut into 128 segments, each the work of one warp, added in one order whatever the
launch: eight of a pass of a block, then the sixteen sums of eight. The places of K within a product
are permuted so that a thread loads 16 bytes.
"""

from dataclasses import dataclass

from pallas_kernels.inline_ptx import BARRIER, f32
from pallas_kernels.mhc.fused_ptx import vector

MIXES = 24
GROUPS, WARPS = 16, 8  # of segments: sums of eight warps
THREADS = 32 * WARPS
STEP = 32  # columns of a step of a warp, two products deep
WIDTH = GROUPS * WARPS * STEP  # K is a multiple
PITCH = 26  # words of a row of sums: mixes, then the sum of squares
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Mix:
    """A launch over ``rows`` of ``k`` columns: ``cluster`` blocks share 16 ``tiles`` rows."""

    rows: int
    k: int
    tiles: int
    cluster: int
    iters: int
    eps: float
    norm_eps: float

    def __post_init__(self) -> None:
        if self.k % WIDTH or not self.k > 0:
            raise ValueError(f"{self.k=} must be a multiple of {WIDTH}")
        if self.cluster not in (1, 2, 4, 8, 16):
            raise ValueError(f"{self.cluster=} must be 1, 2, 4, 8 or 16")
        if self.tiles not in (1, 2, 4):
            raise ValueError(f"{self.tiles=} must be 1, 2 or 4")
        if self.iters < 1:
            raise ValueError(f"{self.iters=} must be positive")

    @property
    def tile(self) -> int:
        return 16 * self.tiles

    @property
    def owned(self) -> int:
        """Rows whose coefficients a block ends with."""
        return self.tile // self.cluster

    @property
    def passes(self) -> int:
        return GROUPS // self.cluster

    @property
    def steps(self) -> int:
        return self.k // WIDTH

    @property
    def sums(self) -> int:
        """Words of the sums of one segment."""
        return self.tile * PITCH

    # Places in shared memory, in words: sums of warps, twice; of groups; of the rows owned.
    @property
    def groups(self) -> int:
        return 2 * WARPS * self.sums

    @property
    def mixes(self) -> int:
        return self.groups + self.passes * self.sums

    @property
    def parameters(self) -> int:
        """Base, then scale."""
        return self.mixes + self.owned * PITCH

    @property
    def words(self) -> int:
        return self.parameters + MIXES + 3

    @property
    def depth(self) -> int:
        """Steps whose operands are in registers or on their way."""
        return min(5, self.steps) if self.tiles == 1 else 1


def program(s: Mix) -> list[str]:
    """Operands: h, fn, base, scale, pre, post, comb (GMEM), SMEM words, tile, rank."""
    lines = [*_registers(s), *_start(s), *clear(s)]
    lines += _at_once(s) if s.tiles == 1 else _in_turn(s)
    lines += [*_gather(s), *_mixes(s), *_sinkhorn(s), "END:"]
    if s.cluster > 1:
        lines.append("barrier.cluster.wait.acquire;")  # a block's sums are read until all have met
    return [line for text in lines for line in text.strip().splitlines()]


def _at_once(s: Mix) -> list[str]:
    """For few rows: all of fn on its way to L2, then up to five steps of loads before a product."""
    lines = [
        f"mad.lo.u32 a, lane, {s.k}, first;",
        "mul.wide.u32 q64, a, 4; mov.b64 bp, $1; add.s64 bp, bp, q64;",
        f"setp.lt.u32 p, lane, {MIXES}; mov.b32 a, {4 * s.steps * STEP};",
    ]
    for _ in range(s.passes):
        lines.append("@p cp.async.bulk.prefetch.L2.global [bp], a;")
        lines.append(f"add.s64 bp, bp, {4 * WARPS * s.steps * STEP};")
    for p in range(s.passes):
        for i in range(s.depth):
            lines += [*load_fn(s, i), *load_streams(s, "h", i), *_advance(s, p, i)]
        for i in range(s.steps):
            slot = i % s.depth
            lines += [*split(slot), *multiply(s, slot), *squares(s, slot)]
            if i + s.depth < s.steps:
                lines += [*load_fn(s, slot), *load_streams(s, "h", slot)]
                lines += _advance(s, p, i + s.depth)
        lines += [*_publish(s, f"P{p}"), *clear(s)]
    return lines


def _in_turn(s: Mix) -> list[str]:
    """For many rows: a loop over passes and steps; the next step's operands are on their way."""
    return [
        f"mov.b32 left, {s.passes * s.steps}; mov.b32 step, 0;",
        *[*load_fn(s, 0), *load_streams(s, "g", 0)],
        "TURN: add.u32 step, step, 1; sub.u32 left, left, 1; setp.ne.u32 more, left, 0;",
        f"setp.eq.u32 end, step, {s.steps}; @end mov.b32 step, 0;",
        *[f"mov.b32 h{e}, g{e};" for e in range(8 * s.tiles)],
        *split(0),
        "@!more bra LOADED;",
        f"mov.b64 jump, {STEP}; @end mov.b64 jump, {_skip(s)}; shl.b64 q64, jump, 2;",
        "add.s64 fp, fp, q64; shl.b64 q64, jump, 1;",
        *[f"add.s64 hp{j}, hp{j}, q64;" for j in range(2 * s.tiles)],
        *[*load_fn(s, 0), *load_streams(s, "g", 0)],
        "LOADED:",
        *[*multiply(s, 0), *squares(s, 0)],
        "@!end bra TURN;",
        *_publish(s, "TURN"),
        *clear(s),
        "@more bra TURN;",
    ]


def _skip(s: Mix) -> int:
    """Columns from the last step of a segment to the warp's next segment."""
    return (WARPS * s.steps - s.steps + 1) * STEP


def _advance(s: Mix, p: int, i: int) -> list[str]:
    jump = STEP if i + 1 < s.steps else _skip(s)
    return [
        f"add.s64 fp, fp, {4 * jump};",
        *[f"add.s64 hp{j}, hp{j}, {2 * jump};" for j in range(2 * s.tiles)],
    ]


def _registers(s: Mix) -> list[str]:
    streams = 8 * s.tiles
    return [
        ".reg .b32 tid,lane,warp,quad,sm,row,rank,first,left,step,out,sums;",
        ".reg .b32 a,b,c,d,lo,hi,t,r,z,big;",
        f".reg .b32 f<{24 * s.depth}>,h<{streams * s.depth}>,g<{streams}>,w<36>;",
        f".reg .b32 acc<{12 * s.tiles}>,q<{2 * s.tiles}>,m<25>,e<24>,u<4>,v<8>;",
        f".reg .b64 q64,fp,hp<{2 * s.tiles}>,bp,op,jump;",
        ".reg .pred p,more,end;",
    ]


def _start(s: Mix) -> list[str]:
    """Rows behind the last are the last again."""
    share = s.passes * WARPS * s.steps * STEP
    lines = [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "and.b32 quad, lane, 3; mov.b32 sm, $7; mov.b32 rank, $9;",
        f"mov.b32 out, sm; add.u32 sums, sm, {4 * s.groups};",
        f"mul.lo.u32 row, $8, {s.tile}; shr.u32 a, lane, 2;",
        f"mul.lo.u32 b, rank, {share}; mul.lo.u32 c, warp, {s.steps * STEP}; add.u32 b, b, c;",
        "mov.b32 first, b; shl.b32 c, quad, 3; add.u32 b, b, c;",
        f"mad.lo.u32 c, a, {s.k}, b; mul.wide.u32 q64, c, 4; mov.b64 fp, $1;",
        "add.s64 fp, fp, q64;",
        "mul.wide.u32 q64, b, 2; mov.b64 bp, $0; add.s64 bp, bp, q64; add.u32 a, a, row;",
    ]
    for i in range(2 * s.tiles):
        lines += [
            f"add.u32 c, a, {8 * i}; min.u32 c, c, {s.rows - 1};",
            f"mul.wide.u32 q64, c, {2 * s.k}; add.s64 hp{i}, bp, q64;",
        ]
    return [
        *lines,
        f"mul.wide.u32 q64, tid, 4; mov.b64 bp, $2; setp.ge.u32 p, tid, {MIXES};",
        f"@p mov.b64 bp, $3; @p sub.s64 q64, q64, {4 * MIXES}; add.s64 bp, bp, q64;",
        f"shl.b32 a, tid, 2; add.u32 a, a, sm; setp.lt.u32 p, tid, {MIXES + 3};",
        f"@p ld.global.nc.b32 t, [bp]; @p st.shared.b32 [a+{4 * s.parameters}], t;",
    ]


def load_fn(s: Mix, slot: int) -> list[str]:
    """Eight columns a thread of three rows of fn."""
    lines = []
    for n in range(3):
        for half in range(2):
            names = vector("f", 24 * slot + 8 * n + 4 * half)
            lines.append(f"ld.global.nc.v4.b32 {names}, [fp+{4 * (8 * n * s.k + 4 * half)}];")
    return lines


def load_streams(s: Mix, name: str, slot: int) -> list[str]:
    """Eight columns a thread of two rows of h a tile."""
    load = "ld.global.nc.L1::no_allocate.v4.b32"
    return [
        f"{load} {vector(name, 8 * s.tiles * slot + 4 * j)}, [hp{j}];" for j in range(2 * s.tiles)
    ]


def clear(s: Mix) -> list[str]:
    names = [f"acc{e}" for e in range(12 * s.tiles)] + [f"q{e}" for e in range(2 * s.tiles)]
    return [f"mov.b32 {name}, 0;" for name in names]


def split(slot: int) -> list[str]:
    """w: pairs of fn as bf16, what that leaves as bf16, and what that leaves."""
    lines = []
    for pair in range(12):
        low, high = (f"f{24 * slot + 2 * pair + e}" for e in range(2))
        for part in range(3):
            out = f"w{12 * part + pair}"
            lines.append(f"cvt.rn.bf16x2.f32 {out}, {high}, {low};")
            if part < 2:
                lines += [
                    f"shl.b32 lo, {out}, 16; and.b32 hi, {out}, 0xFFFF0000;",
                    f"sub.f32 {low}, {low}, lo; sub.f32 {high}, {high}, hi;",
                ]
    return lines


def multiply(s: Mix, slot: int) -> list[str]:
    lines = []
    for part in (2, 1, 0):
        for deep in range(2):
            for tile in range(s.tiles):
                first = 8 * s.tiles * slot + 8 * tile + 2 * deep
                left = f"{{h{first},h{first + 4},h{first + 1},h{first + 5}}}"
                for n in range(3):
                    b = 12 * part + 4 * n + 2 * deep
                    out = vector("acc", 12 * tile + 4 * n)
                    lines.append(
                        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                        f" {out}, {left}, {{w{b},w{b + 1}}}, {out};"
                    )
    return lines


def squares(s: Mix, slot: int) -> list[str]:
    lines = []
    for j in range(2 * s.tiles):
        for e in range(4):
            lines += [
                f"shl.b32 lo, h{8 * s.tiles * slot + 4 * j + e}, 16;",
                f"and.b32 hi, h{8 * s.tiles * slot + 4 * j + e}, 0xFFFF0000;",
                f"fma.rn.f32 q{j}, lo, lo, q{j}; fma.rn.f32 q{j}, hi, hi, q{j};",
            ]
    return lines


def _publish(s: Mix, name: str) -> list[str]:
    """The warps' sums to ``out``, which alternates, then in one order to ``sums``, which grows."""
    lines = [
        f"mul.lo.u32 a, warp, {4 * s.sums}; shr.u32 b, lane, 2; add.u32 a, a, out;",
        f"mad.lo.u32 a, b, {4 * PITCH}, a; mad.lo.u32 b, quad, 8, a; setp.eq.u32 p, quad, 0;",
    ]
    for j in range(2 * s.tiles):
        at = 4 * 8 * j * PITCH
        for n in range(3):
            first = 12 * (j // 2) + 4 * n + 2 * (j % 2)
            pair = f"{{acc{first},acc{first + 1}}}"
            lines.append(f"st.shared.v2.b32 [b+{at + 32 * n}], {pair};")
        for step in (1, 2):
            lines += [f"shfl.sync.bfly.b32 t, q{j}, {step}, 31, 0xffffffff; add.f32 q{j}, q{j}, t;"]
        lines.append(f"@p st.shared.b32 [a+{at + 4 * MIXES}], q{j};")
    return [
        *lines,
        f"barrier.sync {BARRIER}, {THREADS}; shl.b32 c, tid, 2; add.u32 a, out, c;",
        f"add.u32 b, sums, c; add.u32 d, sums, {4 * s.sums};",
        f"ADD{name}: setp.ge.u32 p, b, d; @p bra ADDED{name};",
        *[f"ld.shared.b32 v{w}, [a+{4 * w * s.sums}];" for w in range(WARPS)],
        *[f"add.f32 v0, v0, v{w};" for w in range(1, WARPS)],
        f"st.shared.b32 [b], v0; add.u32 a, a, {4 * THREADS}; add.u32 b, b, {4 * THREADS};",
        f"bra ADD{name};",
        f"ADDED{name}: mov.b32 sums, d; add.u32 a, sm, sm; sub.u32 out, a, out;",
        f"add.u32 out, out, {4 * WARPS * s.sums};",
    ]


def _gather(s: Mix) -> list[str]:
    """The groups of all blocks, in one order, for the rows owned."""
    meet = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
    lines = [
        meet if s.cluster > 1 else f"barrier.sync {BARRIER}, {THREADS};",
        "mov.b32 c, tid;",
        f"GATHER: setp.ge.u32 p, c, {s.owned * PITCH}; @p bra GATHERED;",
        f"mad.lo.u32 a, rank, {s.owned * PITCH}, c; shl.b32 a, a, 2; add.u32 a, a, sm;",
    ]
    for g in range(GROUPS):
        at = 4 * (s.groups + g % s.passes * s.sums)
        if s.cluster > 1:
            lines.append(f"mapa.shared::cluster.u32 d, a, {g // s.passes};")
            lines.append(f"ld.shared::cluster.b32 m{g}, [d+{at}];")
        else:
            lines.append(f"ld.shared.b32 m{g}, [a+{at}];")
    lines += [f"add.f32 m0, m0, m{g};" for g in range(1, GROUPS)]
    leave = "barrier.cluster.arrive.release;" if s.cluster > 1 else ""
    return [
        *lines,
        f"shl.b32 a, c, 2; add.u32 a, a, sm; st.shared.b32 [a+{4 * s.mixes}], m0;",
        f"add.u32 c, c, {THREADS}; bra GATHER;",
        f"GATHERED: barrier.sync {BARRIER}, {THREADS}; {leave}",
        f"mad.lo.u32 row, rank, {s.owned}, row; add.u32 row, row, tid;",
        f"setp.ge.u32 p, tid, {s.owned}; @p bra END; setp.ge.u32 p, row, {s.rows}; @p bra END;",
    ]


def _mixes(s: Mix) -> list[str]:
    """m: mixes of the thread's own row scaled and shifted, e: base; pre and post are stored."""
    lines = [f"mul.lo.u32 a, tid, {4 * PITCH}; add.u32 a, a, sm;"]
    lines += [f"ld.shared.b32 m{n}, [a+{4 * (s.mixes + n)}];" for n in range(25)]
    lines += [f"ld.shared.b32 e{n}, [sm+{4 * (s.parameters + n)}];" for n in range(MIXES)]
    lines += [f"ld.shared.b32 u{n}, [sm+{4 * (s.parameters + MIXES + n)}];" for n in range(3)]
    lines += [f"fma.rn.f32 r, m24, {f32(1 / s.k)}, {f32(s.norm_eps)}; rsqrt.approx.ftz.f32 r, r;"]
    for n in range(MIXES):
        lines += [f"mul.f32 m{n}, m{n}, r; fma.rn.f32 m{n}, m{n}, u{min(n // 4, 2)}, e{n};"]
    for n in range(8):
        lines += [
            f"mul.f32 z, m{n}, {f32(-LOG2E)}; ex2.approx.ftz.f32 z, z; add.f32 z, z, {f32(1.0)};",
            "rcp.approx.ftz.f32 z, z;",
            f"add.f32 m{n}, z, {f32(s.eps)};" if n < 4 else f"add.f32 m{n}, z, z;",
        ]
    for first, out in ((0, "$4"), (4, "$5")):
        lines += [f"mul.wide.u32 q64, row, 16; mov.b64 op, {out}; add.s64 op, op, q64;"]
        lines += [f"st.global.v4.b32 [op], {vector('m', first)};"]
    return lines


def _sinkhorn(s: Mix) -> list[str]:
    def entry(i: int, j: int) -> str:
        return f"m{8 + 4 * i + j}"

    def step(by_row: bool) -> list[str]:
        lines = []
        for a in range(4):
            names = [entry(a, b) if by_row else entry(b, a) for b in range(4)]
            lines += [f"add.f32 lo, {names[0]}, {names[1]}; add.f32 lo, lo, {names[2]};"]
            lines += [f"add.f32 lo, lo, {names[3]}; add.f32 lo, lo, {f32(s.eps)};"]
            lines += ["rcp.approx.ftz.f32 lo, lo;", *[f"mul.f32 {n}, {n}, lo;" for n in names]]
        return lines

    lines = []
    for i in range(4):
        names = [entry(i, j) for j in range(4)]
        lines += [f"max.f32 big, {names[0]}, {names[1]};"]
        lines += [f"max.f32 big, big, {name};" for name in names[2:]]
        for name in names:
            lines += [f"sub.f32 {name}, {name}, big; mul.f32 {name}, {name}, {f32(LOG2E)};"]
            lines += [f"ex2.approx.ftz.f32 {name}, {name};"]
        lines += [f"add.f32 lo, {names[0]}, {names[1]};"]
        lines += [f"add.f32 lo, lo, {name};" for name in names[2:]]
        lines += ["rcp.approx.ftz.f32 lo, lo;"]
        lines += [f"fma.rn.f32 {name}, {name}, lo, {f32(s.eps)};" for name in names]
    lines += step(by_row=False)
    if s.iters > 1:  # a loop: as many instructions in a row would have to be fetched
        lines += [f"mov.b32 left, {s.iters - 1};", "ITERATE:"]
        lines += step(by_row=True) + step(by_row=False)
        lines += ["sub.u32 left, left, 1; setp.ne.u32 p, left, 0; @p bra ITERATE;"]
    lines += ["mul.wide.u32 q64, row, 64; mov.b64 op, $6; add.s64 op, op, q64;"]
    lines += [f"st.global.v4.b32 [op+{16 * i}], {vector('m', 8 + 4 * i)};" for i in range(4)]
    return lines
