"""Indexer: keys, queries and the selection of global entries (ARCHITECTURE section 6)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.layer_plan import LayerPlan
from dsv41_jax.ops import Ops
from dsv41_jax.rope import Angles
from dsv41_jax.weights import Norm, Weight
from pallas_kernels.compress.store import Keys
from pallas_kernels.numerics import Numerics
from pallas_kernels.paging import entries_per_page
from pallas_kernels.quant import Fp8Blocks
from pallas_kernels.quant.storage import StoredRows, row_types
from pallas_kernels.rotate import rotate

SCORE_BYTES = 256 << 20  # of the scores that prefill holds at a time
FEW_ROWS = 8  # of a request: decode and verification score them at once


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
        # With fewer visible candidates than places, places would go to entries outside them.
        enough = (self.blocks - 1) * self.block_size + 1 >= self.top_k
        self.compact = layer.restricted and enough

    def key_job(self, ops: Ops, latent: Array, at: Angles, pool: StoredRows, places: int) -> Keys:
        """Projections of latents [B, G, K] before RoPE, to norm, rotate at the angles ``at`` of the
        groups' positions and store; ``places``: tokens of the chunk.
        """
        weight, ratio = self.k_norm.weight.get_value(), self.layer.ratio
        return Keys(ops.linear(latent, self.wk()), weight, at.cos, at.sin, pool, places, ratio)

    def select(
        self,
        ops: Ops,
        x: Array,
        q: Array,
        at: Angles,
        keys: StoredRows,
        page_table: Array,
        visible: Array,
        candidates: Array | None,
    ) -> Selection:
        """The best entries of each row by products q of the low-rank queries with ``wq_b``, of a
        restricted layer among its candidates; the candidate source also picks the blocks for the
        layers after it.
        """
        q, weights = self.rounded(ops, q, at), self.head_weights(ops, x)
        pick = partial(self._pick, ops, keys, page_table)
        among = candidates if self.layer.restricted else None
        entries = page_table.shape[1] * entries_per_page(keys)
        if self.compact:
            entries = self.blocks * self.block_size
        count = row_tiles(visible.shape, 4 * entries)
        picked, blocks = by_row_tiles(pick, (q, weights, visible, among), count)
        return Selection(picked, blocks if self.layer.candidate_source else candidates)

    def _pick(
        self,
        ops: Ops,
        keys: StoredRows,
        page_table: Array,
        q: Array,
        weights: Array,
        visible: Array,
        among: Array | None,
    ) -> tuple[Array, Array | None]:
        """Entries int32 [B, T, k] and the candidate source's blocks."""
        size = self.block_size
        if self.compact:
            assert among is not None
            scores = ops.candidate_scores(
                q, weights, keys, page_table, visible, among, block_size=size
            )
            return pick_among(ops, scores, visible, among, k=self.top_k), None
        scores = ops.index_scores(q, weights, keys, page_table, visible, among, block_size=size)
        blocks = None
        if self.layer.candidate_source:
            blocks = ops.top_blocks(scores, visible, block_size=size, k=self.blocks)
        return ops.index_topk(scores, visible, k=self.top_k), blocks

    def queries(self, ops: Ops, x: Array, qr: Array, at: Angles) -> tuple[Array, Array]:
        """Rotated, FP4-rounded queries [B, T, H, Ki] and head weights [B, T, H]."""
        return self.rounded(ops, ops.linear(qr, self.wq_b()), at), self.head_weights(ops, x)

    def rounded(self, ops: Ops, q: Array, at: Angles) -> Array:
        """Products q [B, T, H * Ki] as rotated, FP4-rounded queries [B, T, H, Ki]."""
        q = q.reshape(*q.shape[:-1], self.heads, self.width)
        q = rotate(q, at.cos[..., None, :], at.sin[..., None, :])
        encoding = row_types(ops.numerics).query
        return encoding.rounded(q).astype(ops.numerics.dtype) if encoding else q

    def head_weights(self, ops: Ops, x: Array) -> Array:
        """[B, T, H] of the attention input x."""
        scale, weight = (self.heads * self.width) ** -0.5, self.weights_proj()
        if math.frexp(scale)[0] == 0.5:
            # A power of two: the weights times it give the same bits, in the product's own launch.
            return ops.linear(x, weight * jnp.asarray(scale, weight.dtype))
        return ops.linear(x, weight) * jnp.asarray(scale, ops.numerics.dtype)


def pick_among(ops: Ops, scores: Array, visible: Array, candidates: Array, *, k: int) -> Array:
    """Entries int32 [B, T, k] from scores [B, T, C * size] of candidate blocks int32 [B, T, C],
    ascending with -1 last.

    Of ascending blocks only the last that exists can hold entries nobody sees: those visible come
    first, in the order of their positions.
    """
    size = scores.shape[-1] // candidates.shape[-1]
    seen = jnp.clip(visible[..., None] - size * candidates, 0, size)
    count = jnp.sum(jnp.where(candidates < 0, 0, seen), axis=-1, dtype=jnp.int32)
    picks = ops.index_topk(scores, count, k=k)
    blocks = jnp.take_along_axis(candidates, jnp.maximum(picks, 0) // size, axis=-1)
    return jnp.where(picks < 0, -1, size * blocks + picks % size)


def row_tiles(shape: tuple[int, int], row_bytes: int) -> int:
    """Tiles of the rows [B, T] so that one holds ``SCORE_BYTES``, or a row of each request."""
    requests, rows = shape
    if rows <= FEW_ROWS:
        return 1
    most = max(1, SCORE_BYTES // (requests * row_bytes))
    return -(-rows // most)


def by_row_tiles(function: Callable, rows: Any, count: int) -> Any:
    """``function(*rows)`` of trees of arrays [B, T, ...], ``count`` tiles of T in turn."""
    if count == 1:
        return function(*rows)
    total = jax.tree.leaves(rows)[0].shape[1]
    size = -(-total // count)
    rows = jax.tree.map(lambda a: _padded(a, size * count - total), rows)

    def tile(at: Array) -> Any:
        part = partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=size, axis=1)
        return function(*jax.tree.map(part, rows))

    tiles = jax.lax.map(tile, size * jnp.arange(count))

    def joined(a: Array) -> Array:
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], size * count, *a.shape[3:])[:, :total]

    return jax.tree.map(joined, tiles)


def _padded(a: Array, rows: int) -> Array:
    return jnp.pad(a, [(0, 0), (0, rows), *[(0, 0)] * (a.ndim - 2)]) if rows else a
