"""Engram row lookup, gate and residual addition (ARCHITECTURE 9.4); the hash is in ``hash.py``."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.engram import ref
from pallas_kernels.engram.staged import StagedRows
from pallas_kernels.quant import Packed


def build_rows(kernels: str) -> Callable:
    """engram_rows(table [rows, N] (``Fp8Rows`` or plain), ids int32 [..., C], *, dtype) -> [...,
    C*N], column order.

    The table may be ``StagedRows``, fetched for these ids; their places are then looked up instead.
    ``mosaic``: ``Fp8Rows`` of 256 values, bf16 results; ``auto`` does not take it.
    """
    kinds = {"reference": ref.engram_rows, "mosaic": _rows}
    return choose("engram_rows", _named(kernels), kinds)


def build_gate_add(kernels: str) -> Callable:
    """engram_gate_add(h [..., S, D], kv [..., (S+1)*D], q_weight [S, D], k_weight [S, D], live bool
    [...], *, eps) -> [..., S, D]: h + gate * value, one rounding, for kv of keys of every stream,
    then the value. gate f32 [..., S]: sigmoid of the signed root of the normalised dot; 0 where not
    ``live`` (image tokens).

    ``mosaic``: bf16 operands, D a multiple of 8 up to 6144; ``auto`` does not take it.
    """
    kinds = {"reference": ref.engram_gate_add, "mosaic": _gate_add}
    return choose("engram_gate_add", _named(kernels), kinds)


def _named(kernels: str) -> str:
    return "reference" if kernels == "auto" else kernels  # until all cases are timed on a GPU


def _rows(table: Array | Packed | StagedRows, ids: Array, *, dtype: jnp.dtype) -> Array:
    from pallas_kernels.engram import kernel_sm90

    return kernel_sm90.engram_rows(table, ids, dtype=dtype)


def _gate_add(
    h: Array, kv: Array, q_weight: Array, k_weight: Array, live: Array, *, eps: float
) -> Array:
    from pallas_kernels.engram import kernel_sm90

    return kernel_sm90.engram_gate_add(h, kv, q_weight, k_weight, live, eps=eps)
