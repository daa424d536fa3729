"""One backbone block: Engram, attention and experts around the residual streams (ARCHITECTURE
section 7).
"""

from dataclasses import dataclass

import jax
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
from pallas_kernels.addends import Addends
from pallas_kernels.numerics import Numerics

Mixed = tuple[Array, Array, Array]  # pre, post and comb


@dataclass(frozen=True)
class Site:
    """How a sublayer begins: its norm, and the parameters of its mixing coefficients with
    iterations, eps and their norm's eps.
    """

    norm: Norm
    parameters: tuple[Array, Array, Array]
    constants: tuple[int, float, float]

    def coefficients(self, ops: Ops, h: Array) -> Mixed:
        """Of the streams h [B, T, S, D] that the sublayer takes."""
        iters, eps, norm_eps = self.constants
        return ops.mhc_coefficients(h, *self.parameters, iters=iters, eps=eps, norm_eps=norm_eps)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entry:
    """What a sublayer begins with: its normed input x [B, T, D] and its mixing coefficients."""

    x: Array
    mixed: Mixed


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

    def site(self, name: str) -> Site:
        """That of the sublayer ``name`` ("attn" or "ffn")."""
        fn, base, scale = (
            getattr(self, f"hc_{name}_{part}").get_value() for part in ("fn", "base", "scale")
        )
        return Site(getattr(self, f"{name}_norm"), (fn, base, scale), self.hc)

    def coefficients(self, ops: Ops, h: Array, site: str) -> Mixed:
        """pre, post and comb of the sublayer ``site`` from its incoming streams h [B, T, S, D]."""
        return self.site(site).coefficients(ops, h)

    def first_input(self, ops: Ops, h: Array, pre: Array) -> Array:
        """The attention's input [B, T, D] from streams that no sublayer before it has normed."""
        return self.attn_norm(ops.mhc_collapse(h, pre))

    def entry(self, ops: Ops, h: Array, pre: Array) -> Entry:
        """``first_input`` with the coefficients of the attention."""
        site = self.site("attn")
        if ops.mhc_site is None:
            return Entry(self.first_input(ops, h, pre), site.coefficients(ops, h))
        return passed(ops, h, None, None, None, pre, site)[1]

    def experts(
        self,
        ops: Ops,
        h: Array,
        x: Array | Entry,
        image: Array,
        live: Array,
        following: Norm | Site | None,
    ) -> tuple[Array, Array, Array | Entry | None]:
        """The expert sublayer on its normed input x: streams, the pre it hands on and what the
        sublayer behind it begins with: x normed by ``following``, with coefficients if that is its
        site.
        """
        x, mixed = entered(self.site("ffn"), ops, h, x)
        pre, post, comb = mixed
        y = self.ffn(ops, x, image, live)
        if following is None:
            return ops.mhc_expand(h, y, post, comb), pre, None
        if isinstance(following, Site):
            h, entry = between(ops, h, y, mixed, following)
            return h, pre, entry
        h, x = expand_collapse_norm(ops, h, y, post, comb, pre, following)
        return h, pre, x


def entered(site: Site, ops: Ops, h: Array, x: Array | Entry) -> tuple[Array, Mixed]:
    """The normed input and the coefficients of a sublayer, as far as they are not there yet."""
    if isinstance(x, Entry):
        return x.x, x.mixed
    return x, site.coefficients(ops, h)


def between(
    ops: Ops, h: Array, y: Array | Addends, mixed: Mixed, site: Site
) -> tuple[Array, Entry]:
    """The streams behind a sublayer with the output y, and what the one at ``site`` begins with."""
    pre, post, comb = mixed
    # A sum that ranks have still to take is another operation's.
    if ops.mhc_site is None or not isinstance(y, Array | Addends):
        h, x = expand_collapse_norm(ops, h, y, post, comb, pre, site.norm)
        return h, Entry(x, site.coefficients(ops, h))
    return passed(ops, h, y, post, comb, pre, site)


def passed(
    ops: Ops,
    h: Array,
    y: Array | Addends | None,
    post: Array | None,
    comb: Array | None,
    pre: Array,
    site: Site,
) -> tuple[Array, Entry]:
    """``mhc_site``'s results."""
    assert ops.mhc_site is not None
    iters, eps, mix_eps = site.constants
    weight, norm_eps = site.norm.weight.get_value(), site.norm.eps
    h, x, mixed = ops.mhc_site(
        h, y, post, comb, pre, weight, *site.parameters,
        norm_eps=norm_eps, iters=iters, eps=eps, mix_eps=mix_eps,
    )  # fmt: skip
    return h, Entry(x, mixed)


def expand_collapse_norm(
    ops: Ops, h: Array, y: Array | Addends, post: Array, comb: Array, pre: Array, norm: Norm
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
        x: Array | Entry,
        rows: Rows,
        floor: Array,
        cache: Cache,
        selection: Selection | None,
        following: Norm | Site | None = None,
    ) -> tuple[Array, Array, Array | Entry | None, Cache, Selection | None]:
        """The block on what its attention begins with; with the norm or site ``following`` of the
        next attention also what that one begins with, which is third of the results.
        """
        x, mixed = entered(self.site("attn"), ops, h, x)
        y, cache, selection = self.attn(ops, x, rows, floor, cache, selection)
        h, entry = between(ops, h, y, mixed, self.site("ffn"))
        h, pre, after = self.experts(ops, h, entry, rows.image, rows.live, following)
        return h, pre, after, cache, selection
