"""Experts in the order that the Hopper kernels read, each rank's part by itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dsv41_jax.compiling import jit
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.moe import MoE, RepackedExperts
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.moe_experts import repack
from pallas_kernels.moe_experts.weights import ExpertWeights
from sharding.place import Placement


def repack_placed(model: Model, placement: Placement, kernels: str = "auto") -> None:
    """``repack_experts`` of a model on a placement: "mosaic", and "auto" on sm_90 for experts that
    fit. UserError where "mosaic" was asked for and they do not.
    """
    if kernels != "mosaic" and not (kernels == "auto" and on_hopper()):
        return
    name = placement.division.layout.name
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, MoE):
            weights = module.experts(), module.shared_experts()
            why = repack.misfit(*local_shapes(*weights)) or _scale_fault(*weights)
            if not why:
                module.experts = RepackedExperts(repacked(*weights, placement))
            elif kernels == "mosaic":
                raise UserError(f"layout {name}: kernels 'mosaic': {why}")


def repacked(
    experts: ExpertWeights, shared: ExpertWeights, placement: Placement
) -> repack.PackedExperts:
    """Every rank's packed part, the shared expert with it, one rank after the other on the first
    axis.
    """
    return jit(packing(placement))(experts, shared)


def packing(placement: Placement) -> Callable:
    """The function behind ``repacked``, to trace."""
    specs = [
        ExpertWeights(*(placement.spec(f".ffn.{kind}.{w}.weight") for w in ("w1", "w3", "w2")))
        for kind in ("experts", "shared_experts")
    ]
    outputs = placement.spec(".ffn.experts.weight")
    return placement.over_ranks(repack.pack_unchecked, tuple(specs), outputs)


def local_shapes(
    experts: ExpertWeights, shared: ExpertWeights
) -> tuple[ExpertWeights, ExpertWeights]:
    """What one rank holds, as shapes."""

    def local(array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)

    return jax.tree.map(local, (experts, shared))


def _scale_fault(experts: ExpertWeights, shared: ExpertWeights) -> str:
    for encoding, weights in ((repack.FP4, experts), (repack.FP8, shared)):
        for name in ("w1", "w3", "w2"):
            top = int(jnp.max(getattr(weights, name).scales))
            if top > encoding.max_scale_byte:
                return f"{name} scale byte {top} must be at most {encoding.max_scale_byte}"
    return ""
