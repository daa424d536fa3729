"""Attention of the four layer kinds: window, full, reindex, reuse (ARCHITECTURE section 4)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Cache, Pool
from dsv41_jax.compressor import Compressor, Groups
from dsv41_jax.config import Config
from dsv41_jax.indexer import Indexer, Selection
from dsv41_jax.layer_plan import LayerPlan
from dsv41_jax.ops import Ops
from dsv41_jax.rope import Angles, angles
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, Weight, fp32_param
from pallas_kernels.numerics import Numerics
from pallas_kernels.paging import put_entries
from pallas_kernels.quant import Fp8Blocks
from pallas_kernels.quant.storage import StoredRows, row_types
from pallas_kernels.rotate import rotate


class Projections(nnx.Module):
    """Query, window and output projections, which backbone and draft layers share."""

    def __init__(self, cfg: Config, *, numerics: Numerics, rngs: nnx.Rngs):
        def fp8(n: int, k: int) -> Weight:
            return Weight(n, k, encoding=Fp8Blocks, numerics=numerics, rngs=rngs)

        d, eps = cfg.hidden_size, cfg.rms_norm_eps
        self.wq_a = fp8(cfg.q_lora_rank, d)
        self.q_norm = Norm(cfg.q_lora_rank, eps, numerics=numerics)
        self.wq_b = fp8(cfg.attention_width, cfg.q_lora_rank)
        self.wkv = fp8(cfg.head_dim, d)
        self.kv_norm = Norm(cfg.head_dim, eps, numerics=numerics)
        self.attn_sink = fp32_param(rngs, cfg.num_attention_heads)
        self.wo_a = fp8(cfg.o_groups * cfg.o_lora_rank, cfg.o_group_width)
        self.wo_b = fp8(d, cfg.o_groups * cfg.o_lora_rank)
        self.head_dim, self.o_lora_rank, self.window_size = (
            cfg.head_dim,
            cfg.o_lora_rank,
            cfg.sliding_window,
        )

    def queries(self, ops: Ops, x: Array) -> tuple[Array, Array]:
        """Normed low-rank queries [B, T, Q] and per-head queries [B, T, H, K] before RoPE, without
        a head norm; H counts the heads of ``wq_b`` as it is here, part of a layout's or all.
        """
        qr = self.q_norm(ops.linear(x, self.wq_a()))
        q = ops.linear(qr, self.wq_b())
        return qr, q.reshape(*q.shape[:-1], -1, self.head_dim)

    def window_rows(self, ops: Ops, x: Array, at: Angles) -> StoredRows:
        """Window rows [B, T] of x at the angles ``at``, as the cache stores them."""
        k = rotate(self.kv_norm(ops.linear(x, self.wkv())), at.cos, at.sin)
        return row_types(ops.numerics).window.encode(k)

    def output(self, ops: Ops, o: Array) -> Array:
        wo_a = self.wo_a()
        groups = wo_a.shape[0] // self.o_lora_rank
        return ops.output_projection(o, wo_a, self.wo_b(), groups=groups)


class Attention(Projections):
    """Attention of one backbone layer."""

    def __init__(self, cfg: Config, layer: LayerPlan, *, numerics: Numerics, rngs: nnx.Rngs):
        super().__init__(cfg, numerics=numerics, rngs=rngs)
        if layer.owns_kv:
            self.compressor = Compressor(cfg, layer.ratio, numerics=numerics, rngs=rngs)
        if layer.selects:
            self.indexer = Indexer(cfg, layer, numerics=numerics, rngs=rngs)
        self.cfg, self.layer = cfg, layer

    def __call__(
        self,
        ops: Ops,
        x: Array,
        rows: Rows,
        floor: Array,
        cache: Cache,
        selection: Selection | None,
    ) -> tuple[Array, Cache, Selection | None]:
        """x [B, T, D] normed -> y [B, T, D], the cache with this layer's rows, the selection for
        the layers after it.
        """
        at = angles(self.cfg, self.layer.ratio, rows.position)
        qr, q = self.queries(ops, x)
        window, written, cache = self._window(ops, x, at, rows, cache)
        if self.layer.owns_kv:
            cache = self._store_global(ops, x, rows, cache)
        latents, entries = None, None
        if self.layer.kv_source is not None:
            pool = cache.pools[self.layer.kv_source]
            if self.layer.selects:
                visible = (rows.position + 1) // self.layer.ratio
                candidates = None if selection is None else selection.candidates
                scores = self.indexer.scores(
                    ops, x, qr, at, pool.keys, rows.page_table, visible, candidates
                )
                selection = self.indexer.select(ops, scores, visible, candidates)
            assert selection is not None
            latents, entries = pool.latents, selection.entries
        o = ops.sparse_attention(
            q,
            at.cos,
            at.sin,
            window,
            written,
            rows.position,
            floor,
            latents,
            rows.page_table,
            entries,
            self.attn_sink.get_value(),
            window_size=self.window_size,
        )
        return self.output(ops, o), cache, selection

    def _window(
        self, ops: Ops, x: Array, at: Angles, rows: Rows, cache: Cache
    ) -> tuple[StoredRows, Array, Cache]:
        """The window rows this chunk sees, [B, W-1+T], which of them exist, and the cache with the
        chunk's own.
        """
        ring = cache.windows[self.layer.index]
        new = self.window_rows(ops, x, at)
        before, exists = ring.tail(rows.slot, rows.start, self.window_size - 1)
        # The ring is read before it is written, or XLA copies it.
        before, exists, new, position = jax.lax.optimization_barrier(
            (before, exists, new, rows.position)
        )
        window = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), before, new)
        written = jnp.concatenate([exists, rows.live], axis=1)
        windows = list(cache.windows)
        windows[self.layer.index] = ring.write(new, rows.slot, position, rows.live)
        return window, written, replace(cache, windows=tuple(windows))

    def _store_global(self, ops: Ops, x: Array, rows: Rows, cache: Cache) -> Cache:
        owner = self.layer.index
        groups, pairs = self.compressor(ops, x, rows, cache.pairs.get(owner))
        if pairs is not None:
            cache = replace(cache, pairs={**cache.pairs, owner: pairs})
        pool = self._with_entries(ops, groups, rows.page_table, cache.pools[owner])
        return replace(cache, pools={**cache.pools, owner: pool})

    def _with_entries(self, ops: Ops, groups: Groups, page_table: Array, pool: Pool) -> Pool:
        at = angles(self.cfg, self.layer.ratio, groups.entry * self.layer.ratio)
        types = row_types(ops.numerics)
        keys = types.key.encode(self.indexer.keys(ops, groups.latent, at))
        latents = types.latent.encode(rotate(groups.latent, at.cos, at.sin))
        return Pool(
            put_entries(pool.latents, page_table, groups.entry, latents, groups.write),
            put_entries(pool.keys, page_table, groups.entry, keys, groups.write),
        )
