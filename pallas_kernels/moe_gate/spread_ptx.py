"""The gate kernel for few rows in PTX: all multiprocessors take part, each block with a few experts
and all of K; the last block to be done selects (``select_ptx``).
"""

from dataclasses import dataclass

from pallas_kernels.fold_ptx import fold
from pallas_kernels.moe_gate import select_ptx

BLOCKS, THREADS = 128, 256
WARPS = THREADS // 32
ROWS = 8
GROUP = 8  # columns of a load
BIASES = ("one", "two", "rows")  # for all rows, for text and image, for each row
SYNC = f"barrier.sync {select_ptx.BARRIER}, {THREADS};"


@dataclass(frozen=True)
class Spread:
    """The static sizes of a launch."""

    rows: int
    d: int
    experts: int
    top_k: int
    scale: float
    bias: str  # of ``BIASES``
    flags: bool  # whether rows come with flags: 1 image, 2 live

    @property
    def biases(self) -> int:
        return {"one": 1, "two": 2, "rows": self.rows}[self.bias]

    @property
    def each(self) -> int:
        """Experts of a block."""
        return self.experts // BLOCKS

    @property
    def sums(self) -> int:
        return self.each * self.rows

    @property
    def operands(self) -> tuple[str, ...]:
        """Behind those of ``select_ptx.select``."""
        return ("x", "weight", "logits", "counter", "block", *self.extra)

    @property
    def extra(self) -> tuple[str, ...]:
        return (*["bias_vl"] * (self.bias == "two"), *["flags"] * self.flags)

    def operand(self, name: str) -> str:
        return f"${6 + self.operands.index(name)}"

    @property
    def bias_at(self) -> int:
        """Bytes in shared memory: logits or parts of sums, then biases, a word a row, one more."""
        return 4 * max(ROWS * self.experts, THREADS)

    @property
    def rows_at(self) -> int:
        return self.bias_at + 4 * self.biases * self.experts

    @property
    def last_at(self) -> int:
        return self.rows_at + 4 * ROWS

    @property
    def words(self) -> int:
        return self.last_at // 4 + 1

    @property
    def select(self) -> select_ptx.Select:
        staged = select_ptx.Staged(self.bias_at, self.rows_at)
        return select_ptx.Select(
            self.rows, ROWS, self.experts, self.top_k, self.scale, 1, WARPS, False, staged=staged
        )


def program(s: Spread) -> list[str]:
    """Operands: those of ``select_ptx.select``, then ``s.operands``."""
    return ["{", *logits(s), *collect(s), "}", *select_ptx.select(s.select)]


def logits(s: Spread) -> list[str]:
    """This block's logits to memory; biases and what there is to know of a row to shared memory."""
    loads = -(-s.d // (GROUP * THREADS))
    count, x, w = 4 * loads, s.operand("x"), s.operand("weight")
    biases = -(-s.biases * s.experts // THREADS)
    lines = [
        ".reg .b32 tid, lane, at, a, t, f, lo, hi; .reg .b64 d, xa, wa; .reg .pred p, q, in;",
        f".reg .b32 x<{count * s.rows}>, w<{count * s.each}>, b<{biases}>;",
        f".reg .f32 acc<{s.sums}>, v<8>, u, z; mov.u32 tid, %tid.x; and.b32 lane, tid, 31;",
        f"mul.wide.u32 d, tid, {2 * GROUP}; add.s64 xa, {x}, d; add.s64 wa, {w}, d;",
        f"mul.wide.u32 d, {s.operand('block')}, {2 * s.d * s.each}; add.s64 wa, wa, d;",
    ]
    rest = s.d // GROUP - THREADS * (loads - 1)
    lines.append(f"setp.lt.u32 in, tid, {rest};")
    # Rows first: behind the weights they would come last.
    for name, base, n in (("x", "xa", s.rows), ("w", "wa", s.each)):
        kind = ".L1::no_allocate" if name == "w" else ""
        for i in range(loads):
            for r in range(n):
                first = 4 * (r * loads + i)
                names = [f"{name}{first + j}" for j in range(4)]
                if i == loads - 1 and rest < THREADS:
                    lines += [f"mov.b32 {one}, 0;" for one in names] + ["@in"]
                    lines[-1] += " "
                else:
                    lines.append("")
                offset = 2 * (r * s.d + i * GROUP * THREADS)
                lines[-1] += f"ld.global{kind}.v4.b32 {{{','.join(names)}}}, [{base}+{offset}];"
    lines += _stage(s)
    # All loads leave before a barrier, and no product begins before this zero has come: else the
    # compiler moves loads down to their use.
    lines += [
        f"setp.eq.u32 p, tid, 0; mov.b32 t, 0; @p st.shared.b32 [$0+{s.last_at}], t; {SYNC}",
        f"ld.shared.f32 z, [$0+{s.last_at}];",
        *[f"mov.f32 acc{v}, z;" for v in range(s.sums)],
    ]
    for i in range(loads):
        for e in range(s.each):
            lines += _unpack([f"w{4 * (e * loads + i) + j}" for j in range(4)])
            for r in range(s.rows):
                for j in range(4):
                    word, v = f"x{4 * (r * loads + i) + j}", f"acc{r * s.each + e}"
                    lines += [
                        f"shl.b32 t, {word}, 16; mov.b32 u, t; fma.rn.f32 {v}, u, v{2 * j}, {v};",
                        f"and.b32 t, {word}, 0xffff0000; mov.b32 u, t;",
                        f"fma.rn.f32 {v}, u, v{2 * j + 1}, {v};",
                    ]
    return [*lines, *_reduce(s)]


def _unpack(words: list[str]) -> list[str]:
    lines = []
    for j, word in enumerate(words):
        lines += [
            f"shl.b32 t, {word}, 16; mov.b32 v{2 * j}, t;",
            f"and.b32 t, {word}, 0xffff0000; mov.b32 v{2 * j + 1}, t;",
        ]
    return lines


def _stage(s: Spread) -> list[str]:
    """Biases [biases, E], and a word a row: twice its own bias's index, and 1 where it lives."""
    total, lines = s.biases * s.experts, []
    two = s.bias == "two"
    for i in range(0, total, THREADS):
        lines += [
            f"add.u32 at, tid, {i}; setp.lt.u32 p, at, {total}; mov.b64 d, $1;",
        ]
        if two:
            lines += [
                f"setp.ge.u32 q, at, {s.experts}; @q sub.u32 at, at, {s.experts};",
                f"selp.b64 d, {s.operand('bias_vl')}, d, q;",
            ]
        lines += [
            "mul.wide.u32 xa, at, 4; add.s64 d, d, xa;",
            f"@p ld.global.nc.b32 b{i // THREADS}, [d];",
        ]
    lines += [f"setp.lt.u32 q, tid, {s.rows}; mov.b32 f, 2; mov.b32 t, 0;"]
    if s.flags:
        lines += [
            f"mul.wide.u32 d, tid, 4; add.s64 d, d, {s.operand('flags')};",
            "@q ld.global.nc.b32 f, [d];",
        ]
    if two:
        lines.append("and.b32 t, f, 1; shl.b32 t, t, 1;")
    if s.bias == "rows":
        lines.append("shl.b32 t, tid, 1;")
    lines += ["shl.b32 at, tid, 2; add.u32 at, at, $0; bfe.u32 f, f, 1, 1; or.b32 t, t, f;"]
    for i in range(0, total, THREADS):
        lines.append(
            f"setp.lt.u32 p, tid, {total - i}; @p st.shared.b32 [at+{s.bias_at + 4 * i}],"
            f" b{i // THREADS};"
        )
    return [*lines, f"@q st.shared.b32 [at+{s.rows_at}], t;"]


def _reduce(s: Spread) -> list[str]:
    """A warp's sums, one a lane, to shared memory; then a thread adds those of all warps."""
    lines = [
        *fold([f"acc{v}" for v in range(s.sums)]),
        f"shl.b32 at, tid, 2; add.u32 at, at, $0; st.shared.f32 [at], acc0; {SYNC}",
        f"setp.ge.u32 p, tid, {s.sums}; @p bra SUMMED; ld.shared.f32 z, [at];",
    ]
    for warp in range(1, WARPS):
        lines.append(f"ld.shared.f32 u, [at+{128 * warp}]; add.f32 z, z, u;")
    return [
        *lines,
        f"div.u32 t, tid, {s.each}; mul.lo.u32 f, t, {s.each}; sub.u32 f, tid, f;",
        f"mad.lo.u32 t, t, {s.experts}, f; mad.lo.u32 t, {s.operand('block')}, {s.each}, t;",
        f"mul.wide.u32 d, t, 4; add.s64 d, d, {s.operand('logits')}; st.global.f32 [d], z;",
        f"SUMMED: {SYNC}",
    ]


def collect(s: Spread) -> list[str]:
    """The last block to come here takes all logits to shared memory, as ``select_ptx.publish``
    would; others are done. It leaves the counter as it was.
    """
    units, a_row, counter = s.rows * s.experts // 4, s.experts // 4, s.operand("counter")
    lines = [
        "setp.eq.u32 p, tid, 0; @!p bra COUNTED;",
        f"atom.acq_rel.gpu.global.add.u32 t, [{counter}], 1; st.shared.b32 [$0+{s.last_at}], t;",
        f"setp.eq.u32 q, t, {BLOCKS - 1}; @q st.global.u32 [{counter}], 0; COUNTED: {SYNC}",
        f"ld.shared.b32 t, [$0+{s.last_at}]; setp.ne.u32 p, t, {BLOCKS - 1}; @p bra END;",
    ]
    rounds = -(-units // THREADS)
    for i in range(rounds):
        lines += [
            f"add.u32 at, tid, {THREADS * i}; setp.lt.u32 p, at, {units};",
            f"mul.wide.u32 d, at, 16; add.s64 d, d, {s.operand('logits')};",
            f"@p ld.global.cg.v4.b32 {{x{4 * i},x{4 * i + 1},x{4 * i + 2},x{4 * i + 3}}}, [d];",
        ]
    for i in range(rounds):
        lines += [
            f"add.u32 at, tid, {THREADS * i}; setp.lt.u32 p, at, {units}; div.u32 t, at, {a_row};",
            f"mul.lo.u32 f, t, {a_row}; sub.u32 at, at, f; shl.b32 at, at, 4; bfe.u32 f, t, 1, 2;",
            f"shl.b32 f, f, 5; xor.b32 at, at, f; mad.lo.u32 at, t, {4 * s.experts}, at;",
            f"add.u32 at, at, $0; @p st.shared.v4.b32 [at],"
            f" {{x{4 * i},x{4 * i + 1},x{4 * i + 2},x{4 * i + 3}}};",
        ]
    return lines
