"""FP8 ``linear`` on Hopper, weights read as released and dequantised in registers (ARCHITECTURE
0.1).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.linear import (
    arrange_ptx,
    broad_ptx,
    broad_shape,
    skinny_ptx,
    skinny_shape,
    stream_ptx,
    stream_shape,
)
from pallas_kernels.linear.box_ptx import COLUMNS, STRIP
from pallas_kernels.linear.broad_shape import Broad
from pallas_kernels.linear.skinny_shape import MAX_K, ROWS, Skinny
from pallas_kernels.linear.stream_shape import Stream
from pallas_kernels.norm import rms_norm
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Blocks, Fp8Rows, Packed

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def unfit(
    x: Array,
    weights: Sequence[Array | Packed],
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
) -> str:
    """Why ``linears`` refuses these operands; empty if it does not."""
    if x.dtype != BF16 or numerics.dtype != BF16:
        return f"{x.dtype=} and {numerics.name=} must be of bfloat16"
    if out_dtype is not None and jnp.dtype(out_dtype) not in (BF16, F32):
        return f"{out_dtype=} must be bfloat16 or float32"
    if not x.shape[-1] <= MAX_K:
        return f"{x.shape=} must end in at most {MAX_K}"
    for w in weights:
        if not isinstance(w, Fp8Blocks):
            return f"{type(w).__name__} must be Fp8Blocks"
        n, k = w.shape
        if k != x.shape[-1] or w.scales.shape != (n // 32, k // 32) or n % 32 or k % 32:
            return f"{w.shape=}, {w.scales.shape=} must be [N, {x.shape[-1]}] of 32 x 32 blocks"
    return "" if weights else "weights must be one at least"


def linears(
    x: Array,
    weights: Sequence[Array | Packed],
    *,
    numerics: Numerics,
    out_dtype: jnp.dtype | None = None,
    early: bool = False,
) -> tuple[Array, ...]:
    """``op.build_many``'s contract on an sm_90 GPU; ``ValueError`` for what ``unfit`` names.

    Codes are finite. A scale above 2^7 gives infinities, but not up to 32 rows unless ``early``:
    then one of 2^-127 counts as 0, and inputs below 2^-32 of the largest of their 32 columns may be
    off by 2^-40 of it. A row's bits depend on whether there are up to 32 rows and on how ``few``
    (up to 128 rows) or ``broad_shape.tuned`` splits K for this number of rows, and on nothing else.

    ``early``, up to 128 rows: weights are read before the kernel ahead has ended. Only for weights
    that no earlier kernel of the program writes.
    """
    if why := unfit(x, weights, numerics, out_dtype):
        raise ValueError(why)
    if numerics.round_activations:
        x = Fp8Rows.quantize(x).dequantize(BF16)
    lead, k = x.shape[:-1], x.shape[-1]
    rows, outputs = prod(lead), tuple(w.shape[0] for w in weights)
    wide = out_dtype is not None and jnp.dtype(out_dtype) == F32
    if rows == 0:
        return tuple(jnp.zeros((*lead, n), F32 if wide else BF16) for n in outputs)
    launch = launcher(rows, k, outputs, wide=wide, early=early)
    results = launch(x.reshape(rows, k), *_planes(weights))
    return tuple(y.reshape(*lead, n) for y, n in zip(results, outputs, strict=True))


def normed_unfit(
    x: Array, norm: Array, weights: Sequence[Array | Packed], numerics: Numerics
) -> str:
    """Why ``normed_linears`` refuses these operands; empty if it does not."""
    if norm.dtype != BF16 or norm.shape != x.shape[-1:]:
        return f"{norm.shape=} {norm.dtype=} must be bfloat16 {x.shape[-1:]}"
    return unfit(x, weights, numerics)


def normed_linears(
    x: Array,
    norm: Array,
    weights: Sequence[Array | Packed],
    *,
    eps: float,
    numerics: Numerics,
    early: bool = False,
) -> tuple[Array, ...]:
    """``op.build_normed``'s contract on an sm_90 GPU; ``ValueError`` for what ``normed_unfit``
    names. Bits of a row and ``early`` are as of ``linears``; up to 32 rows the former depend also
    on the power of two that the number of rows is rounded up to, and on all settings of ``few``.
    """
    if why := normed_unfit(x, norm, weights, numerics):
        raise ValueError(why)
    lead, k = x.shape[:-1], x.shape[-1]
    rows, outputs = prod(lead), tuple(w.shape[0] for w in weights)
    if numerics.round_activations or not 0 < rows <= ROWS:
        return linears(rms_norm(x, norm, eps), weights, numerics=numerics, early=early)
    launch = few_launcher(few(rows, k, outputs, norm=eps, early=early))
    results = launch(x.reshape(rows, k), *_planes(weights), norm)
    return tuple(y.reshape(*lead, n) for y, n in zip(results, outputs, strict=True))


def _planes(weights: Sequence[Array | Packed]) -> list[Array]:
    packed = [w for w in weights if isinstance(w, Fp8Blocks)]
    return [plane for w in packed for plane in (w.codes, w.scales)]


def launcher(
    rows: int,
    k: int,
    outputs: tuple[int, ...],
    *,
    wide: bool = False,
    early: bool = False,
    after: bool = False,
) -> Callable:
    """(x [rows, k], codes and scales of each matrix) to results; with ``after`` a last operand that
    the kernel does not read, but that has to be there.
    """
    if rows <= ROWS:
        return few_launcher(few(rows, k, outputs, wide=wide, early=early), after)
    return broad_launcher(broad_shape.tuned(rows, k, outputs, wide), after)


def few(
    rows: int,
    k: int,
    outputs: tuple[int, ...],
    *,
    wide: bool = False,
    early: bool = False,
    norm: float | None = None,
) -> Stream | Skinny:
    """The launch for up to 128 rows; ``early`` is what ``Stream`` cannot be."""
    options = {"wide": wide, "norm": norm}
    streamed = None if early else stream_shape.tuned(rows, k, outputs, **options)
    return streamed or skinny_shape.tuned(rows, k, outputs, early=early, **options)


def few_program(s: Stream | Skinny, words: str, cluster: str, maps: int) -> list[str]:
    """With named operands: SMEM words, the cluster's number, the first tensor map."""
    if isinstance(s, Stream):
        return stream_ptx.program(s, words, cluster, maps)
    return skinny_ptx.program(s, words, cluster)


def boxes(s: Stream | Skinny) -> list[tuple[int, tuple[int, int], int]]:
    """Tensor maps that ``few_program`` takes, by the number of their operand."""
    if isinstance(s, Skinny):
        return []
    box = STRIP, COLUMNS
    return [(1 + 2 * m, box, COLUMNS) for m in range(len(s.outputs))]


@lru_cache(maxsize=256)
def few_launcher(s: Stream | Skinny, after: bool = False) -> Callable:
    """``launcher`` for up to ``ROWS`` rows; a norm's weight comes behind the matrices."""
    inputs, count, normed = 1 + 2 * len(s.outputs), len(s.outputs), s.norm is not None
    operands = inputs + count + normed
    program = few_program(s, f"${operands}", f"${operands + 1}", operands + 2)
    body = inline_ptx.block(program, gmem=operands, smem=1, scalars=1, boxes=boxes(s))
    early = isinstance(s, Skinny) and s.early

    def linear_few_rows(*refs):
        norm, refs = refs[inputs : inputs + normed], refs[:inputs] + refs[inputs + normed + after :]
        *refs, words = refs
        body(*refs, *norm, words, lax.axis_index("tile"))
        if early:
            plgpu.griddepcontrol_wait()  # asks for the launch attribute; the body has waited

    return plgpu.kernel(
        linear_few_rows,
        out_type=tuple(
            jax.ShapeDtypeStruct((s.rows, n), F32 if s.wide else BF16) for n in s.outputs
        ),
        grid=(s.grid,),
        grid_names=("tile",),
        cluster=(s.blocks,),
        cluster_names=("part",),
        num_threads=s.threads // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=256)
def broad_launcher(s: Broad, after: bool = False) -> Callable:
    """``launcher`` for more: one launch orders the columns of x, one multiplies."""
    count = len(s.outputs)
    arrange = inline_ptx.block(arrange_ptx.program(s), gmem=2, smem=0, scalars=2)
    multiply = inline_ptx.block(broad_ptx.program(s), gmem=1 + 3 * count, smem=1, scalars=1)

    def linear_arrange(*refs):
        arrange(refs[0], refs[-1], lax.axis_index("group"), lax.axis_index("part"))

    def linear_many_rows(*refs):
        multiply(*refs, lax.axis_index("block"))

    image = plgpu.kernel(
        linear_arrange,
        out_type=jax.ShapeDtypeStruct(
            (s.units * s.groups * broad_shape.GROUP_BYTES // 4,), "int32"
        ),
        grid=(s.groups, arrange_ptx.parts(s)),
        grid_names=("group", "part"),
        compiler_params=WARPGROUP,
    )
    product = plgpu.kernel(
        linear_many_rows,
        out_type=tuple(
            jax.ShapeDtypeStruct((s.rows, n), F32 if s.wide else BF16) for n in s.outputs
        ),
        grid=(s.blocks,),
        grid_names=("block",),
        cluster=(s.splits,),
        cluster_names=("part",),
        num_threads=broad_shape.THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )

    def launch(x, *planes):
        *planes, last = planes if after else (*planes, None)
        operands = (x, last) if after else (x,)
        return product(image(*operands), *planes)

    return launch
