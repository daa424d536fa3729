"""Compressor: latents of the global cache (ARCHITECTURE section 5)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Ring
from dsv41_jax.config import Config
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, Weight
from pallas_kernels.numerics import Numerics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Global entries that close in a chunk: latent [B, G, K] before RoPE, entry int32 [B, G], write
    bool [B, G].
    """

    latent: Array
    entry: Array
    write: Array


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

    def __call__(
        self, ops: Ops, x: Array, rows: Rows, pairs: Ring | None
    ) -> tuple[Groups, Ring | None]:
        """x [B, T, D] is the attention input; ``pairs`` holds the open pairs of ratio 2."""
        if pairs is None:
            latent = self.norm(ops.linear(x, self.wkv()))
            return Groups(
                latent, rows.position, rows.live & (rows.position >= rows.write_from[:, None])
            ), None
        uv = tuple(ops.linear(x, w(), out_dtype=jnp.float32) for w in (self.wkv, self.wgate))
        before, _ = pairs.tail(rows.slot, rows.start, 1)
        before, uv = jax.lax.optimization_barrier((before, uv))
        u, g = (jnp.concatenate(both, axis=1) for both in zip(before, uv, strict=True))
        closing = _closing_rows(rows)
        index = jnp.minimum(closing, rows.tokens.shape[1] - 1)[..., None]

        def pair(values: Array) -> Array:
            # Row t of the chunk is row t + 1 here: the rows before and at the closing one.
            first, second = (jnp.take_along_axis(values, index + i, axis=1) for i in (0, 1))
            return jnp.stack([first, second], axis=-2)

        latent = self.norm(ops.pool_pairs(pair(u), pair(g)).astype(ops.numerics.dtype))
        position = rows.start[:, None] + closing
        write = (closing < rows.length[:, None]) & (position >= rows.write_from[:, None])
        return Groups(latent, position // 2, write), pairs.write(
            uv, rows.slot, rows.position, rows.live
        )


def _closing_rows(rows: Rows) -> Array:
    """Row numbers int32 [B, G] of odd positions, G = ceil(T / 2); the last may lie beyond the
    chunk.
    """
    count = (rows.tokens.shape[1] + 1) // 2
    return (1 - rows.start % 2)[:, None] + 2 * jnp.arange(count, dtype=jnp.int32)
