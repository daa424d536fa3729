"""The pass over the streams between two sublayers, with the coefficients of the second, as PTX: for
few rows.

A cluster has a row, each of its blocks a sixteenth of the columns, a thread four columns of one
stream. ``fn`` is on its way while the streams are expanded. The cluster meets once: then every
block has the sum of squares for the norm, and the first block the sums that its last warp makes the
coefficients of. What is stored by other blocks is stored before they arrive, so that nobody waits
for a block to stay; the streams are stored after, since whoever arrives waits for its own stores.
"""

from dataclasses import dataclass

from pallas_kernels.columns import MAX_WIDTH
from pallas_kernels.fold_ptx import fold
from pallas_kernels.inline_ptx import BARRIER, f32
from pallas_kernels.mhc import products_ptx
from pallas_kernels.mhc.fused_ptx import STREAMS, expand_word, vector
from pallas_kernels.mhc.products_ptx import MIXES, SUMS
from pallas_kernels.mhc.split_ptx import Split, add, finish

BLOCKS = 16  # of a cluster
MAX_ROWS = 7  # as many clusters of 16 blocks run at once
WIDTH = 1024  # columns are a multiple
VALUES = SUMS + 1  # of a thread: the coefficients' sums, then the squares of the norm


@dataclass(frozen=True)
class Site:
    """A launch over ``rows`` of four streams of ``width`` columns. ``parts``: float32 addends that
    the sublayer's output comes in, in their order, 0 for bfloat16. ``mix_eps`` is the
    coefficients' norm's.
    """

    rows: int
    width: int
    parts: int
    iters: int
    eps: float
    norm_eps: float
    mix_eps: float

    def __post_init__(self) -> None:
        if self.width % WIDTH or not 0 < self.width <= MAX_WIDTH:
            raise ValueError(f"{self.width=} must be a multiple of {WIDTH} up to {MAX_WIDTH}")
        if not 0 < self.rows <= MAX_ROWS:
            raise ValueError(f"{self.rows=} must be 1 to {MAX_ROWS}")
        if not 0 <= self.parts <= MIXES:
            raise ValueError(f"{self.parts=} must be 0 to {MIXES}")
        products_ptx.check(self.mix.k, self.iters)

    @property
    def mix(self) -> Split:
        """What the coefficients are made with."""
        return Split(self.rows, STREAMS * self.width, 1, self.iters, self.eps, self.mix_eps)

    @property
    def columns(self) -> int:
        """Of a block; its threads that have some, too: four of one stream each."""
        return self.width // BLOCKS

    @property
    def warpgroups(self) -> int:
        return -(-self.columns // 128)

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    # Words of shared memory: sums of warps, of the cluster's blocks, squares of these.
    @property
    def sums(self) -> int:
        return 32 * self.warps

    @property
    def squares(self) -> int:
        return self.sums + 32 * BLOCKS

    @property
    def words(self) -> int:
        return self.squares + BLOCKS


def program(s: Site) -> list[str]:
    """Operands: h, y, post, comb, pre, weight, fn, base, scale, then streams, normed, pre, post and
    comb out (GMEM), SMEM words, row, rank in the cluster.
    """
    lines = [*_registers(), *_start(s), *_load(s), "mov.b32 sum, 0;"]
    for word in range(2):
        lines += expand_word(word)
    lines += [*_own_stream(s), *_multiply(), *fold([f"v{i}" for i in range(VALUES)]), *_share(s)]
    lines += ["@on st.global.v2.b32 [op], {o0,o1};", *_norm(s), *_coefficients(s), "END:"]
    return [line for text in lines for line in text.strip().splitlines()]


def _registers() -> list[str]:
    return [
        ".reg .b32 tid,lane,warp,sm,row,rank,stream,col,a,b,t,lo,hi,ylo,yhi,sum,norm;",
        f".reg .b32 h<16>,y<4>,x<4>,c<24>,u<8>,n<2>,d<4>,o<2>,v<32>,f<{4 * MIXES}>;",
        ".reg .b32 m,z,big,r,base,scale,own,left,s,g,e,k<16>,w<4>;",
        ".reg .b64 q64,p64,ip,op,pre,post,comb; .reg .pred p,on,one,two,first,last;",
    ]


def _start(s: Site) -> list[str]:
    """Threads without columns have zeros."""
    each = s.width // 64  # threads of a stream
    zeros = [f"h{4 * i + word}" for i in range(STREAMS) for word in range(2)]
    zeros += [f"{name}{i}" for name, count in (("y", 2), ("n", 2), ("f", 96)) for i in range(count)]
    return [
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 warp, tid, 5;",
        "mov.b32 sm, $14; mov.b32 row, $15; mov.b32 rank, $16;",
        "barrier.cluster.arrive.relaxed;",  # all blocks run before one of them stores to another
        f"setp.lt.u32 on, tid, {s.columns}; div.u32 stream, tid, {each};",
        f"mul.lo.u32 a, stream, {each}; sub.u32 a, tid, a; shl.b32 a, a, 2;",
        f"mad.lo.u32 col, rank, {s.columns}, a;",
        "setp.lt.and.u32 first, stream, 1, on;",
        *[f"mov.b32 {name}, 0;" for name in zeros],
    ]


def _load(s: Site) -> list[str]:
    load = "@on ld.global.nc.L1::no_allocate"
    lines = []
    for first, (pointer, count) in zip((0, 4, 20), (("$2", 4), ("$3", 16), ("$4", 4)), strict=True):
        lines += [f"mul.wide.u32 q64, row, {4 * count}; add.s64 p64, {pointer}, q64;"]
        lines += [
            f"ld.global.nc.v4.b32 {vector('c', first + e)}, [p64+{4 * e}];"
            for e in range(0, count, 4)
        ]
    lines += [
        f"mul.wide.u32 p64, row, {2 * STREAMS * s.width}; mul.wide.u32 q64, col, 2;",
        "add.s64 p64, p64, q64; add.s64 ip, $0, p64;",
        *[
            f"@on ld.global.nc.v2.b32 {{h{4 * i},h{4 * i + 1}}}, [ip+{2 * s.width * i}];"
            for i in range(STREAMS)
        ],
        "mul.wide.u32 q64, col, 2; add.s64 ip, $5, q64; @on ld.global.nc.v2.b32 {n0,n1}, [ip];",
        *_load_parameters(),
        f"mad.lo.u32 a, stream, {s.width}, col; mul.wide.u32 q64, a, 4; add.s64 op, $6, q64;",
    ]
    pitch = 4 * STREAMS * s.width
    if s.parts:  # their sum is waited for before fn is asked for
        lines.append("and.b32 a, tid, 7; setp.eq.and.u32 p, a, 0, on;")
        lines += [f"@p prefetch.global.L2 [op+{pitch * n}];" for n in range(MIXES)]
    lines += _load_output(s)
    lines += [f"{load}.v4.b32 {vector('f', 4 * n)}, [op+{pitch * n}];" for n in range(MIXES)]
    return lines


def _load_output(s: Site) -> list[str]:
    """y0, y1: the sublayer's output, rounded to bf16."""
    if not s.parts:
        return [
            f"mul.wide.u32 q64, row, {2 * s.width}; add.s64 ip, $1, q64; mul.wide.u32 q64, col, 2;",
            "add.s64 ip, ip, q64; @on ld.global.nc.v2.b32 {y0,y1}, [ip];",
        ]
    lines = [
        f"mad.lo.u32 a, row, {s.width}, col; mul.wide.u32 q64, a, 4; add.s64 ip, $1, q64;",
    ]
    # Registers of fn, which come later, hold the addends.
    for part in range(s.parts):
        at = 4 * part * s.rows * s.width
        lines.append(f"@on ld.global.nc.v4.b32 {vector('f', 4 * part)}, [ip+{at}];")
    lines += [f"mov.b32 d{e}, f{e};" for e in range(4)]
    for part in range(1, s.parts):
        lines += [f"add.f32 d{e}, d{e}, f{4 * part + e};" for e in range(4)]
    return [*lines, *[f"cvt.rn.bf16x2.f32 y{i}, d{2 * i + 1}, d{2 * i};" for i in range(2)]]


def _load_parameters() -> list[str]:
    """A lane's base and scale, of the warp that finishes."""
    return [
        f"setp.lt.u32 p, lane, {MIXES}; mov.b32 base, 0; mov.b32 scale, 0;",
        "mul.wide.u32 q64, lane, 4; add.s64 ip, $7, q64; @p ld.global.nc.b32 base, [ip];",
        "shr.u32 b, lane, 2; min.u32 b, b, 2; mul.wide.u32 q64, b, 4;",
        "add.s64 ip, $8, q64; @p ld.global.nc.b32 scale, [ip];",
    ]


def _own_stream(s: Site) -> list[str]:
    """o0, o1: the thread's own stream, as d0 .. d3 in float32; op: its place."""
    lines = ["mov.b32 o0, h0; mov.b32 o1, h1;"]
    for j in range(1, STREAMS):
        lines.append(f"setp.eq.u32 p, stream, {j};")
        lines += [f"selp.b32 o{word}, h{4 * j + word}, o{word}, p;" for word in range(2)]
    for word in range(2):
        lines.append(f"shl.b32 d{2 * word}, o{word}, 16;")
        lines.append(f"and.b32 d{2 * word + 1}, o{word}, 0xFFFF0000;")
    return [
        *lines,
        f"mul.wide.u32 q64, stream, {2 * s.width}; add.s64 op, $9, p64; add.s64 op, op, q64;",
    ]


def _multiply() -> list[str]:
    """v: the thread's sums. Only one of the four threads of a column counts its square."""
    lines = []
    for n in range(SUMS):
        factors = [f"f{4 * n + e}" if n < MIXES else f"d{e}" for e in range(4)]
        lines.append(f"mul.f32 v{n}, {factors[0]}, d0;")
        lines += [f"fma.rn.f32 v{n}, {factors[e]}, d{e}, v{n};" for e in range(1, 4)]
    return [*lines, f"mov.b32 v{SUMS}, 0; @first mov.b32 v{SUMS}, sum;"]


def _share(s: Site) -> list[str]:
    """The block's sums to the first block, its squares to all; then the cluster meets. Only the
    warp that stores to other blocks has something to release.
    """
    return [
        "shl.b32 a, tid, 2; add.u32 a, a, sm; st.shared.b32 [a], v0;",
        f"barrier.sync {BARRIER}, {s.threads}; barrier.cluster.wait.acquire;",
        "setp.ne.u32 p, warp, 0; @p bra SHARED;",
        *[f"ld.shared.b32 v{w}, [a+{128 * w}];" for w in range(s.warps)],
        *add("v", s.warps),
        f"mad.lo.u32 b, rank, 32, lane; shl.b32 b, b, 2; add.u32 b, b, sm; add.u32 b, b,"
        f" {4 * s.sums}; mov.b32 a, 0; mapa.shared::cluster.u32 b, b, a;",
        "st.shared::cluster.b32 [b], v0;",
        f"shfl.sync.idx.b32 t, v0, {SUMS}, 31, 0xffffffff; setp.lt.u32 p, lane, {BLOCKS};",
        f"shl.b32 b, rank, 2; add.u32 b, b, sm; add.u32 b, b, {4 * s.squares};",
        f"min.u32 a, lane, {BLOCKS - 1}; mapa.shared::cluster.u32 b, b, a;",
        "@p st.shared::cluster.b32 [b], t;",
        "barrier.cluster.arrive.release; bra MET;",
        "SHARED: barrier.cluster.arrive.relaxed;",
        "MET: barrier.cluster.wait.acquire;",
    ]


def _norm(s: Site) -> list[str]:
    lines = [
        f"ld.shared.v4.b32 {vector('v', e)}, [sm+{4 * (s.squares + e)}];"
        for e in range(0, BLOCKS, 4)
    ]
    lines += [
        *add("v", BLOCKS),
        f"fma.rn.f32 sum, v0, {f32(1 / s.width)}, {f32(s.norm_eps)}; rsqrt.approx.ftz.f32 norm,"
        " sum;",
    ]
    for e in range(2):
        lines += [
            f"shl.b32 lo, x{e}, 16; and.b32 hi, x{e}, 0xFFFF0000;",
            f"shl.b32 ylo, n{e}, 16; and.b32 yhi, n{e}, 0xFFFF0000;",
            "mul.f32 lo, lo, norm; mul.f32 hi, hi, norm; mul.f32 lo, lo, ylo;",
            f"mul.f32 hi, hi, yhi; cvt.rn.bf16x2.f32 x{e}, hi, lo;",
        ]
    return [
        *lines,
        f"mul.wide.u32 p64, row, {2 * s.width}; mul.wide.u32 q64, col, 2; add.s64 op, $10, p64;",
        "add.s64 op, op, q64; @first st.global.v2.b32 [op], {x0,x1};",
    ]


def _coefficients(s: Site) -> list[str]:
    """By the last warp of the first block, a lane a sum."""
    return [
        f"mad.lo.u32 a, rank, {s.warps}, warp; setp.ne.u32 p, a, {s.warps - 1}; @p bra END;",
        f"shl.b32 a, lane, 2; add.u32 a, a, sm; add.u32 a, a, {4 * s.sums};",
        *[f"ld.shared.b32 v{i}, [a+{128 * i}];" for i in range(BLOCKS)],
        *add("v", BLOCKS),
        "mov.b64 pre, $11; mov.b64 post, $12; mov.b64 comb, $13;",
        *finish(s.mix),
    ]
