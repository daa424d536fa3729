"""Engram: hashed n-gram rows added to the residual streams (ARCHITECTURE section 9)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.engram_hash import HashConstants
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Weight
from pallas_kernels.engram.hash import BARRIER, compress_ids, ngram_rows
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Blocks, Fp8Rows


class TokenMap(nnx.Variable):
    """Derived from the tokenizer, not stored in a checkpoint: compressed id int32 [V] of every
    token id.
    """


class Engram(nnx.Module):
    """Table and projections of one Engram layer."""

    def __init__(self, cfg: Config, layer_id: int, *, numerics: Numerics, rngs: nnx.Rngs):
        rows = cfg.engram_num_embeddings[cfg.engram_layer_ids.index(layer_id)]
        width = (1 + cfg.hc_mult) * cfg.hidden_size
        dtype = jnp.bfloat16 if numerics.packed_weights else jnp.float32
        self.embed = Weight(
            rows, cfg.engram_head_dim, encoding=Fp8Rows, numerics=numerics, rngs=rngs
        )
        self.wkv = Weight(width, cfg.engram_width, encoding=Fp8Blocks, numerics=numerics, rngs=rngs)
        self.q_weight = nnx.Param(jnp.ones((cfg.hc_mult, cfg.hidden_size), dtype))
        self.k_weight = nnx.Param(jnp.ones((cfg.hc_mult, cfg.hidden_size), dtype))
        self.wkv_outputs = width
        self.constants, self.eps = HashConstants.of(cfg, layer_id), cfg.rms_norm_eps

    def row_ids(self, compressed: Array, pad: Array) -> Array:
        """Table rows int32 [B, T, C] of compressed ids int32 [B, n-1+T]."""
        return ngram_rows(compressed, pad, *self.constants.device_arrays())

    def keys_and_value(self, ops: Ops, row_ids: Array) -> Array:
        """Keys of every stream, then the value: [B, T, (S+1)*D]."""
        rows = ops.engram_rows(self.embed(), row_ids)
        return ops.gathered_linear(rows, self.wkv(), outputs=self.wkv_outputs)

    def __call__(self, ops: Ops, h: Array, row_ids: Array, live: Array) -> Array:
        """h [B, T, S, D] with the gated value added to every stream; ``live`` is False in image
        spans.
        """
        kv = self.keys_and_value(ops, row_ids)
        return ops.engram_gate_add(h, kv, *self.weights(), live, eps=self.eps)

    def weights(self) -> tuple[Array, Array]:
        """Of queries and keys, [S, D] each."""
        return self.q_weight.get_value(), self.k_weight.get_value()


def compressed_history(token_map: Array, rows: Rows) -> Array:
    """Compressed ids int32 [B, n-1+T] of the tokens before the rows and of the rows; barriers at
    image tokens.
    """
    tokens = jnp.where(rows.image, BARRIER, rows.tokens)
    return compress_ids(token_map, jnp.concatenate([rows.previous, tokens], axis=1))


def next_history(rows: Rows) -> Array:
    """The last n-1 token ids int32 [B, n-1] up to the last live row; image tokens are -1."""
    tokens = jnp.where(rows.image, BARRIER, rows.tokens)
    both = jnp.concatenate([rows.previous, tokens], axis=1)
    index = rows.length[:, None] + jnp.arange(rows.previous.shape[1])
    return jnp.take_along_axis(both, index, axis=1)
