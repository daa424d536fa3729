"""Engram row lookup, gate and residual addition (ARCHITECTURE 9.4); the hash is in ``hash.py``."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import row_count, takes
from pallas_kernels.dispatch import choose
from pallas_kernels.engram import ref
from pallas_kernels.engram.staged import StagedRows
from pallas_kernels.quant import Packed


def build_rows(kernels: str) -> Callable:
    """engram_rows(table [rows, N] (``Fp8Rows`` or plain), ids int32 [..., C], *, dtype) -> [...,
    C*N], column order.

    The table may be ``StagedRows``, fetched for these ids; their places are then looked up instead.
    ``mosaic``: ``Fp8Rows`` of 256 values, bf16 results; ``auto`` on an sm_90 GPU takes those for
    the rows of ``chosen``.
    """
    chosen = _rows_where_faster if kernels == "auto" else _rows
    return choose("engram_rows", kernels, {"reference": ref.engram_rows, "mosaic": chosen})


def build_gate_add(kernels: str) -> Callable:
    """engram_gate_add(h [..., S, D], kv [..., (S+1)*D], q_weight [S, D], k_weight [S, D], live bool
    [...], *, eps) -> [..., S, D]: h + gate * value, one rounding, for kv of keys of every stream,
    then the value. gate f32 [..., S]: sigmoid of the signed root of the normalised dot; 0 where not
    ``live`` (image tokens).

    ``mosaic``: bf16 operands, D a multiple of 8 up to 6144; ``auto`` on an sm_90 GPU takes those
    for the rows of ``chosen``.
    """
    chosen = _gate_add_where_faster if kernels == "auto" else _gate_add
    kinds = {"reference": ref.engram_gate_add, "mosaic": chosen}
    return choose("engram_gate_add", kernels, kinds)


def _rows(table: Array | Packed | StagedRows, ids: Array, *, dtype: jnp.dtype) -> Array:
    from pallas_kernels.engram import kernel_sm90

    return kernel_sm90.engram_rows(table, ids, dtype=dtype)


def _rows_where_faster(
    table: Array | Packed | StagedRows, ids: Array, *, dtype: jnp.dtype
) -> Array:
    from pallas_kernels.engram import kernel_sm90

    fits = takes("engram_rows", row_count(ids)) and not kernel_sm90.rows_unfit(
        table.rows if isinstance(table, StagedRows) else table, dtype
    )
    run = kernel_sm90.engram_rows if fits else ref.engram_rows
    return run(table, ids, dtype=dtype)


def _gate_add(
    h: Array, kv: Array, q_weight: Array, k_weight: Array, live: Array, *, eps: float
) -> Array:
    from pallas_kernels.engram import kernel_sm90

    return kernel_sm90.engram_gate_add(h, kv, q_weight, k_weight, live, eps=eps)


def _gate_add_where_faster(
    h: Array, kv: Array, q_weight: Array, k_weight: Array, live: Array, *, eps: float
) -> Array:
    from pallas_kernels.engram import kernel_sm90

    fits = takes("engram_gate_add", row_count(h, 2))
    fits = fits and not kernel_sm90.gate_unfit(h, kv, q_weight, k_weight)
    run = kernel_sm90.engram_gate_add if fits else ref.engram_gate_add
    return run(h, kv, q_weight, k_weight, live, eps=eps)
