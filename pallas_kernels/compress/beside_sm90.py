"""A few rows' products by large matrices and the stores of their window rows and index keys in one
launch on Hopper: neither reads what the other writes, and the stores take a block or two.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.compress import kernel_sm90 as rows_sm90
from pallas_kernels.compress.store import Chunk, Keys, Paged, Window
from pallas_kernels.compress.store_shape import THREADS, Job
from pallas_kernels.linear import kernel_sm90 as linear_sm90
from pallas_kernels.linear.skinny_shape import ROWS, Skinny
from pallas_kernels.linear.stream_shape import Stream
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Blocks, Packed

BF16 = jnp.bfloat16


def program(s: Stream | Skinny, jobs: Sequence[Job]) -> list[str]:
    """Operands: GMEM of the product's program, then of the jobs; SMEM words, cluster, tensor maps.
    Clusters behind those of the product store, with as many threads of a block as that takes.
    """
    own = linear_operands(s)
    all_of_them = own + sum(len(job.names) for job in jobs)
    words, cluster = f"${all_of_them}", f"${all_of_them + 1}"
    return [
        ".reg .pred beside; .reg .b32 stored, rank_there;",
        f"setp.ge.u32 beside, {cluster}, {s.grid}; @beside bra BESIDE;",
        "{",
        *linear_sm90.few_program(s, words, cluster, all_of_them + 2),
        "}",
        "bra.uni DONE;",
        f"BESIDE: mov.u32 stored, %tid.x; setp.ge.u32 beside, stored, {THREADS}; @beside bra DONE;",
        f"mov.u32 rank_there, %cluster_ctarank; sub.u32 stored, {cluster}, {s.grid};",
        f"mad.lo.u32 stored, stored, {s.blocks}, rank_there;",
        "{",
        *rows_sm90.program(jobs, own, "stored"),
        "}",
        "DONE:",
    ]


def linear_operands(s: Stream | Skinny) -> int:
    """x, codes, scales and output of each matrix, the norm's weight."""
    return 1 + 3 * len(s.outputs) + (s.norm is not None)


@lru_cache(maxsize=64)
def launcher(s: Stream | Skinny, jobs: tuple[Job, ...]) -> Callable:
    """(x, codes and scales of each matrix, the norm's weight, operands of the jobs) to results."""
    count, others = len(s.outputs), sum(len(job.names) for job in jobs)
    inputs, own = 1 + 2 * count, linear_operands(s)
    maps = linear_sm90.boxes(s)
    body = inline_ptx.block(program(s, jobs), gmem=own + others, smem=1, scalars=1, boxes=maps)

    def linear_few_rows_and_store(*refs):
        first, norm, rest = refs[:inputs], refs[inputs : own - count], refs[own - count :]
        rows, (*outs, words) = rest[:others], rest[others:]
        body(*first, *outs, *norm, *rows, words, lax.axis_index("tile"))

    more = -(-sum(job.blocks for job in jobs) // s.blocks)
    return plgpu.kernel(
        linear_few_rows_and_store,
        out_type=tuple(jax.ShapeDtypeStruct((s.rows, n), BF16) for n in s.outputs),
        grid=(s.grid + more,),
        grid_names=("tile",),
        cluster=(s.blocks,),
        cluster_names=("part",),
        num_threads=s.threads // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=linear_sm90.WARPGROUP,
    )


def unfit(
    x: Array, norm: Array, weights: Sequence[Array | Packed], numerics: Numerics, window: Window
) -> str:
    """Why ``linears_beside_rows`` refuses these operands beyond what ``store_rows`` does; empty if
    it does not.
    """
    rows = prod(x.shape[:-1])
    if numerics.round_activations or window.emit or not 0 < rows <= ROWS:
        return f"{x.shape=} must be few rows, not rounded, of a window that is read where it is"
    return linear_sm90.normed_unfit(x, norm, weights, numerics)


def linears_beside_rows(
    x: Array,
    norm: Array,
    weights: Sequence[Array | Packed],
    chunk: Chunk,
    *,
    window: Window,
    paged: Paged | None = None,
    keys: Keys | None = None,
    eps: float,
    row_eps: float,
    numerics: Numerics,
) -> tuple[tuple[Array, ...], tuple]:
    """``op.build_beside``'s contract on an sm_90 GPU; ``ValueError`` for what ``unfit`` names and
    what ``store_rows`` refuses. Bits are those of the two launches.
    """
    if why := unfit(x, norm, weights, numerics, window):
        raise ValueError(f"linears_beside_rows: {why}")
    lead, k = x.shape[:-1], x.shape[-1]
    rows, outputs = prod(lead), tuple(w.shape[0] for w in weights)
    s = linear_sm90.few(rows, k, outputs, norm=eps)
    jobs, operands, refs = rows_sm90.row_jobs(chunk, window, paged, keys, row_eps)
    planes = [p for w in weights if isinstance(w, Fp8Blocks) for p in (w.codes, w.scales)]
    results = launcher(s, jobs)(x.reshape(rows, k), *planes, norm, *operands)
    products = tuple(y.reshape(*lead, n) for y, n in zip(results, outputs, strict=True))
    return products, (None, *rows_sm90.stored(refs))
