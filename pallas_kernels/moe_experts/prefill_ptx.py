"""Register-level pieces of the prefill kernel in PTX: gather, ring of copies, multiply, epilogues.

Threads hold accumulators as in ``decode_ptx``. Barriers count by hand: a ring's n-th use of a slot
has parity n % 2, so counters of chunks and stages are all the state that the warpgroups keep.
"""

from collections.abc import Callable

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.moe_experts.decode_ptx import (
    SCALAR,
    _address,
    _asm,
    _decode,
    _floats,
    _load_scales,
    _scalar,
    _swiglu_ptx,
    accumulator,
)
from pallas_kernels.moe_experts.prefill_shape import (
    GROUP,
    UNIT_BYTES,
    WARPS,
    Product,
    Ring,
    units_per_stage,
)
from pallas_kernels.moe_experts.repack import SCALE_MASK, TILE_BLOCKS, Chunk

THREADS = 128 * (TILE_BLOCKS + 1)
_THREAD = [
    ".reg .b32 tid, wi, gi, qi, lane; mov.u32 tid, %tid.x; and.b32 tid, tid, 127;",
    "shr.u32 wi, tid, 5; bfe.u32 gi, tid, 2, 3; and.b32 qi, tid, 3; and.b32 lane, tid, 31;",
]


def make_init(ring: Ring) -> Callable:
    """(barriers): set them up; every thread of the block calls this first."""
    lines = [".reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra READY;"]
    kinds = (("weights", ring.weight_slots), ("tokens", ring.token_slots))
    for kind, slots in kinds:
        for state, arrivals in (("full", 1), ("empty", WARPS)):
            at = ring.barrier(f"{state}_{kind}")
            lines += [
                f"mbarrier.init.shared::cta.b64 [$0+{at + 8 * i}], {arrivals};"
                for i in range(slots)
            ]
    lines += [
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;",
        f"READY: barrier.sync 0, {THREADS};",
    ]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=())
    def init(ctx, barriers):
        _asm(lines, [_address(barriers, 32)], ["r"])

    return init


def _slot(name: str, counter: str, slots: int, first: int, barriers: str) -> list[str]:
    """``name``: the slot of a counter, ``name``_bar + ``first``: its barrier, ``name``_par: its
    parity.
    """
    return [
        f"div.u32 {name}_par, {counter}, {slots}; mul.lo.u32 {name}, {name}_par, {slots};",
        f"sub.u32 {name}, {counter}, {name}; and.b32 {name}_par, {name}_par, 1;",
        f"mad.lo.u32 {name}_bar, {name}, 8, {barriers}; add.u32 {name}_bar, {name}_bar, {first};",
    ]


def _wait(label: str, barrier: str, parity: str) -> list[str]:
    return [
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 got, [{barrier}], {parity};",
        f"@!got bra {label};",
    ]


def _copy(target: str, source: str, size: str, barrier: str) -> str:
    kind = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"{kind} [{target}], [{source}], {size}, [{barrier}];"


def make_load(product: Product, ring: Ring, groups: int) -> Callable:
    """(weights, tokens, their rings, barriers; scalars): copy a chunk of weights and its tokens.

    Scalars: chunk of the weights, chunk along K, first group, groups, width (groups the slots are
    laid out for), units a stage, counters of chunks and of stages. ``groups`` of the token image.
    """
    weights, tokens, w_smem, x_smem, bars = (f"${i}" for i in range(5))
    chunk, along, first, count, width, per_stage, cw, cx = (f"${5 + i}" for i in range(8))
    ew, ex = ring.barrier("empty_weights"), ring.barrier("empty_tokens")
    image = groups * product.chunk.bk * 2 * GROUP  # bytes of a chunk
    lines = [
        ".reg .pred other, got, start; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127;",
        "setp.ne.u32 other, t, 0; @other bra DONE;",
        ".reg .b32 w, w_par, w_bar, x, x_par, x_bar, full, to, stage, left, n, size, mask, at;",
        ".reg .b64 from, base;",
        *_slot("w", cw, ring.weight_slots, ew, bars),
        "xor.b32 w_par, w_par, 1;",
        *_wait("W", "w_bar", "w_par"),
        f"add.u32 full, w_bar, {ring.barrier('full_weights') - ew};",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {ring.weight_bytes};",
        f"mad.lo.u32 to, w, {ring.weight_bytes}, {w_smem};",
        f"mul.wide.u32 from, {chunk}, {ring.weight_bytes}; add.s64 from, from, {weights};",
        _copy("to", "from", f"{ring.weight_bytes}", "full"),
        f"mov.u32 stage, {cx}; sub.u32 mask, {per_stage}, 1; mov.u32 to, 0; mov.u32 full, 0;",
        f"mul.wide.u32 base, {along}, {image}; add.s64 base, base, {tokens};",
    ]
    for u in range(product.units):
        tail = u == product.chunk.units
        bytes_a_group = UNIT_BYTES // 2 if tail else UNIT_BYTES
        rest = product.chunk.units - u
        lines += [
            f"and.b32 n, mask, {u}; setp.ne.u32 start, n, 0; @start bra GO{u};",
            *_slot("x", "stage", ring.token_slots, ex, bars),
            "xor.b32 x_par, x_par, 1;",
            *_wait(f"X{u}", "x_bar", "x_par"),
            # Bytes of the stage: whole units of it, and half a one at the end of the chunk.
            f"min.u32 n, {per_stage}, {rest}; shl.b32 size, n, {UNIT_BYTES.bit_length() - 1};",
            f"setp.gt.u32 start, {per_stage}, {rest};" if product.chunk.tail else "",
            f"@start add.u32 size, size, {UNIT_BYTES // 2};" if product.chunk.tail else "",
            f"mul.lo.u32 size, size, {count};",
            f"add.u32 full, x_bar, {ring.barrier('full_tokens') - ex};",
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], size;",
            f"mad.lo.u32 to, x, {ring.token_bytes}, {x_smem}; add.u32 stage, stage, 1;",
            f"GO{u}: mul.lo.u32 size, {count}, {bytes_a_group};",
            f"mul.wide.u32 from, {first}, {bytes_a_group}; add.s64 from, from, base;",
            f"add.s64 from, from, {u * groups * UNIT_BYTES};",
            _copy("to", "from", "size", "full"),
            f"mad.lo.u32 to, {width}, {UNIT_BYTES}, to;",
        ]
    lines.append("DONE:")

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 5, *[SCALAR] * 8), return_type=())
    def load(ctx, weights, tokens, w_smem, x_smem, barriers, *scalars):
        operands = [_address(weights), _address(tokens)]
        operands += [_address(ref, 32) for ref in (w_smem, x_smem, barriers)]
        _asm(lines, [*operands, *map(_scalar, scalars)], ["l"] * 2 + ["r"] * 11)

    return load


def _fragments(u: int, chunk: Chunk) -> list[str]:
    """Registers a{u}_: unit u of the chunk, dequantised."""
    steps = 4 if u < chunk.units else 2
    names = ",".join(f"q{u}_{i}" for i in range(steps))
    base = "words" if steps == 4 else "tail_words"
    lines = [f".reg .b32 q{u}_<{steps}>, a{u}_<{4 * steps}>;"]
    lines.append(f"ld.shared.v{steps}.b32 {{{names}}}, [{base}+{2048 * u}];")
    for h in range(2):
        word = f"sw{h * chunk.scale_words + u // 2}"
        if u % 2:
            lines.append(f"shf.l.wrap.b32 sg{h},{word},{word},8;")
            word = f"sg{h}"
        lines.append(f"and.b32 sg{h},{word},{SCALE_MASK:#x};")
    for i in range(steps):
        registers = [f"a{u}_{4 * i + r}" for r in range(4)]
        lines += _decode(f"q{u}_{i}", registers, ["sg0", "sg1"], chunk)
    return lines


def _multiply(u: int, in_stage: int, chunk: Chunk, width: int) -> list[str]:
    """acc += unit u x the unit ``in_stage`` of the tokens' slot."""
    tail = u == chunk.units
    acc = "{" + ",".join(f"${i}" for i in range(4 * width)) + "}"
    # No swizzle: K-adjacent core matrices lie 128 bytes apart (8 << 16), groups a unit's bytes.
    lines = [f"mov.b32 high, {(UNIT_BYTES >> 4) >> tail};", "wgmma.fence.sync.aligned;"]
    for j in range(2 if tail else 4):
        a = "{" + ",".join(f"a{u}_{4 * j + r}" for r in range(4)) + "}"
        at = in_stage * width * (UNIT_BYTES >> 4) + 16 * j
        lines.append(f"add.u32 at, low, {at}; mov.b64 d, {{at, high}};")
        shape = f"m64n{GROUP * width}k16.f32.bf16.bf16"
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {acc}, {a}, d, p, 1, 1, 0;")
    return [*lines, "wgmma.commit_group.sync.aligned;"]


def _chunk_ptx(product: Product, ring: Ring, width: int) -> list[str]:
    """One chunk; the next unit is dequantised while the tensor cores multiply this one."""
    chunk, per_stage = product.chunk, units_per_stage(width)
    w_smem, x_smem, bars, m, cw, cx = (f"${4 * width * 2 + i}" for i in range(6))
    release = "mbarrier.arrive.shared::cta.b64 _, [{}];"
    fx, ex = ring.barrier("full_tokens"), ring.barrier("empty_tokens")
    lines = [
        *_THREAD,
        ".reg .b32 t<2>, sg0, sg1, low, at, high, done; .reg .b64 d;",
        ".reg .pred p, got, first; setp.eq.b32 p, 0, 0; setp.eq.u32 first, lane, 0;",
        ".reg .b32 w, w_par, w_bar, x, x_par, x_bar, stage, words, tail_words, scales;",
        *_slot("w", cw, ring.weight_slots, ring.barrier("full_weights"), bars),
        *_wait("W", "w_bar", "w_par"),
        f"mad.lo.u32 w, w, {ring.weight_bytes}, {w_smem};",
        f"mad.lo.u32 w, {m}, {256 * chunk.rows}, w;",
        "mad.lo.u32 words, tid, 16, w; mad.lo.u32 tail_words, tid, 8, w; shr.u32 scales, tid, 2;",
        f"mad.lo.u32 scales, scales, {8 * chunk.scale_words}, w;",
        *_load_scales(chunk, f"scales+{4 * chunk.code_words}"),
        *_fragments(0, chunk),
        f"mov.u32 stage, {cx}; mov.u32 x_bar, 0;",
    ]
    for u in range(product.units):
        lines.append("mov.u32 done, x_bar;")
        if u % per_stage == 0:
            lines += _slot("x", "stage", ring.token_slots, fx, bars)
            lines += [
                *_wait(f"X{u}", "x_bar", "x_par"),
                "add.u32 stage, stage, 1;",
                f"mad.lo.u32 low, x, {ring.token_bytes}, {x_smem}; bfe.u32 low, low, 4, 14;",
                # The broadcast tells the compiler that descriptors are uniform.
                f"or.b32 low, low, {8 << 16}; shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;",
            ]
        lines += _multiply(u, u % per_stage, chunk, width)
        if u + 1 == product.units:
            continue
        # Unit u - 1 is done: its registers are free, and its slot if this unit begins another.
        lines.append("wgmma.wait_group.sync.aligned 1;")
        if u and u % per_stage == 0:
            lines.append(f"@first {release.format(f'done+{ex - fx}')}")
        lines += _fragments(u + 1, chunk)
    empty = ring.barrier("empty_weights") - ring.barrier("full_weights")
    lines.append(f"@first {release.format(f'w_bar+{empty}')}")
    lines.append("wgmma.wait_group.sync.aligned 0;")
    last = (product.units - 1) % per_stage == 0 and product.units > 1
    lines += [f"@first {release.format(f'done+{ex - fx}')}"] * last
    return [*lines, f"@first {release.format(f'x_bar+{ex - fx}')}"]


def make_chunk(product: Product, ring: Ring, width: int) -> Callable:
    """(acc f32 [64, 8 * width], rings of weights and tokens, barriers; scalars: block of the tile,
    counters of chunks and of stages) -> acc + chunk x tokens.
    """
    n, lines = 4 * width, _chunk_ptx(product, ring, width)
    tokens = GROUP * width

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *[plgpu.RefType()] * 3, *[SCALAR] * 3),
        return_type=accumulator(tokens),
    )
    def multiply(ctx, acc, w_smem, x_smem, barriers, *scalars):
        operands = [_address(ref, 32) for ref in (w_smem, x_smem, barriers)]
        operands = [*_floats(acc), *operands, *map(_scalar, scalars)]
        constraints = ["=f"] * n + [str(i) for i in range(n)] + ["r"] * 6
        out = _asm(lines, operands, constraints, results=n)
        f32 = ir.F32Type.get()
        values = [llvm.extractvalue(f32, out, [i]) for i in range(n)]
        pair = ir.VectorType.get((2,), f32)
        registers = [vector.from_elements(pair, values[i : i + 2]) for i in range(0, n, 2)]
        registers = np.array(registers, dtype=object).reshape(acc.registers.shape)
        return fa.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return multiply


def _epilogue(lines: list[str], width: int, refs: int, scalars: int) -> Callable:
    """(accumulators $0.., ``refs`` GMEM addresses, ``scalars`` int32) -> nothing, in PTX."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *[plgpu.RefType()] * refs, *[SCALAR] * scalars),
        return_type=(),
    )
    def run(ctx, acc, *args):
        operands = [*_floats(acc), *map(_address, args[:refs]), *map(_scalar, args[refs:])]
        _asm(lines, operands, ["f"] * (4 * width) + ["l"] * refs + ["r"] * scalars)

    return run


def make_swiglu(width: int, *, limit: float, round_gates: bool) -> Callable:
    """Store bf16 silu(min(g, limit)) * clip(u, +-limit) * weight as tokens of the down projection.

    (acc, t, weights; scalars first group, groups, core, pitch): ``core`` is the core matrix of the
    image where the block's columns of group 0 begin, ``pitch`` a group's core matrices.
    """
    t, weights, first, groups, core, pitch = (f"${4 * width + i}" for i in range(6))
    lines = [
        *_THREAD,
        ".reg .f32 v<4>, e, w<2>; .reg .b16 h, zero; mov.b16 zero, 0; .reg .pred dead;",
        ".reg .b32 a, r, step; .reg .b64 pa, pv, ps;",
        f"mad.lo.u32 a, {first}, {pitch}, {core}; add.u32 a, a, wi; mul.wide.u32 pa, a, 128;",
        f"mad.wide.u32 pa, lane, 4, pa; add.s64 pa, pa, {t}; mul.wide.u32 ps, {pitch}, 128;",
        f"mad.lo.u32 a, {first}, 8, 0; mad.lo.u32 a, qi, 2, a; mul.wide.u32 pv, a, 4;",
        f"add.s64 pv, pv, {weights};",
    ]
    for j in range(width):
        lines.append(f"setp.le.u32 dead, {groups}, {j}; @dead bra.uni END;")
        lines.append(f"ld.global.nc.v2.f32 {{w0, w1}}, [pv+{32 * j}];")
        lines += [f"mov.f32 v{i}, ${4 * j + i};" for i in range(4)]
        for i in range(2):
            lines += _swiglu_ptx(i, limit, f"w{i}", round_gates)
        lines += [
            "cvt.rn.bf16x2.f32 r, v1, v0; movmatrix.sync.aligned.m8n8.trans.b16 r, r;",
            "st.global.b32 [pa], r; add.s64 pa, pa, ps;",
        ]
    return _epilogue([*lines, "END:"], width, 2, 4)


def make_store(width: int, columns: int) -> Callable:
    """Store bf16 sums to out[position, column].

    (acc, out; scalars first group, groups, column of the block)
    """
    out, first, groups, column = (f"${4 * width + i}" for i in range(4))
    lines = [
        *_THREAD,
        ".reg .pred dead; .reg .b32 a, r; .reg .b64 po, pc;",
        f"mad.lo.u32 a, {first}, 8, gi; mul.wide.u32 po, a, {2 * columns}; add.s64 po, po, {out};",
        f"mad.lo.u32 a, wi, 16, {column}; mad.lo.u32 a, qi, 2, a; mul.wide.u32 pc, a, 2;",
        "add.s64 po, po, pc;",
    ]
    for j in range(width):
        lines.append(f"setp.le.u32 dead, {groups}, {j}; @dead bra.uni END;")
        for h in range(2):
            i = 4 * j + 2 * h
            lines += [
                f"cvt.rn.bf16x2.f32 r, ${i + 1}, ${i}; movmatrix.sync.aligned.m8n8.trans.b16 r, r;",
                f"st.global.b32 [po+{16 * j * columns + 16 * h}], r;",
            ]
    return _epilogue([*lines, "END:"], width, 1, 3)


def make_gather(groups: int, unroll: int, loops: int, columns: int) -> Callable:
    """(x, rows, image; scalar group): a group's tokens to their image, zeros where the row is -1.

    A thread makes 16 bytes of a core matrix from two runs of four columns; eight tokens and sixteen
    core matrices at a time, ``unroll`` times in flight.
    """
    x, rows, target, group = (f"${i}" for i in range(4))
    lines = [
        ".reg .b32 tid, tok, core, row, a, loop; .reg .b64 px, po, pr; .reg .pred live, more;",
        "mov.u32 tid, %tid.x; and.b32 tok, tid, 7; shr.u32 core, tid, 3;",
        f"mad.lo.u32 a, {group}, 8, tok; mul.wide.u32 pr, a, 4; add.s64 pr, pr, {rows};",
        "ld.global.nc.b32 row, [pr]; setp.ge.s32 live, row, 0; max.s32 row, row, 0;",
        f"mul.wide.u32 px, row, {2 * columns}; add.s64 px, px, {x};",
        # Core matrix 8 u + i: columns 4 i .. of either half of unit u.
        ".reg .b32 u, i; shr.u32 u, core, 3; and.b32 i, core, 7; mul.lo.u32 a, u, 128;",
        "mad.lo.u32 a, i, 8, a; cvt.u64.u32 pr, a; add.s64 px, px, pr;",
        f"mul.wide.u32 po, u, {groups * UNIT_BYTES}; mad.wide.u32 po, {group}, {UNIT_BYTES}, po;",
        "mad.lo.u32 a, i, 128, 0; mad.lo.u32 a, tok, 16, a; cvt.u64.u32 pr, a;",
        f"add.s64 po, po, pr; add.s64 po, po, {target}; mov.u32 loop, 0;",
        f".reg .b32 l<{2 * unroll}>, h<{2 * unroll}>, o<4>; LOOP:",
    ]
    for n in range(unroll):
        for name, at in (("l", 0), ("h", 64)):
            pair = f"{{{name}{2 * n}, {name}{2 * n + 1}}}"
            lines.append(f"mov.b32 {name}{2 * n}, 0; mov.b32 {name}{2 * n + 1}, 0;")
            lines.append(f"@live ld.global.nc.v2.b32 {pair}, [px+{256 * n + at}];")
    for n in range(unroll):
        for k in range(4):
            word, selector = 2 * n + k // 2, "0x7632" if k % 2 else "0x5410"
            lines.append(f"prmt.b32 o{k}, l{word}, h{word}, {selector};")
        lines.append("st.global.v4.b32 [po], {o0, o1, o2, o3};")
        lines.append(f"add.s64 po, po, {2 * groups * UNIT_BYTES};")
    lines.append(f"add.s64 px, px, {256 * unroll}; add.u32 loop, loop, 1;")
    lines.append(f"setp.lt.u32 more, loop, {loops}; @more bra LOOP;")

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, SCALAR), return_type=())
    def gather(ctx, x, rows, target, group):
        _asm(lines, [*map(_address, (x, rows, target)), _scalar(group)], ["l"] * 3 + ["r"])

    return gather
