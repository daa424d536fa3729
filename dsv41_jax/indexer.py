"""Indexer: keys, queries and the selection of global entries (ARCHITECTURE section 6)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.layer_plan import LayerPlan
from dsv41_jax.ops import Ops
from dsv41_jax.rope import Angles
from dsv41_jax.weights import Norm, Weight
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp4Rows, Fp8Blocks
from pallas_kernels.quant.storage import StoredRows
from pallas_kernels.rotate import rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """What a row's layers attend to: entries int32 [B, T, k] and candidate blocks int32 [B, T, C],
    -1 = none.
    """

    entries: Array
    candidates: Array | None


class Indexer(nnx.Module):
    """Every index source has queries; the KV owners also make the keys."""

    def __init__(self, cfg: Config, layer: LayerPlan, *, numerics: Numerics, rngs: nnx.Rngs):
        heads, width = cfg.index_n_heads, cfg.index_head_dim
        self.wq_b = Weight(
            heads * width, cfg.q_lora_rank, encoding=Fp8Blocks, numerics=numerics, rngs=rngs
        )
        self.weights_proj = Weight(
            heads, cfg.hidden_size, encoding=None, numerics=numerics, rngs=rngs
        )
        if layer.owns_kv:
            self.wk = Weight(width, cfg.head_dim, encoding=None, numerics=numerics, rngs=rngs)
            self.k_norm = Norm(width, cfg.rms_norm_eps, numerics=numerics)
        self.heads, self.width, self.layer = heads, width, layer
        self.top_k, self.blocks, self.block_size = (
            cfg.index_topk,
            cfg.candidate_topk_blocks,
            cfg.candidate_block_size,
        )

    def keys(self, ops: Ops, latent: Array, at: Angles) -> Array:
        """Index keys [B, G, Ki] of latents before RoPE; ``at`` holds the angles of the groups'
        positions.
        """
        return rotate(self.k_norm(ops.linear(latent, self.wk())), at.cos, at.sin)

    def scores(
        self,
        ops: Ops,
        x: Array,
        qr: Array,
        at: Angles,
        keys: StoredRows,
        page_table: Array,
        visible: Array,
        candidates: Array | None,
    ) -> Array:
        """Scores f32 [B, T, N] of every entry; a restricted layer scores the candidates alone."""
        q, weights = self.queries(ops, x, qr, at)
        among = candidates if self.layer.restricted else None
        return ops.index_scores(
            q, weights, keys, page_table, visible, among, block_size=self.block_size
        )

    def select(
        self, ops: Ops, scores: Array, visible: Array, candidates: Array | None
    ) -> Selection:
        """The best entries of each row; the candidate source also picks the blocks for the layers
        after it.
        """
        entries = ops.index_topk(scores, visible, k=self.top_k)
        if self.layer.candidate_source:
            candidates = ops.top_blocks(scores, visible, block_size=self.block_size, k=self.blocks)
        return Selection(entries, candidates)

    def queries(self, ops: Ops, x: Array, qr: Array, at: Angles) -> tuple[Array, Array]:
        """Rotated, FP4-rounded queries [B, T, H, Ki] and head weights [B, T, H]."""
        q = ops.linear(qr, self.wq_b()).reshape(*qr.shape[:-1], self.heads, self.width)
        q = rotate(q, at.cos[..., None, :], at.sin[..., None, :])
        if ops.numerics.round_cache:
            q = Fp4Rows.quantize(q).dequantize(ops.numerics.dtype)
        scale = jnp.asarray((self.heads * self.width) ** -0.5, ops.numerics.dtype)
        return q, ops.linear(x, self.weights_proj()) * scale
