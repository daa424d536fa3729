"""The launch before the decode kernel: the plan and the token images that it reads."""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.moe_experts import decode_arrange_few_ptx as few_ptx
from pallas_kernels.moe_experts import decode_arrange_ptx as ptx
from pallas_kernels.moe_experts.decode_shape import Shape


@lru_cache(maxsize=64)
def arrange(s: Shape, shared: bool) -> Callable:
    """(flat ids, flat weights, x bf16 [R, D]) -> plan (``decode_plan.PlanLayout``), image of the
    routed items' tokens (up to eight rows: of all rows once), image of the shared expert's, zero
    unless ``shared``. What no item uses stays unwritten. ``ValueError`` for up to eight rows of
    more than 256 ids in all.
    """
    kind = few_ptx if s.few else ptx
    places = kind.Places(s)
    lines = kind.program(s, shared=shared)
    body = inline_ptx.block(lines, gmem=6, smem=1, scalars=1)

    def moe_experts_arrange(*refs):
        body(*refs, lax.axis_index("block"))

    words = s.plan.counters + s.plan.counter_count
    images = ((s.up, 1 if s.few else s.items), (s.up8, s.shared_items))
    return plgpu.kernel(
        moe_experts_arrange,
        out_type=(
            jax.ShapeDtypeStruct((words,), jnp.int32),
            *[jax.ShapeDtypeStruct((n * p.depth, p.token_rows, 64), jnp.int32) for p, n in images],
        ),
        grid=(1 + 2 * few_ptx.image_blocks(s) if s.few else s.blocks,),
        grid_names=("block",),
        num_threads=kind.THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((places.words,), jnp.int32),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
