"""One backbone block: Engram, attention and experts around the residual streams (ARCHITECTURE
section 7).
"""

from flax import nnx
from jax import Array

from dsv41_jax.attention import Attention
from dsv41_jax.cache import Cache
from dsv41_jax.config import Config
from dsv41_jax.engram import Engram
from dsv41_jax.indexer import Selection
from dsv41_jax.layer_plan import LayerPlan
from dsv41_jax.moe import MoE
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, fp32_param
from pallas_kernels.numerics import Numerics


class Sublayers(nnx.Module):
    """Norms, experts and hyper-connections, which backbone and draft blocks share."""

    def __init__(
        self, cfg: Config, experts: int, top_k: int, *, numerics: Numerics, rngs: nnx.Rngs
    ):
        self.attn_norm = Norm(cfg.hidden_size, cfg.rms_norm_eps, numerics=numerics)
        self.ffn_norm = Norm(cfg.hidden_size, cfg.rms_norm_eps, numerics=numerics)
        self.ffn = MoE(cfg, experts, top_k, numerics=numerics, rngs=rngs)
        for site in ("attn", "ffn"):
            setattr(self, f"hc_{site}_fn", fp32_param(rngs, cfg.hc_mixes, cfg.hc_width, scale=0.02))
            setattr(self, f"hc_{site}_base", fp32_param(rngs, cfg.hc_mixes))
            setattr(self, f"hc_{site}_scale", fp32_param(rngs, 3, scale=0.5))
        self.hc = (cfg.hc_sinkhorn_iters, cfg.hc_eps, cfg.rms_norm_eps)

    def coefficients(self, ops: Ops, h: Array, site: str) -> tuple[Array, Array, Array]:
        """pre, post and comb of the sublayer ``site`` ("attn" or "ffn") from its incoming streams h
        [B, T, S, D].
        """
        parameters = (
            getattr(self, f"hc_{site}_{name}").get_value() for name in ("fn", "base", "scale")
        )
        iters, eps, norm_eps = self.hc
        return ops.mhc_coefficients(h, *parameters, iters=iters, eps=eps, norm_eps=norm_eps)

    def experts(
        self, ops: Ops, h: Array, pre: Array, image: Array, live: Array
    ) -> tuple[Array, Array]:
        """The expert sublayer: streams h collapsed by the attention's pre; returns streams and the
        pre it hands on.
        """
        pre_next, post, comb = self.coefficients(ops, h, "ffn")
        y = self.ffn(ops, self.ffn_norm(ops.mhc_collapse(h, pre)), image, live)
        return ops.mhc_expand(h, y, post, comb), pre_next


class Block(Sublayers):
    """A backbone block; ``h`` [B, T, S, D] and ``pre`` f32 [B, T, S] come from the block before
    it.
    """

    def __init__(self, cfg: Config, layer: LayerPlan, *, numerics: Numerics, rngs: nnx.Rngs):
        super().__init__(
            cfg, cfg.n_routed_experts, cfg.num_experts_per_tok, numerics=numerics, rngs=rngs
        )
        self.attn = Attention(cfg, layer, numerics=numerics, rngs=rngs)
        if layer.engram:
            self.engram = Engram(cfg, layer.index, numerics=numerics, rngs=rngs)
        self.layer = layer

    def __call__(
        self,
        ops: Ops,
        h: Array,
        pre: Array,
        rows: Rows,
        floor: Array,
        cache: Cache,
        selection: Selection | None,
    ) -> tuple[Array, Array, Cache, Selection | None]:
        """The streams after the block, its pre, the cache and the selection; Engram is added by the
        caller before.
        """
        pre_attn, post, comb = self.coefficients(ops, h, "attn")
        x = self.attn_norm(ops.mhc_collapse(h, pre))
        y, cache, selection = self.attn(ops, x, rows, floor, cache, selection)
        h = ops.mhc_expand(h, y, post, comb)
        h, pre = self.experts(ops, h, pre_attn, rows.image, rows.live)
        return h, pre, cache, selection
