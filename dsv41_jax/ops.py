"""The record of operations that the model calls: the seam between the model, kernels and
sharding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.compress import op as compress
from pallas_kernels.engram import op as engram
from pallas_kernels.index_scores import op as index_scores
from pallas_kernels.index_topk import op as index_topk
from pallas_kernels.linear import op as linear
from pallas_kernels.mhc import op as mhc
from pallas_kernels.moe_experts import op as moe_experts
from pallas_kernels.moe_gate import op as moe_gate
from pallas_kernels.numerics import SERVING, Numerics
from pallas_kernels.output_projection import op as output_projection
from pallas_kernels.quant import Packed
from pallas_kernels.sparse_attention import op as sparse_attention


@dataclass(frozen=True)
class Ops:
    """Operations with their numerics bound; each contract stands in
    ``pallas_kernels/<op>/op.py``.

    Weights may be parts of a layout's; the operations then give whole results, but for outputs of
    output_projection and moe_experts that only the mhc operations read, which may be sums that
    these have still to take. linears and normed_linears multiply one input by several weights.
    embedding(table [V, K], ids) takes rows of a table. gathered_linear(x, weight [N, K], *,
    outputs, out_dtype=None) is a ``linear`` whose ``outputs`` columns are all there. agree(tree)
    gives every rank that works on the same requests the values of the first of them.
    anywhere(bool []) is whether any rank at all says so. mhc_site, if there is one, does what
    mhc_expand_collapse_norm and mhc_coefficients do, linears_beside_rows what normed_linears and
    store_rows do.
    """

    numerics: Numerics
    linear: Callable
    linears: Callable
    normed_linears: Callable
    gathered_linear: Callable
    embedding: Callable
    mhc_coefficients: Callable
    mhc_collapse: Callable
    mhc_expand: Callable
    mhc_expand_collapse_norm: Callable
    moe_gate: Callable
    moe_experts: Callable
    store_latents: Callable
    store_rows: Callable
    index_scores: Callable
    candidate_scores: Callable
    index_topk: Callable
    top_blocks: Callable
    sparse_attention: Callable
    ring_attention: Callable
    list_attention: Callable
    output_projection: Callable
    engram_rows: Callable
    engram_gate_add: Callable
    agree: Callable
    anywhere: Callable
    mhc_site: Callable | None = None
    linears_beside_rows: Callable | None = None


def local_ops(numerics: Numerics, kernels: str = "auto") -> Ops:
    """Operations of one device; ``kernels`` is a kind of ``pallas_kernels.dispatch.KINDS``, chosen
    here and only here.
    """
    # For operations that are not told the numerics, or keep less of them: kernels round and add up
    # as serving does.
    rounding = replace(numerics, cache=SERVING.cache)
    served = "reference" if kernels == "auto" and rounding != SERVING else kernels
    fused = served != "reference"
    bound_linear = partial(linear.build(served), numerics=numerics)
    return Ops(
        numerics=numerics,
        linear=bound_linear,
        linears=partial(linear.build_many(served), numerics=numerics),
        normed_linears=partial(linear.build_normed(served), numerics=numerics),
        gathered_linear=partial(_whole_linear, bound_linear),
        embedding=_take_rows,
        mhc_coefficients=mhc.build_coefficients(served),
        mhc_collapse=mhc.build_collapse(kernels),
        mhc_expand=mhc.build_expand(kernels),
        mhc_expand_collapse_norm=mhc.build_expand_collapse_norm(served),
        moe_gate=moe_gate.build(kernels),
        moe_experts=partial(moe_experts.build(kernels), numerics=numerics),
        store_latents=compress.build_latents(served),
        store_rows=compress.build_rows(served),
        index_scores=partial(index_scores.build(kernels), numerics=numerics),
        candidate_scores=partial(index_scores.build_candidates(kernels), numerics=numerics),
        index_topk=index_topk.build(served),
        top_blocks=index_topk.build_blocks(served),
        sparse_attention=partial(sparse_attention.build(kernels), numerics=numerics),
        ring_attention=partial(sparse_attention.build_ring(kernels), numerics=numerics),
        list_attention=partial(sparse_attention.build_list(kernels), numerics=numerics),
        output_projection=partial(output_projection.build(served), numerics=numerics),
        engram_rows=partial(engram.build_rows(served), dtype=numerics.dtype),
        engram_gate_add=engram.build_gate_add(served),
        agree=_unchanged,
        anywhere=_unchanged,
        mhc_site=mhc.build_site(served) if fused else None,
        linears_beside_rows=(
            partial(compress.build_beside(served), numerics=numerics) if fused else None
        ),
    )


def _whole_linear(
    linear: Callable,
    x: Array,
    weight: Array | Packed,
    *,
    outputs: int,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    assert weight.shape[0] == outputs
    return linear(x, weight, out_dtype=out_dtype)


def _take_rows(table: Array, ids: Array) -> Array:
    return table[ids]


def _unchanged(values: Any) -> Any:
    return values
