"""Layout -> record of operations. One device needs no collectives: ``tp1`` is the local record."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import Array

from dsv41_jax.errors import UserError
from dsv41_jax.ops import Ops, local_ops
from pallas_kernels.numerics import SERVING, Numerics
from pallas_kernels.quant import Packed
from sharding.collectives import (
    ALL_REDUCES,
    Axes,
    anywhere,
    from_first,
    gather,
    peer_from_first,
    peer_gather,
)
from sharding.collectives import all_reduce as psum
from sharding.dispatch import DISPATCHES
from sharding.engram_rows import SpreadRows, spread_embedding, spread_engram_rows
from sharding.experts import SpreadExperts
from sharding.fused_sums import FusedStreams, fusing_all_reduce
from sharding.layouts import Division


def build_ops(
    division: Division | str,
    numerics: Numerics,
    kernels: str = "auto",
    all_reduce: str = "psum",
    dispatch: str = "gather",
) -> Ops:
    """The operations of a divided model, for use inside ``shard_map`` over its mesh; "tp1": those
    of one device. all_reduce: of ``ALL_REDUCES``, after attention and experts; "peer" leaves some
    sums to the pass over the streams behind them, and takes every other exchange between tensor
    ranks of programs that have peer memory. dispatch: of ``DISPATCHES``, of rows to experts
    of other data ranks. UserError for a kind of kernels that does not exist here.
    """
    try:
        local = local_ops(numerics, kernels)
    except ValueError as error:
        raise UserError(f"kernels {kernels!r}: {error}") from error
    if isinstance(division, str):
        # No ranks have to add anything, so sums may be left to the pass over the streams.
        return replace(
            local,
            output_projection=partial(local.output_projection, parts=True),
            moe_experts=partial(local.moe_experts, parts=True),
        )
    if dispatch not in DISPATCHES:
        raise ValueError(f"{dispatch=} must be one of {', '.join(DISPATCHES)}")
    if all_reduce not in ALL_REDUCES:
        raise ValueError(f"{all_reduce=} must be one of {', '.join(ALL_REDUCES)}")
    spread = partial(_spread, local, division, dispatch, peer=all_reduce == "peer")
    if all_reduce == "psum":
        return spread(partial(psum, dtype=numerics.dtype), part=jnp.float32)
    # Where nobody asked for kernels, only serving rounds as the fused one does.
    if kernels == "auto" and replace(numerics, cache=SERVING.cache) != SERVING:
        return spread(ALL_REDUCES[all_reduce])
    streams = FusedStreams(local.mhc_expand, local.mhc_expand_collapse_norm)
    return replace(
        spread(fusing_all_reduce),
        mhc_expand=streams.expand,
        mhc_expand_collapse_norm=streams.expand_collapse_norm,
    )


def _spread(
    local: Ops,
    division: Division,
    dispatch: str,
    reduce: Callable,
    part: jnp.dtype | None = None,
    peer: bool = False,
) -> Ops:
    """The local operations with the collectives that the division needs around them. part: dtype
    of what ``reduce`` sums, by default that of the numerics. peer: whether tensor ranks exchange
    everything else peer to peer too.
    """

    def axes(logical: str) -> Axes:
        used = division.axes[logical]
        return tuple(axis for axis in used if division.layout.mesh_shape[axis] > 1)

    data, model = axes("batch"), axes("heads")
    experts = SpreadExperts(
        op=local.moe_experts,
        rows=data if division.layout.experts_over_data else (),
        experts=axes("experts"),
        columns=axes("expert_columns"),
        reduce=reduce,
        part=part,
        dispatch=dispatch,
    )
    beside = peer_gather if peer else gather
    vocabulary = SpreadRows((), axes("vocabulary"))
    return replace(
        local,
        embedding=spread_embedding(vocabulary, peer=peer)
        if vocabulary.sharing
        else local.embedding,
        gathered_linear=partial(_gathered_linear, local.linear, beside, model),
        output_projection=partial(
            _output_projection,
            local.output_projection,
            reduce,
            beside,
            heads=model,
            groups_over=axes("groups"),
            part=part,
        ),
        moe_experts=experts,
        engram_rows=spread_engram_rows(local.engram_rows, SpreadRows(data, model), peer=peer),
        agree=partial(peer_from_first if peer else from_first, axes=model),
        anywhere=partial(anywhere, axes=data),
    )


def _gathered_linear(
    linear: Callable,
    gather: Callable,
    model: Axes,
    x: Array,
    weight: Array | Packed,
    *,
    outputs: int,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    y = linear(x, weight, out_dtype=out_dtype)
    return y if y.shape[-1] == outputs else gather(y, model, axis=-1)


def _output_projection(
    project: Callable,
    reduce: Callable,
    gather: Callable,
    o: Array,
    wo_a: Array | Packed,
    wo_b: Array | Packed,
    *,
    groups: int,
    heads: Axes,
    groups_over: Axes,
    part: jnp.dtype | None,
) -> Array:
    """Split groups give partial sums; whole ones need the heads of all ranks."""
    if groups_over:
        return reduce(project(o, wo_a, wo_b, groups=groups, out_dtype=part), groups_over)
    return project(gather(o, heads, axis=-2), wo_a, wo_b, groups=groups)
