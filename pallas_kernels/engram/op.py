"""Engram row lookup, gate and residual addition (ARCHITECTURE 9.4); the hash is in ``hash.py``."""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.engram import ref


def build_rows(kernels: str) -> Callable:
    """engram_rows(table [rows, N] (``Fp8Rows`` or plain), ids int32 [..., C], *, dtype) -> [...,
    C*N], column order.
    """
    return choose("engram_rows", kernels, {"reference": ref.engram_rows})


def build_gate(kernels: str) -> Callable:
    """engram_gate(h [..., S, D], keys [..., S, D], q_weight [S, D], k_weight [S, D], live bool
    [...], *, eps)

    -> f32 [..., S]: sigmoid of the signed root of the normalised dot; 0 where not ``live`` (image
    tokens).
    """
    return choose("engram_gate", kernels, {"reference": ref.engram_gate})


def build_add(kernels: str) -> Callable:
    """engram_add(h [..., S, D], gate f32 [..., S], value [..., D]) -> h + gate * value, one
    rounding.
    """
    return choose("engram_add", kernels, {"reference": ref.engram_add})
