"""Register-level pieces of the decode kernel in PTX: multiply, SwiGLU, scatter, counters.

wgmma sees 64 weight rows as M and T tokens as N. A thread of the warpgroup (warp w, lane 4 g + q)
holds rows 16 w + g and 16 w + g + 8 of the accumulator for tokens 8 j + 2 q and 8 j + 2 q + 1:
``acc[4 j + 2 h + i]``.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels.moe_experts.repack import SCALE_MASK, Chunk

XOR_AND = (0xF0 ^ 0xCC) & 0xAA  # lop3 truth table of (a ^ b) & c
SCALAR = plgpu.Layout.WG_SPLAT
BARRIER = 8  # named barriers 8.. are ours; the lowering uses 0 and one a warpgroup from 1 on


def accumulator(tokens: int) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((64, tokens), jnp.float32, layout=plgpu.Layout.WGMMA)


def _i32(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _address(ref: ir.Value, bits: int = 64) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mu.memref_ptr(ref))


def _scalar(value) -> ir.Value:
    return value.registers.item()


def _thread() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), _i32(128))


def _floats(acc: fa.FragmentedArray) -> list[ir.Value]:
    return [vector.extract(v, [], [k]) for v in acc.registers.flat for k in range(2)]


def _asm(lines: list[str], operands: list[ir.Value], constraints: list[str], results: int = 0):
    ptx = "{\n" + "\n".join(lines) + "\n}"
    f32 = ir.F32Type.get()
    kind = llvm.StructType.get_literal([f32] * results) if results else ir.Type.parse("!llvm.void")
    return llvm.inline_asm(
        kind, operands, ptx, ",".join(constraints), asm_dialect=0, has_side_effects=True
    )


def _load_scales(chunk: Chunk, address: str) -> list[str]:
    words = 2 * chunk.scale_words
    width = 4 if words % 4 == 0 else 2
    lines = [f".reg .b32 sw<{words}>;"]
    for i in range(0, words, width):
        names = ",".join(f"sw{i + j}" for j in range(width))
        lines.append(f"ld.shared.v{width}.b32 {{{names}}}, [{address}+{4 * i}];")
    return lines


def _move(target: str, word: str, kind: str, distance: int) -> str:
    if kind == "rotl":
        return f"shf.l.wrap.b32 {target},{word},{word},{distance};"
    return (
        f"{kind}.b32 {target},{word},{distance};"
        if kind == "shl"
        else f"shr.u32 {target},{word},{distance};"
    )


def _decode(word: str, registers: list[str], scales: list[str], chunk: Chunk) -> list[str]:
    """``repack.registers_of`` and the group scales of rows g (0) and g + 8 (1)."""
    lines, mask = [], f"{chunk.encoding.mask:#x}"
    for i, (register, moves) in enumerate(zip(registers, chunk.encoding.moves, strict=True)):
        parts = [word if distance == 0 else f"t{j}" for j, (_, distance) in enumerate(moves)]
        lines += [_move(t, word, *move) for t, move in zip(parts, moves, strict=True) if t != word]
        if len(parts) == 1:
            lines.append(f"and.b32 {register},{parts[0]},{mask};")
        else:
            lines.append(f"lop3.b32 {register},{parts[0]},{parts[1]},{mask},{XOR_AND};")
        lines.append(f"mul.rn.bf16x2 {register},{register},{scales[i % 2]};")
    return lines


def _chunk_ptx(chunk: Chunk, tokens: int, first: int, last: bool) -> list[str]:
    """One chunk; its operands begin at ``first``: weights, 8-byte weights, scales, token
    descriptor.
    """
    weights, tail_weights, scales, descriptor = (f"${first + i}" for i in range(4))
    acc = "{" + ",".join(f"${i}" for i in range(tokens // 2)) + "}"
    lines = [
        "{ .reg .b32 t<2>, sg0, sg1, low, at, high; .reg .b64 d;",
        ".reg .pred p; setp.eq.b32 p, 0, 0;",
        # The broadcast tells the compiler that descriptors are uniform: their sums leave the ALU.
        f"shfl.sync.idx.b32 low, {descriptor}, 0, 31, 0xffffffff; mov.b32 high, 8;",
    ]
    lines += _load_scales(chunk, scales)
    units = [4] * chunk.units + [2] * chunk.tail  # k16 steps
    per_step = 8 // chunk.encoding.codes_per_word  # words a thread
    for u, steps in enumerate(units):
        words = steps * per_step
        lines.append(f".reg .b32 q{u}_<{words}>;")
        for i in range(0, words, 4):
            width = min(4, words - i)
            base = weights if width == 4 else tail_weights
            names = ",".join(f"q{u}_{i + j}" for j in range(width))
            offset = u * 2048 * per_step + 512 * i
            lines.append(f"ld.shared.v{width}.b32 {{{names}}}, [{base}+{offset}];")
    for u, steps in enumerate(units):
        lines.append(f".reg .b32 a{u}_<{4 * steps}>;")
        for h in range(2):
            word = f"sw{h * chunk.scale_words + u // 2}"
            if u % 2:
                lines.append(f"shf.l.wrap.b32 sg{h},{word},{word},8;")
                word = f"sg{h}"
            lines.append(f"and.b32 sg{h},{word},{SCALE_MASK:#x};")
        per_word = 4 // per_step
        for i in range(steps * per_step):
            registers = [f"a{u}_{per_word * i + r}" for r in range(per_word)]
            lines += _decode(f"q{u}_{i}", registers, ["sg0", "sg1"], chunk)
        lines.append("wgmma.fence.sync.aligned;")
        for j in range(steps):
            a = "{" + ",".join(f"a{u}_{4 * j + r}" for r in range(4)) + "}"
            lines.append(f"add.u32 at, low, {(4 * u + j) * 2 * tokens}; mov.b64 d, {{at, high}};")
            shape = f"m64n{tokens}k16.f32.bf16.bf16"
            lines.append(f"wgmma.mma_async.sync.aligned.{shape} {acc}, {a}, d, p, 1, 1, 0;")
        # The code after this block overwrites A registers, so nothing may stay in flight at its
        # end.
        flying = 0 if last and u == len(units) - 1 else 1
        lines.append(f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {flying};")
    return [*lines, "}"]


def make_stage(chunk: Chunk, tokens: int, group: int) -> Callable:
    """(acc f32 [64, T], then ``group`` times: chunk in SMEM, tokens in SMEM) -> acc + sum of chunk
    x tokens.
    """
    n = tokens // 2
    lines = []
    for i in range(group):
        lines += _chunk_ptx(chunk, tokens, 2 * n + 4 * i, i == group - 1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *[plgpu.RefType()] * (2 * group)),
        return_type=accumulator(tokens),
    )
    def stage(ctx, acc, *refs):
        thread, operands = _thread(), []
        for w_ref, x_ref in zip(refs[::2], refs[1::2], strict=True):
            base = _address(w_ref, 32)
            scales = _i32(4 * chunk.code_words)
            for value, scale in (
                (thread, 16),
                (thread, 8),
                (arith.shrui(thread, _i32(2)), 8 * chunk.scale_words),
            ):
                operands.append(arith.addi(base, arith.muli(value, _i32(scale))))
            operands[-1] = arith.addi(operands[-1], scales)
            # No swizzle: K-adjacent core matrices lie tokens * 16 bytes apart, token-adjacent ones
            # 128 (``high``).
            low = arith.andi(arith.shrui(_address(x_ref, 32), _i32(4)), _i32(0x3FFF))
            operands.append(arith.ori(low, _i32(tokens << 16)))
        out = _asm(
            lines,
            [*_floats(acc), *operands],
            ["=f"] * n + [str(i) for i in range(n)] + ["r"] * len(operands),
            results=n,
        )
        f32 = ir.F32Type.get()
        values = [llvm.extractvalue(f32, out, [i]) for i in range(n)]
        pair = ir.VectorType.get((2,), f32)
        registers = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, n, 2)]
        registers = np.array(registers, dtype=object).reshape(acc.registers.shape)
        return fa.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return stage


_THREAD = [
    ".reg .b32 tid, wi, gi, qi, bar; .reg .pred first; mov.u32 tid, %tid.x;",
    f"shr.u32 bar, tid, 7; add.u32 bar, bar, {BARRIER}; and.b32 tid, tid, 127; shr.u32 wi, tid, 5;",
    "bfe.u32 gi, tid, 2, 3; and.b32 qi, tid, 3; setp.eq.u32 first, tid, 0;",
]


def _values(n: int, address: str) -> list[str]:
    """v<n>: this thread's accumulators as ``make_stash`` left them; ``slot`` is its byte offset in
    such an array.
    """
    lines = [
        f".reg .f32 v<{n}>; .reg .b32 slot, from;",
        f"shl.b32 slot, tid, 4; add.u32 from, {address}, slot;",
    ]
    for j in range(n // 4):
        names = ",".join(f"v{4 * j + i}" for i in range(4))
        lines.append(f"ld.shared.v4.f32 {{{names}}}, [from+{2048 * j}];")
    return lines


def make_stash(tokens: int) -> Callable:
    """(acc, SMEM f32 [128 * T / 2]): hand the accumulator to the epilogue, 16 bytes a thread side
    by side.
    """
    n = tokens // 2
    lines = [*_THREAD, f".reg .b32 to; shl.b32 to, tid, 4; add.u32 to, to, ${n};"]
    for j in range(n // 4):
        names = ",".join(f"${4 * j + i}" for i in range(4))
        lines.append(f"st.shared.v4.f32 [to+{2048 * j}], {{{names}}};")

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=())
    def stash(ctx, acc, target):
        _asm(lines, [*_floats(acc), _address(target, 32)], ["f"] * n + ["r"])

    return stash


def _epilogue(lines: list[str], refs: int, scalars: int) -> Callable:
    """(SMEM accumulators $0, ``refs`` GMEM addresses, ``scalars`` int32) -> nothing, in PTX."""

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * (1 + refs), *[SCALAR] * scalars), return_type=()
    )
    def run(ctx, acc, *args):
        operands = [_address(acc, 32), *map(_address, args[:refs]), *map(_scalar, args[refs:])]
        _asm(lines, operands, ["r"] + ["l"] * refs + ["r"] * scalars)

    return run


def make_spill(tokens: int) -> Callable:
    """(acc, workspace; scalar index): a K split's sums to the workspace."""
    n = tokens // 2
    lines = [*_THREAD, *_values(n, "$0"), ".reg .b64 pz, pw; cvt.u64.u32 pz, slot;"]
    lines += [f"mul.wide.u32 pw, $2, {512 * n}; add.s64 pw, pw, pz; add.s64 pw, pw, $1;"]
    for j in range(n // 4):
        names = ",".join(f"v{4 * j + i}" for i in range(4))
        lines.append(f"st.global.v4.f32 [pw+{2048 * j}], {{{names}}};")
    return _epilogue(lines, 1, 1)


def _add_splits(n: int, splits: int, ws: str, index: str) -> list[str]:
    """v = the sum of all K splits in their order: spilled ones from ``index`` on, then this one."""
    lines = [
        f".reg .f32 z<{n}>, y<4>; .reg .b64 pz, pw; cvt.u64.u32 pz, slot;",
        f"mul.wide.u32 pw, {index}, {512 * n}; add.s64 pw, pw, pz; add.s64 pw, pw, {ws};",
    ]
    for j in range(n // 4):
        for s in range(splits - 1):
            names = ",".join(f"y{i}" if s else f"z{4 * j + i}" for i in range(4))
            lines.append(f"ld.global.cg.v4.f32 {{{names}}}, [pw+{512 * n * s + 2048 * j}];")
            if s:
                lines += [f"add.f32 z{4 * j + i}, z{4 * j + i}, y{i};" for i in range(4)]
        lines += [f"add.f32 v{4 * j + i}, z{4 * j + i}, v{4 * j + i};" for i in range(4)]
    return lines


def _swiglu_ptx(i: int, limit: float, weight: str | None, round_gates: bool) -> list[str]:
    """v[i] = silu(min(v[i], limit)) * clip(v[i + 2], -limit, limit) * weight."""
    g, u = f"v{i}", f"v{i + 2}"
    lines = []
    if round_gates:
        for v in (g, u):
            lines.append(f"cvt.rn.bf16.f32 h, {v}; mov.b32 {v}, {{zero, h}};")
    lines += [
        f"min.NaN.f32 {g}, {g}, {limit:#.8f}; min.NaN.f32 {u}, {u}, {limit:#.8f};",
        f"max.NaN.f32 {u}, {u}, {-limit:#.8f}; mul.f32 e, {g}, -1.44269504;",
        f"ex2.approx.f32 e, e; add.f32 e, e, 1.0; div.full.f32 {g}, {g}, e; mul.f32 {g}, {g}, {u};",
    ]
    return lines + ([f"mul.f32 {g}, {g}, {weight};"] if weight else [])


def make_swiglu(
    tokens: int, splits: int, *, limit: float, routed: bool, round_gates: bool
) -> Callable:
    """Store bf16 silu(min(g, limit)) * clip(u, +-limit) * weight where the down projection reads
    its tokens.

    (acc, t, workspace, plan; scalars t_at, weight_at, row8, index): ``t_at`` counts bf16 elements,
    ``weight_at`` words of the plan, ``row8`` is the block's first row of 8 columns, ``index`` the
    first spilled K split.
    """
    n = tokens // 2
    t, ws, plan, t_at, weight_at, row8, index = (f"${1 + i}" for i in range(7))
    lines = [*_THREAD, *_values(n, "$0"), ".reg .f32 e, w; .reg .b16 h, zero; mov.b16 zero, 0;"]
    if splits > 1:
        lines += _add_splits(n, splits, ws, index)
    lines += [
        ".reg .b32 a; .reg .b64 pa, pv;",
        f"add.u32 a, wi, {row8}; mad.lo.u32 a, a, {8 * tokens}, gi; mad.lo.u32 a, qi, 16, a;",
        f"add.u32 a, a, {t_at};",
        f"mul.wide.u32 pa, a, 2; add.s64 pa, pa, {t};",
        f"mad.lo.u32 a, qi, 2, {weight_at}; mul.wide.u32 pv, a, 4; add.s64 pv, pv, {plan};",
    ]
    for j in range(n // 4):
        for i in range(2):
            if routed:
                lines.append(f"ld.global.nc.f32 w, [pv+{32 * j + 4 * i}];")
            lines += _swiglu_ptx(4 * j + i, limit, "w" if routed else None, round_gates)
            lines.append(
                f"cvt.rn.bf16.f32 h, v{4 * j + i}; st.global.b16 [pa+{128 * j + 16 * i}], h;"
            )
    return _epilogue(lines, 3, 4)


def make_scatter(tokens: int, splits: int, columns: int, apart: int | None = None) -> Callable:
    """Store f32 sums to out[row * columns + column]: row is w * splits + split, or w + split *
    apart if that is given, of w = plan[rows_at + token] where it is >= 0.

    (acc, out, plan; scalars rows_at, split, column of the block)
    """
    n = tokens // 2
    out, plan, rows_at, split, column = (f"${1 + i}" for i in range(5))
    lines = [*_THREAD, *_values(n, "$0"), ".reg .b32 a, c, r; .reg .b64 pr, po; .reg .pred live;"]
    lines += [
        f"mad.lo.u32 a, qi, 2, {rows_at}; mul.wide.u32 pr, a, 4; add.s64 pr, pr, {plan};",
        f"mad.lo.u32 c, wi, 16, gi; add.u32 c, c, {column};",
    ]
    row = f"r, {splits}, {split}" if apart is None else f"{split}, {apart}, r"
    for j in range(n // 4):
        for i in range(2):
            lines += [
                f"ld.global.nc.b32 r, [pr+{32 * j + 4 * i}]; setp.ge.s32 live, r, 0;",
                f"mad.lo.u32 a, {row}; mad.lo.u32 a, a, {columns}, c;",
                f"mul.wide.u32 po, a, 4; add.s64 po, po, {out};",
                f"@live st.global.f32 [po], v{4 * j + i};",
                f"@live st.global.f32 [po+32], v{4 * j + 2 + i};",
            ]
    return _epilogue(lines, 2, 3)


def make_signal() -> Callable:
    """(plan, index): one arrival for all this warpgroup stored; bulk copies of other blocks may
    read it.
    """
    lines = [
        *_THREAD,
        ".reg .b64 pc; mul.wide.u32 pc, $1, 4; add.s64 pc, pc, $0; bar.sync bar, 128;",
        "@first fence.acq_rel.gpu; @first red.relaxed.gpu.global.add.u32 [pc], 1;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=())
    def signal(ctx, plan, index):
        _asm(lines, [_address(plan), _scalar(index)], ["l", "r"])

    return signal


def make_wait(target: int, *, clear: bool = False) -> Callable:
    """(plan, index): wait for ``target`` arrivals, after which their stores may be read."""
    lines = [
        *_THREAD,
        ".reg .b64 a; .reg .b32 v; .reg .pred p; mul.wide.u32 a, $1, 4; add.s64 a, a, $0;",
        # One thread polls: hundreds of warps on one line would delay the arrivals themselves.
        "@!first bra READY;",
        f"POLL: ld.acquire.gpu.global.u32 v, [a]; setp.lt.u32 p, v, {target}; @p bra POLL;",
        "st.global.u32 [a], 0;" if clear else "",
        "READY: bar.sync bar, 128; fence.proxy.async;",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=())
    def wait(ctx, plan, index):
        _asm(lines, [_address(plan), _scalar(index)], ["l", "r"])

    return wait


def make_reset(first: int, count: int, blocks: int) -> Callable:
    """(plan): the last of ``blocks`` callers zeroes ``count`` words from ``first`` on and the word
    after them.
    """
    done = 4 * (first + count)
    lines = [
        *_THREAD,
        ".reg .b64 a; .reg .b32 old, i; .reg .pred mine, last, more;",
        f"mov.b32 old, 0; @first atom.acq_rel.gpu.global.add.u32 old, [$0+{done}], 1;",
        f"setp.eq.and.u32 mine, old, {blocks - 1}, first; bar.red.or.pred last, bar, 128, mine;",
        "@!last bra DONE; mov.b32 i, tid;",
        f"LOOP: setp.le.u32 more, i, {count}; @!more bra DONE; mul.wide.u32 a, i, 4;",
        f"add.s64 a, a, $0; st.global.u32 [a+{4 * first}], 0; add.u32 i, i, 128; bra LOOP;",
        "DONE:",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=())
    def reset(ctx, plan):
        _asm(lines, [_address(plan)], ["l"])

    return reset
