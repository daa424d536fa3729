"""Mixture of experts of one block (ARCHITECTURE section 8)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.ops import Ops
from dsv41_jax.weights import Weight, fp32_param
from pallas_kernels.addends import Addends
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.moe_experts import repack
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, Packed


class Gate(nnx.Module):
    """Router weight [E, D] and the selection biases of text and of image rows."""

    def __init__(self, cfg: Config, experts: int, *, numerics: Numerics, rngs: nnx.Rngs):
        dtype = jnp.bfloat16 if numerics.packed_weights else jnp.float32
        self.weight = nnx.Param(
            fp32_param(rngs, experts, cfg.hidden_size, scale=0.02).get_value().astype(dtype)
        )
        self.bias = fp32_param(rngs, experts)
        self.bias_vl = fp32_param(rngs, experts)


class Experts(nnx.Module):
    """w1, w3 [*, F, D] and w2 [*, D, F]; routed experts are stacked on a first axis E."""

    def __init__(
        self,
        cfg: Config,
        stack: tuple[int, ...],
        encoding: type[Packed],
        *,
        numerics: Numerics,
        rngs: nnx.Rngs,
    ):
        d, f = cfg.hidden_size, cfg.moe_intermediate_size
        self.w1 = Weight(*stack, f, d, encoding=encoding, numerics=numerics, rngs=rngs)
        self.w3 = Weight(*stack, f, d, encoding=encoding, numerics=numerics, rngs=rngs)
        self.w2 = Weight(*stack, d, f, encoding=encoding, numerics=numerics, rngs=rngs)

    def __call__(self) -> ExpertWeights:
        return ExpertWeights(self.w1(), self.w3(), self.w2())


class RepackedExperts(nnx.Module):
    """Routed experts in the order that the Hopper kernels read, at ``weight``."""

    def __init__(self, packed: repack.PackedExperts):
        self.weight = nnx.Param(packed)

    def __call__(self) -> repack.PackedExperts:
        return self.weight.get_value()


class MoE(nnx.Module):
    """Gate, routed experts and the shared expert."""

    def __init__(
        self, cfg: Config, experts: int, top_k: int, *, numerics: Numerics, rngs: nnx.Rngs
    ):
        self.gate = Gate(cfg, experts, numerics=numerics, rngs=rngs)
        self.experts = Experts(cfg, (experts,), Fp4Rows, numerics=numerics, rngs=rngs)
        self.shared_experts = Experts(cfg, (), Fp8Blocks, numerics=numerics, rngs=rngs)
        self.top_k, self.scale, self.limit = top_k, cfg.routed_scaling_factor, cfg.swiglu_limit

    def repack(self) -> None:
        """Replace the routed experts by their repacked form; both at once would not fit a GPU.
        ``ValueError`` where ``repack.pack`` refuses them.
        """
        self.experts = RepackedExperts(repack.pack(self.experts(), self.shared_experts()))

    def route(
        self, ops: Ops, x: Array, image: Array, live: Array | None = None
    ) -> tuple[Array, Array]:
        """Expert ids and weights [..., top_k] of x [..., D]; rows of an image span select with
        ``bias_vl``, those that are not live no expert.
        """
        gate = self.gate
        biases = gate.bias.get_value(), gate.bias_vl.get_value()
        operands = x, gate.weight.get_value(), *biases, image, live
        return ops.moe_gate(*operands, top_k=self.top_k, scale=self.scale)

    def __call__(self, ops: Ops, x: Array, image: Array, live: Array) -> Array | Addends:
        """x [B, T, D] normed, image and live bool [B, T] -> [B, T, D], for the mhc operations; rows
        that are not live reach no expert.
        """
        ids, weights = self.route(ops, x, image, live)
        count = live.size
        rows = (array.reshape(count, array.shape[-1]) for array in (x, ids, weights))
        y = ops.moe_experts(*rows, self.experts(), self.shared_experts(), limit=self.limit)
        if isinstance(y, Addends):
            return Addends(y.parts.reshape(-1, *x.shape))
        return y.reshape(x.shape)


def repack_experts(model: nnx.Module, kernels: str = "auto") -> None:
    """Repack the experts of every block of a loaded model, one after the other, where the kind of
    kernels reads them so: "mosaic", and "auto" on an sm_90 GPU for those that fit.
    """
    if kernels != "mosaic" and not (kernels == "auto" and on_hopper()):
        return
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, MoE):
            fits = not repack.misfit(module.experts(), module.shared_experts())
            if fits or kernels == "mosaic":
                module.repack()
