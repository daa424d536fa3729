"""Engram on Hopper in two launches, one before and one behind the projection of the rows: the
gather that dequantises, and the gate with its addition (ARCHITECTURE 9.4).
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.columns import COLUMNS, MAX_WIDTH
from pallas_kernels.engram import gate_ptx, rows_ptx
from pallas_kernels.engram.gate_ptx import Gate
from pallas_kernels.engram.rows_ptx import SCALES, WIDTH, Gather
from pallas_kernels.engram.staged import StagedRows, placed
from pallas_kernels.quant import Fp8Rows, Packed

SMS = 132
BF16 = jnp.bfloat16
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@lru_cache(maxsize=64)
def rows_launcher(s: Gather, after: bool = False) -> Callable:
    """(codes e4m3 [table, 256], scales uint8 [table, 8], ids int32 [n]) to bf16 [n, 256]; with
    ``after`` a last operand that the kernel does not read, but that has to be there.
    """
    body = inline_ptx.block(rows_ptx.program(s), gmem=4, smem=0, scalars=1)

    def engram_rows(*refs):
        body(*refs[:3], *refs[3 + after :], lax.axis_index("block"))

    return plgpu.kernel(
        engram_rows,
        out_type=jax.ShapeDtypeStruct((s.count, WIDTH), BF16),
        grid=(s.blocks,),
        grid_names=("block",),
        num_threads=rows_ptx.THREADS // 128,
        thread_name="wg",
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=64)
def gate_launcher(s: Gate) -> Callable:
    """(h, kv, q_weight, k_weight, live int32 [R]) to bf16 [R, S, D]."""
    body = inline_ptx.block(gate_ptx.program(s), gmem=6, smem=1, scalars=2)

    def engram_gate_add(*refs):
        body(*refs, lax.axis_index("stream"), lax.axis_index("row"))

    return plgpu.kernel(
        engram_gate_add,
        out_type=jax.ShapeDtypeStruct((s.rows, s.streams, s.width), BF16),
        grid=(s.stride, s.streams),
        grid_names=("row", "stream"),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )


def rows_unfit(table: Array | Packed, dtype: jnp.dtype) -> str:
    """Why ``engram_rows`` does not take these operands; empty if it does."""
    if not isinstance(table, Fp8Rows) or table.shape[-1] != WIDTH or len(table.shape) != 2:
        return f"{type(table)=} {table.shape=} must be Fp8Rows [rows, {WIDTH}]"
    return "" if dtype == BF16 else f"{dtype=} must be bfloat16"


def engram_rows(table: Array | Packed | StagedRows, ids: Array, *, dtype: jnp.dtype) -> Array:
    """``op.build_rows``'s contract on an sm_90 GPU, for FP8 rows of 256 values and bf16 results;
    else ``ValueError``.

    Ids outside the table give its first or last row. NaN codes, which a checkpoint must not have,
    give +-480.
    """
    table, ids = placed(table, ids)
    if reason := rows_unfit(table, dtype):
        raise ValueError(f"engram_rows: {reason}")
    assert isinstance(table, Fp8Rows) and table.scales.shape == (table.shape[0], SCALES)
    shape = (*ids.shape[:-1], ids.shape[-1] * WIDTH)
    if ids.size == 0:
        return jnp.zeros(shape, BF16)
    s = rows_ptx.gather(ids.size, table.shape[0])
    return rows_launcher(s)(table.codes, table.scales, ids.reshape(-1)).reshape(shape)


def gate_unfit(h: Array, kv: Array, q_weight: Array, k_weight: Array) -> str:
    """Why ``engram_gate_add`` does not take these operands; empty if it does."""
    if any(a.dtype != BF16 for a in (h, kv, q_weight, k_weight)):
        return f"{h.dtype=}, {kv.dtype=}, {q_weight.dtype=} and {k_weight.dtype=} must be bfloat16"
    streams, width = h.shape[-2:]
    if kv.shape != (*h.shape[:-2], (streams + 1) * width):
        return f"{kv.shape=} must be {(*h.shape[:-2], (streams + 1) * width)}"
    if {q_weight.shape, k_weight.shape} != {(streams, width)}:
        return f"{q_weight.shape=} and {k_weight.shape=} must be {(streams, width)}"
    if width % COLUMNS or not 0 < width <= MAX_WIDTH:
        return f"{width=} must be a multiple of {COLUMNS} up to {MAX_WIDTH}"
    return ""


def engram_gate_add(
    h: Array, kv: Array, q_weight: Array, k_weight: Array, live: Array, *, eps: float
) -> Array:
    """``op.build_gate_add``'s contract on an sm_90 GPU, for bf16 operands and D a multiple of 8 up
    to 6144; else ``ValueError``.

    A row has the same bits whatever the other rows and their number.
    """
    if reason := gate_unfit(h, kv, q_weight, k_weight):
        raise ValueError(f"engram_gate_add: {reason}")
    *lead, streams, width = h.shape
    rows = h.size // (streams * width)
    if live.shape != tuple(lead):
        raise ValueError(f"{live.shape=} must be {tuple(lead)}")
    if rows == 0:
        return h
    s = Gate(rows, streams, width, min(rows, SMS // streams), eps)
    out = gate_launcher(s)(
        h.reshape(rows, streams, width),
        kv.reshape(rows, -1),
        q_weight,
        k_weight,
        live.reshape(rows).astype(jnp.int32),
    )
    return out.reshape(h.shape)
