"""The caches as plain pytrees, passed in and returned (DESIGN, State; ARCHITECTURE 4.7, 4.8 and
section 10).

Global rows live in pages that prefixes share; everything else is private to a slot. A slot may be
reused without being cleared: every row is tagged by its position, and a request writes each
position before it reads it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.config import Config
from dsv41_jax.layer_plan import layer_plan
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant.storage import StoredRows, row_types

OPEN_PAIRS = 8


@dataclass(frozen=True)
class CacheShape:
    """slots: requests with private state. pages: pages of each pool. page_size: tokens a page,
    even.
    """

    slots: int
    pages: int
    page_size: int = 64

    def __post_init__(self) -> None:
        if self.page_size < 2 or self.page_size % 2:
            raise ValueError(f"page_size={self.page_size} must be even and at least 2")
        if self.slots < 1 or self.pages < 1:
            raise ValueError(f"slots={self.slots} and pages={self.pages} must be at least 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """Rows [slots, size, ...] at position % size, with their positions (-1: never written)."""

    rows: Any
    tags: Array

    def tail(self, slot: Array, start: Array, count: int) -> tuple[Any, Array]:
        """Rows of positions start-count .. start-1 of each slot, [B, count, ...], and which of them
        exist.
        """
        return self.at(slot, start[:, None] + jnp.arange(-count, 0, dtype=jnp.int32))

    def at(self, slot: Array, position: Array) -> tuple[Any, Array]:
        """Rows of positions int32 [B, n] of each slot, and which of them exist."""
        index = slot[:, None], position % self.tags.shape[1]
        exists = (self.tags[index] == position) & (position >= 0)
        return jax.tree.map(lambda plane: plane[index], self.rows), exists

    def write(self, rows: Any, slot: Array, position: Array, live: Array) -> "Ring":
        """Store live rows [B, T, ...]; of a chunk longer than the ring only the last ``size``
        rows.
        """
        slots, size = self.tags.shape
        end = jnp.max(jnp.where(live, position + 1, 0), axis=1, keepdims=True)
        keep = live & (position >= end - size)
        index = jnp.where(keep, slot[:, None], slots), position % size
        planes = jax.tree.map(
            lambda plane, new: plane.at[index].set(new, mode="drop"), self.rows, rows
        )
        return Ring(planes, self.tags.at[index].set(position, mode="drop"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pool:
    """Global rows of one KV owner: latents and index keys [pages, page_size / ratio, ...]."""

    latents: StoredRows
    keys: StoredRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Handoff:
    """What the layers after the last KV source need of a row: h [..., S, D], pre f32 [..., S],
    selected [..., k], candidates [..., C].
    """

    h: Array
    pre: Array
    selected: Array
    candidates: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """pools and pairs by owner layer, windows by layer, drafts by DSpark stage.

    pairs: (u, g) float32 of ratio-2 owners. history int32 [slots, n-1]: last token ids, -1 for
    none. last_token int32 [slots]: the newest token, not yet fed. carry: hand-off of the last
    ``sliding_window`` prompt rows. counts int32 [slots, V], if penalties are wanted: how often each
    id occurred (see ``serving.logit_rules``). position int32 [slots], if tokens are drafted: where
    ``last_token`` will be fed. All but the pools belongs to one request a slot.
    """

    pools: dict[int, Pool]
    windows: tuple[Ring, ...]
    pairs: dict[int, Ring]
    drafts: tuple[Ring, ...]
    history: Array
    last_token: Array
    carry: Ring
    counts: Array | None = None
    position: Array | None = None

    @property
    def pool_bytes(self) -> int:
        return sum(pool.latents.nbytes + pool.keys.nbytes for pool in self.pools.values())


def kv_bytes_per_token(cache: Cache, shape: CacheShape) -> float:
    """Bytes of global cache per token of capacity, from the sizes of the arrays themselves."""
    return cache.pool_bytes / (shape.pages * shape.page_size)


def window_ring_size(cfg: Config) -> int:
    """Twice the window, so that rejected drafts cannot overwrite rows that are still visible."""
    return max(
        2 * cfg.sliding_window, 1 << (cfg.sliding_window + cfg.dspark_block_size).bit_length()
    )


def new_cache(
    cfg: Config,
    numerics: Numerics,
    shape: CacheShape,
    *,
    drafts: bool = False,
    counts: bool = False,
) -> Cache:
    """An empty cache; the extent of every array follows from ``shape`` alone."""
    types = row_types(numerics)
    owners = [layer for layer in layer_plan(cfg) if layer.owns_kv]

    def window() -> Ring:
        size = window_ring_size(cfg)
        return Ring(
            types.window.zeros((shape.slots, size), cfg.head_dim), _no_tags(shape.slots, size)
        )

    def pool(ratio: int) -> Pool:
        lead = (shape.pages, shape.page_size // ratio)
        return Pool(
            types.latent.zeros(lead, cfg.head_dim), types.key.zeros(lead, cfg.index_head_dim)
        )

    def pairs() -> Ring:
        u, g = (jnp.zeros((shape.slots, OPEN_PAIRS, cfg.head_dim), jnp.float32) for _ in range(2))
        return Ring((u, g), _no_tags(shape.slots, OPEN_PAIRS))

    return Cache(
        pools={layer.index: pool(layer.ratio) for layer in owners},
        windows=tuple(window() for _ in range(cfg.num_hidden_layers)),
        pairs={layer.index: pairs() for layer in owners if layer.ratio == 2},
        drafts=tuple(window() for _ in range(cfg.num_nextn_predict_layers if drafts else 0)),
        history=jnp.full((shape.slots, cfg.engram_max_ngram_size - 1), -1, jnp.int32),
        last_token=jnp.zeros(shape.slots, jnp.int32),
        carry=_carry(cfg, numerics, shape.slots),
        counts=jnp.zeros((shape.slots, cfg.vocab_size), jnp.int32) if counts else None,
        position=jnp.zeros(shape.slots, jnp.int32) if drafts else None,
    )


def _carry(cfg: Config, numerics: Numerics, slots: int) -> Ring:
    lead = (slots, cfg.sliding_window)
    rows = Handoff(
        h=jnp.zeros((*lead, cfg.hc_mult, cfg.hidden_size), numerics.dtype),
        pre=jnp.zeros((*lead, cfg.hc_mult), jnp.float32),
        selected=jnp.full((*lead, cfg.index_topk), -1, jnp.int32),
        candidates=jnp.full((*lead, cfg.candidate_topk_blocks), -1, jnp.int32),
    )
    return Ring(rows, _no_tags(*lead))


def _no_tags(slots: int, size: int) -> Array:
    return jnp.full((slots, size), -1, jnp.int32)
