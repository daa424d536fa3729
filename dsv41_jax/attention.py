"""Attention of the four layer kinds: window, full, reindex, reuse (ARCHITECTURE section 4)."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Cache, Ring
from dsv41_jax.compressor import Compressor
from dsv41_jax.config import Config
from dsv41_jax.indexer import Indexer, Selection
from dsv41_jax.layer_plan import LayerPlan
from dsv41_jax.ops import Ops
from dsv41_jax.rope import Angles, angles
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, Weight, fp8_codes, fp32_param
from pallas_kernels.addends import Addends
from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Window
from pallas_kernels.numerics import Numerics
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
        return qr, self.by_head(ops.linear(qr, self.wq_b()))

    def inputs(self, ops: Ops, x: Array) -> tuple[Array, Array]:
        """Low-rank queries [B, T, Q] before their norm, and window projections [B, T, K]."""
        return ops.linears(x, (self.wq_a(), self.wkv()))

    def heads(self, ops: Ops, low: Array, *others: Weight) -> tuple[Array, ...]:
        """Per-head queries as ``queries`` gives them, of low-rank ones before their norm, and what
        other weights make of those behind it.
        """
        weights = (self.wq_b(), *(weight() for weight in others))
        norm = self.q_norm
        q, *more = ops.normed_linears(low, norm.weight.get_value(), weights, eps=norm.eps)
        return self.by_head(q), *more

    def by_head(self, q: Array) -> Array:
        """Products [B, T, H * K] as [B, T, H, K]."""
        return q.reshape(*q.shape[:-1], -1, self.head_dim)

    def window_job(self, k: Array, at: Angles, slot: Array, ring: Ring, *, emit: bool) -> Window:
        """Projections k [B, T, K] to norm, rotate and store in the rings of ``slot``."""
        weight = self.kv_norm.weight.get_value()
        return Window(k, weight, at.cos, at.sin, ring.rows, ring.tags, slot, emit)

    def window_rows(self, ops: Ops, x: Array, at: Angles) -> StoredRows:
        """Window rows [B, T] of x at the angles ``at``, as the cache stores them."""
        return self.stored(ops, ops.linear(x, self.wkv()), at)

    def stored(self, ops: Ops, k: Array, at: Angles) -> StoredRows:
        """``window_rows`` of window projections k [B, T, K]."""
        k = rotate(self.kv_norm(k), at.cos, at.sin)
        return row_types(ops.numerics).window.encode(k)

    def output(self, ops: Ops, o: Array) -> Array | Addends:
        """Of the heads' outputs o [B, T, H, K], for the mhc operations: [B, T, D]."""
        wo_a = self.wo_a()
        groups = wo_a.shape[0] // self.o_lora_rank
        return ops.output_projection(o, wo_a, self.wo_b(), groups=groups)


@dataclass(frozen=True)
class _Stores:
    """The arguments of ``store_rows``."""

    chunk: Chunk
    window: Window
    paged: Paged | None
    keys: Keys | None


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
    ) -> tuple[Array | Addends, Cache, Selection | None]:
        """x [B, T, D] normed -> y [B, T, D], the cache with this layer's rows, the selection for
        the layers after it.
        """
        at = angles(self.cfg, self.layer.ratio, rows.position)
        low, k = self.inputs(ops, x)
        stores, before, cache = self._stores(ops, x, k, at, rows, cache)
        q, index_q, stored = self._heads_and_stores(ops, low, stores)
        window, cache = self._stored(stored, before, rows, cache)
        latents, entries = None, None
        if self.layer.kv_source is not None:
            pool = cache.pools[self.layer.kv_source]
            if self.layer.selects:
                visible = (rows.position + 1) // self.layer.ratio
                candidates = None if selection is None else selection.candidates
                selection = self.indexer.select(
                    ops, x, index_q, at, pool.keys, rows.page_table, visible, candidates
                )
            assert selection is not None
            latents, entries = pool.latents, selection.entries
        attend = ops.sparse_attention
        if not self._long(rows, cache):
            attend = partial(ops.ring_attention, ahead=fp8_codes(self.wo_a, self.wo_b))
        o = attend(
            q,
            at.cos,
            at.sin,
            *window,
            rows.position,
            floor,
            latents,
            rows.page_table,
            entries,
            self.attn_sink.get_value(),
            window_size=self.window_size,
        )
        return self.output(ops, o), cache, selection

    def _long(self, rows: Rows, cache: Cache) -> bool:
        """Whether the chunk's rows overwrite rows of the ring that some of them see."""
        size = cache.windows[self.layer.index].tags.shape[1]
        return size < self.window_size - 1 + rows.tokens.shape[1]

    def _stores(
        self, ops: Ops, x: Array, k: Array, at: Angles, rows: Rows, cache: Cache
    ) -> tuple[_Stores, tuple | None, Cache]:
        """What is to be stored of the chunk, the window before it if its rows overwrite that, and
        the cache with its latents.
        """
        index, long = self.layer.index, self._long(rows, cache)
        ring, chunk = cache.windows[index], Chunk(rows.start, rows.length)
        before, paged, keys = None, None, None
        if long:
            # The ring is read before it is written, or XLA copies it.
            before = ring.tail(rows.slot, rows.start, self.window_size - 1)
            before, k, chunk = jax.lax.optimization_barrier((before, k, chunk))
        if self.layer.owns_kv:
            paged = Paged(rows.page_table, rows.write_from)
            keys, cache = self._store_latents(ops, x, rows, paged, cache)
        job = self.window_job(k, at, rows.slot, ring, emit=long)
        return _Stores(chunk, job, paged, keys), before, cache

    def _heads_and_stores(
        self, ops: Ops, low: Array, stores: _Stores
    ) -> tuple[Array, Array | None, tuple]:
        """Per-head queries, products for the index, if this layer selects, and what is stored."""
        indexers = (self.indexer.wq_b,) if self.layer.selects else ()
        jobs = {"window": stores.window, "paged": stores.paged, "keys": stores.keys}
        if ops.linears_beside_rows is None:
            q, *index_q = self.heads(ops, low, *indexers)
            stored = ops.store_rows(stores.chunk, **jobs, eps=self.kv_norm.eps)
        else:
            weights = (self.wq_b(), *(weight() for weight in indexers))
            norm, row_eps = self.q_norm, self.kv_norm.eps
            (q, *index_q), stored = ops.linears_beside_rows(
                low, norm.weight.get_value(), weights, stores.chunk, **jobs,
                eps=norm.eps, row_eps=row_eps,
            )  # fmt: skip
            q = self.by_head(q)
        return q, index_q[0] if index_q else None, stored

    def _stored(
        self, stored: tuple, before: tuple | None, rows: Rows, cache: Cache
    ) -> tuple[tuple, Cache]:
        """The window as the chunk's attention takes it, and the cache with the chunk's rows."""
        index, (new, planes, tags, pool) = self.layer.index, stored
        if pool is not None:
            cache = replace(
                cache, pools={**cache.pools, index: replace(cache.pools[index], keys=pool)}
            )
        windows = list(cache.windows)
        windows[index] = Ring(planes, tags)
        cache = replace(cache, windows=tuple(windows))
        if before is None:
            return (planes, tags, rows.slot), cache
        earlier, exists = before
        window = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), earlier, new)
        return (window, jnp.concatenate([exists, rows.live], axis=1)), cache

    def _store_latents(
        self, ops: Ops, x: Array, rows: Rows, paged: Paged, cache: Cache
    ) -> tuple[Keys, Cache]:
        """The index keys to store beside the latents, and the cache with these."""
        owner, ratio, places = self.layer.index, self.layer.ratio, rows.tokens.shape[1]
        source, pairs = self.compressor.source(ops, x, rows, cache.pairs.get(owner))
        if pairs is not None:
            cache = replace(cache, pairs={**cache.pairs, owner: pairs})
        at = angles(self.cfg, ratio, self.compressor.entries(rows) * ratio)
        pool, norm = cache.pools[owner], self.compressor.norm
        job = Latents(source, norm.weight.get_value(), at.cos, at.sin, pool.latents)
        latent, latents = ops.store_latents(
            Chunk(rows.start, rows.length), paged, job, eps=norm.eps
        )
        cache = replace(cache, pools={**cache.pools, owner: replace(pool, latents=latents)})
        return self.indexer.key_job(ops, latent, at, pool.keys, places), cache
