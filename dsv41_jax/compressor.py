"""Compressor: latents of the global cache (ARCHITECTURE section 5)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Ring
from dsv41_jax.config import Config
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, Weight
from pallas_kernels.compress.ref import closing_rows
from pallas_kernels.compress.store import Pairs, Projected
from pallas_kernels.numerics import Numerics


class Compressor(nnx.Module):
    """Ratio 2 pools disjoint pairs of tokens in float32; ratio 1 projects every token."""

    def __init__(self, cfg: Config, ratio: int, *, numerics: Numerics, rngs: nnx.Rngs):
        def weight() -> Weight:
            return Weight(
                cfg.head_dim, cfg.hidden_size, encoding=None, numerics=numerics, rngs=rngs
            )

        self.wkv = weight()
        if ratio == 2:
            self.wgate = weight()
        self.norm = Norm(cfg.head_dim, cfg.rms_norm_eps, numerics=numerics)
        self.ratio = ratio

    def source(
        self, ops: Ops, x: Array, rows: Rows, pairs: Ring | None
    ) -> tuple[Pairs | Projected, Ring | None]:
        """What the latents are made of, from the attention input x [B, T, D]; ``pairs`` holds the
        open pairs of ratio 2.
        """
        if pairs is None:
            return Projected(ops.linear(x, self.wkv())), None
        both = ops.linears(x, (self.wkv(), self.wgate()), out_dtype=jnp.float32)
        before, _ = pairs.tail(rows.slot, rows.start, 1)
        before, (u, g) = jax.lax.optimization_barrier((before, both))
        before_u, before_g = (row[:, 0] for row in before)
        after = pairs.write((u, g), rows.slot, rows.position, rows.live)
        return Pairs(u, g, before_u, before_g), after

    def entries(self, rows: Rows) -> Array:
        """Entry numbers int32 [B, G] of the groups that close in the chunk, G = ceil(T / ratio),
        the last perhaps beyond it.
        """
        closing = closing_rows(rows.start, rows.tokens.shape[1], self.ratio)
        return (rows.start[:, None] + closing) // self.ratio
