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

    def first_input(self, ops: Ops, h: Array, pre: Array) -> Array:
        """The attention's input [B, T, D] from streams that no sublayer before it has normed."""
        return self.attn_norm(ops.mhc_collapse(h, pre))

    def experts(
        self, ops: Ops, h: Array, x: Array, image: Array, live: Array, following: Norm | None
    ) -> tuple[Array, Array, Array | None]:
        """The expert sublayer on its normed input x: streams, the pre it hands on and, normed by
        ``following``, the input of the sublayer behind it.
        """
        pre_next, post, comb = self.coefficients(ops, h, "ffn")
        y = self.ffn(ops, x, image, live)
        if following is None:
            return ops.mhc_expand(h, y, post, comb), pre_next, None
        h, x = expand_collapse_norm(ops, h, y, post, comb, pre_next, following)
        return h, pre_next, x


def expand_collapse_norm(
    ops: Ops, h: Array, y: Array, post: Array, comb: Array, pre: Array, norm: Norm
) -> tuple[Array, Array]:
    """The streams behind a sublayer with the output y, and the normed input of the next."""
    return ops.mhc_expand_collapse_norm(
        h, y, post, comb, pre, norm.weight.get_value(), norm_eps=norm.eps
    )


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
        """The block by itself: the streams after it, its pre, the cache and the selection; Engram
        is added by the caller before.
        """
        x = self.first_input(ops, h, pre)
        h, pre, _, cache, selection = self.step(ops, h, x, rows, floor, cache, selection)
        return h, pre, cache, selection

    def step(
        self,
        ops: Ops,
        h: Array,
        x: Array,
        rows: Rows,
        floor: Array,
        cache: Cache,
        selection: Selection | None,
        following: Norm | None = None,
    ) -> tuple[Array, Array, Array | None, Cache, Selection | None]:
        """The block on the normed input x of its attention; with the norm ``following`` of the
        next attention also that one's input, which is third of the results.
        """
        pre, post, comb = self.coefficients(ops, h, "attn")
        y, cache, selection = self.attn(ops, x, rows, floor, cache, selection)
        h, x = expand_collapse_norm(ops, h, y, post, comb, pre, self.ffn_norm)
        h, pre, normed = self.experts(ops, h, x, rows.image, rows.live, following)
        return h, pre, normed, cache, selection
