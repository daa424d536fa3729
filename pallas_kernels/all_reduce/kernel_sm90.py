"""The sum over GPUs of one host in one launch, alone or with the pass over the streams behind it,
and the gather.

Ordinary kernels: they store to addresses from a table, so that nothing but their own launch costs
time and a command buffer takes them. Never run a rank's calls in another order, nor start one
before the one before it has ended.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.all_reduce import exchange_ptx, fused_ptx, gather_ptx
from pallas_kernels.all_reduce.exchange import (
    FUSED_WIDTH,
    HALVES,
    SLOTS,
    THREADS,
    Exchange,
    Gather,
)
from pallas_kernels.mhc.fused_ptx import STREAMS, Fused

BF16, F32 = jnp.bfloat16, jnp.float32
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@lru_cache(maxsize=256)
def launcher(e: Exchange, slot: int) -> Callable:
    """(x, table, after) to the sum bf16 [R, D]; after: an array to wait for."""
    body = inline_ptx.block(exchange_ptx.program(e, slot), gmem=3, smem=0, scalars=1)

    def peer_all_reduce(x, table, after, out):
        body(x, table, out, lax.axis_index("block"))

    return plgpu.kernel(
        peer_all_reduce,
        out_type=jax.ShapeDtypeStruct((e.rows, e.width), BF16),
        grid=(e.grid,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="wg",
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=256)
def gather_launcher(g: Gather, half: int, dtype: jnp.dtype) -> Callable:
    """(x, table, after) to the rows of all ranks, or their union, of the dtype."""
    body = inline_ptx.block(gather_ptx.program(g, half), gmem=3, smem=0, scalars=1)

    def peer_gather(x, table, after, out):
        body(x, table, out, lax.axis_index("block"))

    return plgpu.kernel(
        peer_gather,
        out_type=jax.ShapeDtypeStruct((g.rows, g.result // dtype.itemsize), dtype),
        grid=(g.grid,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="wg",
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=64)
def report_launcher(e: Exchange) -> Callable:
    """(table, after) to the error word int32 [1]."""
    body = inline_ptx.block(exchange_ptx.report_program(e), gmem=2, smem=0, scalars=0)

    def peer_report(table, after, out):
        body(table, out)

    return plgpu.kernel(
        peer_report,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=256)
def fused_launcher(e: Exchange, slot: int, norm_eps: float) -> Callable:
    """(h, y, post, comb, pre, weight, table, after) to streams bf16 [R, 4, D] and normed bf16
    [R, D].
    """
    s = Fused(e.rows, e.width, e.rows, norm_eps)
    body = inline_ptx.block(fused_ptx.program(e, slot, norm_eps), gmem=9, smem=1, scalars=1)

    def peer_all_reduce_norm(*refs):
        *inputs, table, _after, streams, normed, smem = refs
        body(*inputs, streams, normed, table, smem, lax.axis_index("block"))

    return plgpu.kernel(
        peer_all_reduce_norm,
        out_type=(
            jax.ShapeDtypeStruct((s.rows, STREAMS, s.width), BF16),
            jax.ShapeDtypeStruct((s.rows, s.width), BF16),
        ),
        grid=(s.grid,),
        grid_names=("block",),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )


def _check(slot: int, **arrays: tuple[Array, tuple[int, ...], jnp.dtype]) -> None:
    if not 0 <= slot < SLOTS:
        raise ValueError(f"{slot=} must be 0 to {SLOTS - 1}")
    for name, (array, shape, dtype) in arrays.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name}: {array.shape=} {array.dtype=} must be {shape} {jnp.dtype(dtype).name}"
            )


def all_reduce(x: Array, table: Array, after: Array, *, exchange: Exchange, slot: int) -> Array:
    """``op.build_all_reduce``'s contract on an sm_90 GPU."""
    e = exchange
    of_rows, of_table = (e.rows, e.width), (1, e.table_words)
    _check(slot, x=(x, of_rows, BF16), table=(table, of_table, jnp.int32))
    return launcher(e, slot)(x, table, after)


def gather(
    x: Array, table: Array, after: Array, *, exchange: Exchange, half: int, union: bool
) -> Array:
    """``op.build_gather``'s contract on an sm_90 GPU."""
    if not 0 <= half < HALVES:
        raise ValueError(f"{half=} must be 0 to {HALVES - 1}")
    _check(0, table=(table, (1, exchange.table_words), jnp.int32))
    rows, n = x.shape
    g = Gather(exchange, rows, n * x.dtype.itemsize, union)
    return gather_launcher(g, half, x.dtype)(x, table, after)


def report(table: Array, after: Array, *, exchange: Exchange) -> Array:
    """``op.build_report``'s contract on an sm_90 GPU."""
    _check(0, table=(table, (1, exchange.table_words), jnp.int32))
    return report_launcher(exchange)(table, after)


def all_reduce_norm(
    h: Array,
    y: Array,
    post: Array,
    comb: Array,
    pre: Array,
    weight: Array,
    table: Array,
    after: Array,
    *,
    exchange: Exchange,
    slot: int,
    norm_eps: float,
) -> tuple[Array, Array]:
    """``op.build_all_reduce_norm``'s contract on an sm_90 GPU."""
    e = exchange
    rows, d = e.rows, e.width
    mix = (rows, STREAMS)
    _check(
        slot,
        h=(h, (*mix, d), BF16),
        y=(y, (rows, d), BF16),
        post=(post, mix, F32),
        comb=(comb, (*mix, STREAMS), F32),
        pre=(pre, mix, F32),
        weight=(weight, (d,), BF16),
        table=(table, (1, e.table_words), jnp.int32),
    )
    flat = comb.reshape(rows, STREAMS * STREAMS)
    if d > FUSED_WIDTH:
        raise ValueError(f"{e.width=} must be at most {FUSED_WIDTH}")
    if e.two_shot:
        raise ValueError(f"{e.rows=} over {e.ranks=} must be summed in one crossing")
    return fused_launcher(e, slot, norm_eps)(h, y, post, flat, pre, weight, table, after)
