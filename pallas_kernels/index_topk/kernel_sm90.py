"""``index_topk`` and ``top_blocks`` on Hopper: one launch, a cluster of blocks a row
(ARCHITECTURE 6.5 and 6.7).
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.index_topk.select_ptx import program
from pallas_kernels.index_topk.stream_ptx import BLOCKS, PICKED_BITS, Selection

SMS = 132
MAP_BITS = 1 << 18  # the largest share of a row of one block of threads


def tuned(rows: int, n: int, k: int, block: int) -> Selection:
    """Blocks of threads enough to fill the GPU twice, none without much to do."""
    elements = -(-n // block)
    least = -(-elements // MAP_BITS)
    useful = min(8, 2 * SMS // max(1, rows), -(-elements // 4096))
    cluster = next((c for c in (1, 2, 4) if c >= least and 2 * c > useful), 8)
    return Selection(n, k, block, cluster)


@lru_cache(maxsize=64)
def launcher(s: Selection, rows: int) -> Callable:
    """(scores f32 [rows, n], visible int32 [rows]) -> int32 [rows, k]."""
    body = inline_ptx.block(program(s), gmem=3, smem=1, scalars=2)

    def index_topk(scores, visible, out, smem):
        body(scores, visible, out, smem, lax.axis_index("row"), lax.axis_index("part"))

    return plgpu.kernel(
        index_topk,
        out_type=jax.ShapeDtypeStruct((rows, s.k), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        cluster=(s.cluster,),
        cluster_names=("part",),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def index_topk(scores: Array, visible: Array, *, k: int) -> Array:
    """``op.build``'s contract on an sm_90 GPU, of the first ``visible`` scores of a row; what lies
    behind them is not read.

    ``ValueError`` beyond 2,097,152 scores a row or 4,095 places.
    """
    return _select(scores, visible, k, 1)


def top_blocks(scores: Array, visible: Array, *, block_size: int, k: int) -> Array:
    """``op.build_blocks``'s contract on an sm_90 GPU, of the first ``visible`` scores of a row.

    ``ValueError`` beyond 2,097,152 blocks a row, 4,095 places or for a block size other than 1, 2,
    4, 8 and 16.
    """
    return _select(scores, visible, k, block_size)


def unfit(scores: Array, k: int, block: int) -> bool:
    """Whether the kernels do not have these scores, places or block size."""
    n = scores.shape[-1]
    sizes = block in BLOCKS and 0 < n <= block << 21 and 0 < k < 1 << PICKED_BITS
    return scores.dtype != jnp.float32 or not sizes


def _select(scores: Array, visible: Array, k: int, block: int) -> Array:
    if scores.dtype != jnp.float32:
        raise ValueError(f"{scores.dtype=} must be float32")
    *lead, n = scores.shape
    if list(visible.shape) != lead:
        raise ValueError(f"{visible.shape=} must be {tuple(lead)}")
    rows = visible.size
    if rows == 0:
        return jnp.zeros((*lead, k), jnp.int32)
    select = launcher(tuned(rows, n, k, block), rows)
    picked = select(scores.reshape(rows, n), visible.reshape(rows).astype(jnp.int32))
    return picked.reshape(*lead, k)
