"""``output_projection`` on Hopper: a few rows through both halves in one launch, up to 256 through
the grouped half, which dequantises the FP8 weights on their way to the tensor cores, adds the parts
of K in a block or a cluster and rounds (ARCHITECTURE 4.6).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.addends import Addends
from pallas_kernels.linear.box_ptx import COLUMNS, STRIP
from pallas_kernels.numerics import Numerics
from pallas_kernels.output_projection import joint_ptx, joint_shape
from pallas_kernels.output_projection.grouped_ptx import program
from pallas_kernels.output_projection.grouped_shape import MAX_ROWS, THREADS, Grouped, launch
from pallas_kernels.output_projection.joint_shape import Joint, joint
from pallas_kernels.output_projection.product import bf16_product
from pallas_kernels.quant import Fp8Blocks, Packed

BF16 = jnp.bfloat16
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@lru_cache(maxsize=64)
def launcher(s: Grouped, after: bool = False) -> Callable:
    """(o [R, G * K], codes [G * N, K], scales [G * N / 32, K / 32]) to bf16 [R, G * N]; with
    ``after`` a last operand that the kernel does not read, but that has to be there.
    """
    body = inline_ptx.block(program(s), gmem=4, smem=1, scalars=3)

    def grouped_projection(*refs):
        refs = refs[:3] + refs[3 + after :]
        body(*refs, lax.axis_index("slab"), lax.axis_index("rows"), lax.axis_index("part"))
        if s.early:
            plgpu.griddepcontrol_wait()  # asks for the launch attribute; the body has waited

    return plgpu.kernel(
        grouped_projection,
        out_type=jax.ShapeDtypeStruct((s.rows, s.groups * s.rank), BF16),
        grid=(s.slabs, s.token_tiles),
        grid_names=("slab", "rows"),
        cluster=(s.splits,),
        cluster_names=("part",),
        num_threads=THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=64)
def joint_launcher(s: Joint, after: bool = False) -> Callable:
    """(o [R, G * K], codes and scales of wo_a, of wo_b) to parts f32 [P, R, D]; ``after`` as of
    ``launcher``.
    """
    boxes = [(codes, (STRIP, COLUMNS), COLUMNS) for codes in (1, 3)]
    body = inline_ptx.block(joint_ptx.program(s), gmem=8, smem=1, scalars=2, boxes=boxes)

    def output_projection(*refs):
        refs = refs[:6] + refs[6 + after :]
        body(*refs, lax.axis_index("part"), lax.axis_index("rank"))

    run = plgpu.kernel(
        output_projection,
        out_type=(
            jax.ShapeDtypeStruct((s.parts, s.rows, s.hidden), jnp.float32),
            jax.ShapeDtypeStruct((s.parts, s.part_bytes // 4), jnp.int32),
        ),
        grid=(s.parts, joint_shape.BLOCKS),
        grid_names=("part", "rank"),  # the last is the fastest: a part's blocks start in a row
        num_threads=joint_shape.THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )

    def launch(*args: Array) -> Array:
        return run(*args[:5], inline_ptx.counters(), *args[5:])[0]

    return launch


def unfit(o: Array, wo_a: Array | Packed, groups: int, numerics: Numerics) -> str:
    """Why the kernel does not take these operands; empty if it does."""
    rows, outputs, k = _sizes(o, wo_a, groups)
    if numerics.dtype != BF16 or o.dtype != BF16 or not isinstance(wo_a, Fp8Blocks):
        return f"{numerics.name=}, {o.dtype=} and {type(wo_a)=} must be bfloat16 and Fp8Blocks"
    if wo_a.shape[1] != k or outputs % groups:
        return f"{wo_a.shape=} must be [{groups} * N, {k}]"
    if rows <= MAX_ROWS and launch(1, groups, outputs // groups, k, round=False) is None:
        return f"{wo_a.shape=} of {groups=} has no launch"
    return ""


def _sizes(o: Array, wo_a: Array | Packed, groups: int) -> tuple[int, int, int]:
    """Rows, outputs of all groups, inputs of one."""
    width = o.shape[-2] * o.shape[-1]
    return o.size // max(1, width), wo_a.shape[0], width // groups


def grouped_projection(
    o: Array, wo_a: Array | Packed, *, groups: int, numerics: Numerics, early: bool = False
) -> Array:
    """``op.build_grouped``'s contract on an sm_90 GPU, for bf16 numerics, FP8 weights; else
    ``ValueError``.

    Up to 256 rows scales above 2^67 count as that and a row has the same bits whatever the other
    rows and their number; rows of NaN become NaN and change no other row. ``early``, up to as many:
    weights are read before the kernel ahead has ended, so that it must not be what writes them.
    """
    if reason := unfit(o, wo_a, groups, numerics):
        raise ValueError(f"output_projection: {reason}")
    assert isinstance(wo_a, Fp8Blocks)
    rows, outputs, k = _sizes(o, wo_a, groups)
    if rows == 0:
        return jnp.zeros((*o.shape[:-2], outputs), BF16)
    if rows > MAX_ROWS:
        return bf16_product(o, wo_a, groups=groups, numerics=numerics)
    s = launch(rows, groups, outputs // groups, k, round=numerics.round_activations)
    assert s is not None
    s = replace(s, early=early)
    z = launcher(s)(o.reshape(rows, groups * k), wo_a.codes, wo_a.scales)
    return z.reshape(*o.shape[:-2], outputs)


def joint_unfit(
    o: Array, wo_a: Array | Packed, wo_b: Array | Packed, groups: int, numerics: Numerics
) -> str:
    """Why ``addends`` refuses these operands; empty if it does not."""
    if reason := unfit(o, wo_a, groups, numerics):
        return reason
    rows, outputs, k = _sizes(o, wo_a, groups)
    if not isinstance(wo_b, Fp8Blocks) or wo_b.shape[1] != outputs:
        return f"{type(wo_b)=} {wo_b.shape=} must be Fp8Blocks [D, {outputs}]"
    if joint(rows, groups, outputs // groups, k, wo_b.shape[0], round=False) is None:
        return f"{rows=}, {wo_a.shape=}, {wo_b.shape=} have no launch"
    return ""


def addends(
    o: Array, wo_a: Array | Packed, wo_b: Array | Packed, *, groups: int, numerics: Numerics
) -> Addends:
    """``op.build_addends``'s contract on an sm_90 GPU; ``ValueError`` for what ``joint_unfit``
    names.

    Codes are finite; a scale of 2^-127 counts as 0, and inputs below 2^-32 of the largest of their
    32 columns, those of either half, may be off by 2^-40 of it. A row has the same bits whatever
    the other rows and their number.
    """
    if reason := joint_unfit(o, wo_a, wo_b, groups, numerics):
        raise ValueError(f"output_projection: {reason}")
    assert isinstance(wo_a, Fp8Blocks) and isinstance(wo_b, Fp8Blocks)
    (rows, outputs, k), hidden = _sizes(o, wo_a, groups), wo_b.shape[0]
    s = joint(rows, groups, outputs // groups, k, hidden, round=numerics.round_activations)
    assert s is not None
    planes = wo_a.codes, wo_a.scales, wo_b.codes, wo_b.scales
    parts = joint_launcher(s)(o.reshape(rows, groups * k), *planes)
    return Addends(parts.reshape(s.parts, *o.shape[:-2], hidden))
