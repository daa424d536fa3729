"""The gate kernel's register-level half in PTX: logits to shared memory, then a warp a row scores,
selects and weighs (ARCHITECTURE section 8, steps 1 to 3).

Logits of a block lie as f32 [rows, E] in shared memory. Those of row r and expert e are at
``e ^ bank(r)``, which spares both the threads of an accumulator and those of a row bank conflicts.
"""

import struct
from dataclasses import dataclass

LANES = 32
BARRIER = 8  # named barriers 8.. are ours; the lowering uses 0 and one a warpgroup from 1 on
CLUSTER_SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
LOG2E_REST = 1.925963033500e-08  # of LOG2E over its float32
# Approximate scores are off by less than (1 + score) times half of this.
MARGIN = 2.0**-16


@dataclass(frozen=True)
class Staged:
    """Where biases [n, E] lie in shared memory, and a word a row: twice its bias, and 1 if the row
    lives.
    """

    bias_at: int
    rows_at: int


@dataclass(frozen=True)
class Select:
    """What is static about the selection of a block's rows."""

    rows: int  # of the whole problem
    tile: int  # rows a block's accumulators hold
    experts: int
    top_k: int
    scale: float
    splits: int  # blocks of a cluster with partial sums of the same rows
    warps: int
    bias_rows: bool  # one bias a row, not one for all
    flags: bool = False  # whether rows come with flags: 1 image, 2 live
    staged: Staged | None = None  # biases that lie in shared memory instead

    @property
    def slots(self) -> int:
        """Experts a lane holds: lane, lane + 32, ..."""
        return self.experts // LANES

    @property
    def own(self) -> int:
        """Rows of the tile that a block selects for; some blocks have none if splits are many."""
        return -(-self.tile // self.splits)


def f32(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def publish(tile: int, experts: int) -> list[str]:
    """Accumulators $0.. of experts [128, tile] a warpgroup to shared memory at the address behind
    them.
    """
    row = 4 * experts
    lines = [
        ".reg .b32 tid, wi, gi, qi, at, to<2>; mov.u32 tid, %tid.x;",
        "shr.u32 wi, tid, 5; bfe.u32 gi, tid, 2, 3; and.b32 qi, tid, 3;",
        # Expert 128 (wi / 4) + 16 (wi % 4) + gi, and 8 more, each xor bank(token) = 8 qi.
        "and.b32 at, wi, 3; shl.b32 at, at, 1; xor.b32 at, at, qi; mad.lo.u32 at, at, 8, gi;",
        "shr.u32 wi, wi, 2; mad.lo.u32 at, wi, 128, at; shl.b32 at, at, 2;",
        f"mad.lo.u32 at, qi, {2 * row}, at; add.u32 to0, at, ${tile}; xor.b32 at, at, 32;",
        f"add.u32 to1, at, ${tile};",
        # All warps of the block have multiplied: what they read may be overwritten.
        f"bar.sync {BARRIER}, {experts};",
    ]
    index = 0
    for m in range(2):
        for j in range(tile // 8):
            for h in range(2):
                for i in range(2):
                    lines.append(f"st.shared.f32 [to{h}+{(8 * j + i) * row + 256 * m}], ${index};")
                    index += 1
    return lines


def _order(key: str, value: str) -> list[str]:
    """key: unsigned, in the order of the float ``value``; zero is below all of them."""
    return [
        f"mov.b32 {key}, {value}; shr.s32 t0, {key}, 31; or.b32 t0, t0, 0x80000000;",
        f"xor.b32 {key}, {key}, t0;",
    ]


def _approximate(s: str, logit: str) -> list[str]:
    return [
        f"mul.f32 f0, {logit}, {f32(LOG2E / 2)}; ex2.approx.f32 f0, f0;",
        "mul.f32 f1, f0, f0; add.f32 f1, f1, 0f3F800000; lg2.approx.f32 f1, f1;",
        f"mul.f32 f1, f1, {f32(LN2)}; setp.gt.f32 p, {logit}, {f32(20)};",
        f"selp.f32 f1, {logit}, f1, p; sqrt.approx.f32 f1, f1;",
        f"setp.lt.f32 p, {logit}, {f32(-8)}; selp.f32 {s}, f0, f1, p;",
    ]


def _exact(s: str, logit: str) -> list[str]:
    """s = sqrt(softplus(logit)), as max(logit, 0) + log1p(e), e = exp(-|logit|), log1p as 2 atanh(e
    / (2 + e)).
    """
    lines = [
        # Below -20 softplus is exp to float32's last bit; its root is taken in the exponent.
        f"abs.f32 f0, {logit}; mul.f32 f1, f0, 0f3F000000; setp.lt.f32 p, {logit}, {f32(-20)};",
        f"selp.f32 f0, f1, f0, p; min.NaN.f32 f0, f0, {f32(104)};",
        f"mul.f32 f1, f0, {f32(-LOG2E)}; neg.f32 f2, f1; fma.rn.f32 f2, f0, {f32(-LOG2E)}, f2;",
        f"fma.rn.f32 f2, f0, {f32(-LOG2E_REST)}, f2; ex2.approx.f32 f1, f1;",
        f"mul.f32 f0, f1, {f32(LN2)}; fma.rn.f32 f0, f0, f2, f1;",
        f"add.f32 f1, f0, {f32(2)}; div.rn.f32 f1, f0, f1; mul.f32 f2, f1, f1;",
        f"mov.f32 f3, {f32(1 / 15)};",
    ]
    lines += [f"fma.rn.f32 f3, f3, f2, {f32(1 / n)};" for n in (13, 11, 9, 7, 5, 3)]
    return [
        *lines,
        "mul.f32 f2, f2, f1; add.f32 f2, f2, f2; add.f32 f1, f1, f1; fma.rn.f32 f1, f2, f3, f1;",
        f"max.NaN.f32 f2, {logit}, 0f00000000; add.f32 f1, f1, f2; sqrt.rn.f32 f1, f1;",
        f"selp.f32 {s}, f0, f1, p;",
    ]


def _add_splits(c: Select) -> list[str]:
    """This block's rows of logits become sums over the cluster, in the order of the splits. A warp
    takes 32 experts, and several rows to have enough loads on their way.
    """
    rows = min(c.own, max(1, 32 // c.splits))
    loads = [(u, p) for u in range(rows) for p in range(c.splits)]
    lines = [
        f"{{ .reg .b32 a<{rows}>, q, w; .reg .f32 v<{len(loads)}>;",
        f"mov.b32 q, mine; add.u32 best, mine, {c.own}; min.u32 best, best, {c.tile};",
        "shl.b32 w, r, 7; add.u32 w, w, $0;",
        "ADD: setp.ge.u32 p, q, best; @p bra ADDED;",
    ]
    for u in range(rows):
        lines += [
            f"add.u32 t0, q, {u}; bfe.u32 t1, t0, 1, 2; shl.b32 t1, t1, 3; xor.b32 t1, t1, lane;",
            f"mad.lo.u32 t0, t0, {4 * c.experts}, w; mad.lo.u32 a{u}, t1, 4, t0;",
        ]
    for i, (u, split) in enumerate(loads):
        lines += [
            f"mov.u32 t0, {split}; mapa.shared::cluster.u32 t1, a{u}, t0;",
            f"ld.shared::cluster.f32 v{i}, [t1];",
        ]
    for i, (u, split) in enumerate(loads):
        if split:
            lines.append(f"add.f32 v{u * c.splits}, v{u * c.splits}, v{i};")
    lines += [f"st.shared.f32 [a{u}], v{u * c.splits};" for u in range(rows)]
    return [
        *lines,
        f"add.u32 q, q, {rows}; bra ADD;",
        "ADDED: }",
        # What was read of others is stored by now, so they may end; nothing is released to them.
        "barrier.cluster.arrive.relaxed.aligned;",
        f"bar.sync {BARRIER}, {LANES * c.warps};",
    ]


def _threshold(c: Select) -> list[str]:
    """thr: what an expert's approximate key must reach. Of the lanes' best keys the k-th largest
    is at most the k-th largest of all.
    """
    lines = ["mov.b32 best, k0;"]
    lines += [f"max.u32 best, best, k{i};" for i in range(1, c.slots)]
    for _ in range(c.top_k):
        lines += [
            "redux.sync.max.u32 thr, best, 0xffffffff; setp.eq.u32 p, best, thr;",
            "vote.sync.ballot.b32 t0, p, 0xffffffff; and.b32 t0, t0, below;",
            "setp.eq.and.u32 p, t0, 0, p; @p mov.b32 best, 0;",
        ]
    return [
        *lines,
        "redux.sync.max.u32 t1, top, 0xffffffff; mov.b32 f0, t1; add.f32 f0, f0, 0f3F800000;",
        # Back to the float that ``_order`` made thr of.
        "shr.s32 t0, thr, 31; not.b32 t0, t0; or.b32 t0, t0, 0x80000000; xor.b32 thr, thr, t0;",
        f"mov.b32 f1, thr; fma.rn.f32 f1, f0, {f32(-MARGIN)}, f1;",
        *_order("thr", "f1"),
    ]


def _compact(c: Select) -> list[str]:
    """n candidates; the first 32 (logit, id, bias) in id order to this row's place in shared
    memory.
    """
    lines = ["mov.b32 n, 0;"]
    for i in range(c.slots):
        lines += [
            f"setp.ge.u32 p, k{i}, thr; vote.sync.ballot.b32 t0, p, 0xffffffff;",
            "and.b32 t1, t0, below; popc.b32 t1, t1; add.u32 t1, t1, n; popc.b32 t0, t0;",
            f"add.u32 n, n, t0; setp.lt.and.u32 p, t1, {LANES}, p; mad.lo.u32 t1, t1, 16, row;",
            f"add.u32 t0, lane, {LANES * i}; mov.b32 t2, l{i}; mov.b32 t3, b{i};",
            "@p st.shared.v4.b32 [t1], {t2,t0,t3,t3};",
        ]
    return [*lines, "bar.warp.sync 0xffffffff;"]


def _take(r: int) -> str:
    """Lane r keeps pick r: score f0, expert t1."""
    return f"setp.eq.u32 p, lane, {r}; @p mov.b32 ms, f0; @p mov.b32 mi, t1;"


def _pick_candidates(c: Select) -> list[str]:
    """A lane a candidate."""
    lines = [
        "setp.lt.u32 live, lane, n; mad.lo.u32 t0, lane, 16, row; mov.b32 t2, 0; mov.b32 id, 0;",
        "@live ld.shared.v4.b32 {t2,id,t3,t1}, [t0]; mov.b32 l0, t2; mov.b32 b0, t3;",
        *_exact("s0", "l0"),
        "add.f32 f0, s0, b0;",
        *_order("k0", "f0"),
        "@!live mov.b32 k0, 0;",
    ]
    for r in range(c.top_k):
        lines += [
            "redux.sync.max.u32 t0, k0, 0xffffffff; setp.eq.u32 p, k0, t0;",
            "vote.sync.ballot.b32 t0, p, 0xffffffff; brev.b32 t0, t0; clz.b32 t0, t0;",
            "shfl.sync.idx.b32 f0, s0, t0, 31, 0xffffffff; add.f32 sum, sum, f0;",
            "shfl.sync.idx.b32 t1, id, t0, 31, 0xffffffff;",
            "setp.eq.u32 p, lane, t0; @p mov.b32 k0, 0;",
            _take(r),
        ]
    return lines


def _pick_all(c: Select) -> list[str]:
    """The same from all experts, for rows with more than 32 candidates."""
    lines = []
    for i in range(c.slots):
        lines += [*_exact(f"s{i}", f"l{i}"), f"add.f32 f0, s{i}, b{i};", *_order(f"k{i}", "f0")]
    for r in range(c.top_k):
        lines.append("mov.b32 best, k0;")
        lines += [f"max.u32 best, best, k{i};" for i in range(1, c.slots)]
        lines.append("redux.sync.max.u32 best, best, 0xffffffff; mov.b32 t0, 0xffffffff;")
        for i in reversed(range(c.slots)):
            lines.append(
                f"setp.eq.u32 p, k{i}, best; @p add.u32 t0, lane, {LANES * i}; @p mov.b32 f1, s{i};"
            )
        lines.append("redux.sync.min.u32 t1, t0, 0xffffffff; setp.eq.u32 live, t0, t1;")
        lines.append("shr.u32 t0, t1, 5;")
        lines += [f"setp.eq.and.u32 p, t0, {i}, live; @p mov.b32 k{i}, 0;" for i in range(c.slots)]
        lines += [
            "and.b32 t0, t1, 31; shfl.sync.idx.b32 f0, f1, t0, 31, 0xffffffff;",
            "add.f32 sum, sum, f0;",
            _take(r),
        ]
    return lines


def _row(c: Select) -> list[str]:
    """Where row r of this block is, and its biases; ``done`` if there is none."""
    return [
        f"add.u32 at, mine, r; setp.ge.u32 done, r, {c.own};",
        f"setp.ge.or.u32 done, at, {c.tile}, done;",
        f"mad.lo.u32 grow, $5, {c.tile}, at; setp.ge.or.u32 done, grow, {c.rows}, done;",
        "bfe.u32 swz, at, 1, 2; shl.b32 swz, swz, 3; xor.b32 swz, swz, lane;",
        f"mad.lo.u32 row, at, {4 * c.experts}, $0; mad.lo.u32 at, swz, 4, row;",
        *(_biases(c) if c.staged is None else _staged(c, c.staged)),
    ]


def _biases(c: Select) -> list[str]:
    lines = ["mov.b64 d0, $1;"]
    if c.flags:
        lines = [
            "mul.wide.u32 d0, grow, 4; add.s64 d0, d0, $7; mov.b32 alive, 0;",
            "@!done ld.global.nc.b32 alive, [d0]; and.b32 t0, alive, 1; setp.eq.u32 p, t0, 0;",
            "selp.b64 d0, $1, $6, p; bfe.u32 alive, alive, 1, 1;",
        ]
    return [
        *lines,
        f"mul.wide.u32 d1, grow, {4 * c.experts if c.bias_rows else 0}; add.s64 d1, d1, d0;",
        "mul.wide.u32 d0, lane, 4; add.s64 d0, d0, d1;",
        *[f"@!done ld.global.f32 b{i}, [d0+{128 * i}];" for i in range(c.slots)],
    ]


def _staged(c: Select, s: Staged) -> list[str]:
    """Biases and ``alive`` of row ``grow``."""
    return [
        "shl.b32 t0, grow, 2; add.u32 t0, t0, $0; mov.b32 alive, 0;",
        f"@!done ld.shared.b32 alive, [t0+{s.rows_at}];",
        f"shr.u32 t1, alive, 1; mad.lo.u32 t1, t1, {4 * c.experts}, $0; shl.b32 t0, lane, 2;",
        "add.u32 t1, t1, t0;",
        *[f"@!done ld.shared.f32 b{i}, [t1+{s.bias_at + 128 * i}];" for i in range(c.slots)],
    ]


def _scores(c: Select) -> list[str]:
    """Logits l<slots> from shared memory, approximate keys k<slots> and the best score, top."""
    lines = [f"ld.shared.f32 l{i}, [at+{128 * i}];" for i in range(c.slots)]
    lines.append("mov.b32 top, 0;")
    for i in range(c.slots):
        lines += [
            *_approximate("f2", f"l{i}"),
            f"mov.b32 t1, f2; max.u32 top, top, t1; add.f32 f2, f2, b{i};",
            *_order(f"k{i}", "f2"),
        ]
    return lines


def _store(c: Select) -> list[str]:
    return [
        f"add.f32 sum, sum, {f32(1e-20)}; div.rn.f32 f0, ms, sum; mul.f32 f0, f0, {f32(c.scale)};",
        f"mad.lo.u32 t0, grow, {c.top_k}, lane; mul.wide.u32 d0, t0, 4; add.s64 d1, d0, $3;",
        f"add.s64 d0, d0, $2; setp.lt.u32 p, lane, {c.top_k};",
        "and.b32 t0, alive, 1; sub.u32 t0, t0, 1; or.b32 mi, mi, t0;"
        if c.staged or c.flags
        else "",
        "@p st.global.b32 [d0], mi; @p st.global.f32 [d1], f0;",
    ]


def select(c: Select) -> list[str]:
    """Operands: $0 shared memory, global $1 bias, $2 ids, $3 weights, $4 candidates, $5 the
    block's tile of rows, with flags global $6 bias of images and $7 flags. Begins with a barrier
    behind ``publish``; where splits are several, ends with another, after which no block reads
    another's memory.
    """
    n = c.slots
    registers = "tid, lane, mine, r, row, at, swz, below, grow, best, top, thr, n, id, mi, alive"
    lines = [
        f".reg .b32 {registers}, t<4>, k<{n}>; .reg .f32 l<{n}>, b<{n}>, s<{n}>, f<4>;",
        ".reg .f32 ms, sum; .reg .b64 d<2>; .reg .pred p, live, done;",
        "mov.u32 tid, %tid.x; and.b32 lane, tid, 31; shr.u32 r, tid, 5;",
        "mov.u32 below, %lanemask_lt; mov.u32 mine, 0;",
    ]
    if c.splits > 1:
        lines.append(f"mov.u32 mine, %cluster_ctarank; mul.lo.u32 mine, mine, {c.own};")
    sync = (
        [CLUSTER_SYNC, *_add_splits(c)]
        if c.splits > 1
        else [f"bar.sync {BARRIER}, {LANES * c.warps};"]
    )
    # Biases come while others finish, unless the accumulators of many rows still fill registers.
    lines += [*_row(c), *sync, "bra ROW;"] if c.tile <= 32 else sync
    return [
        *lines,
        "LOOP:",
        *_row(c),
        "ROW: @done bra END;",
        *_scores(c),
        *_threshold(c),
        *_compact(c),
        "mov.b32 sum, 0; mul.wide.u32 d0, grow, 4; add.s64 d0, d0, $4;",
        "setp.eq.u32 p, lane, 0; @p st.global.b32 [d0], n;",
        f"setp.gt.u32 done, n, {LANES}; @done bra ALL;",
        f"setp.lt.u32 done, n, {c.top_k}; @done bra ALL;",
        *_pick_candidates(c),
        "bra STORE;",
        "ALL:",
        *_pick_all(c),
        "STORE:",
        *_store(c),
        f"add.u32 r, r, {c.warps}; bra LOOP;",
        "END:",
        "barrier.cluster.wait.acquire.aligned;" if c.splits > 1 else "",
    ]
