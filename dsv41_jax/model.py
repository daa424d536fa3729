"""The text model: embedding, 40 blocks in two halves, head (ARCHITECTURE sections 3, 7, 11 and
12).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dsv41_jax.block import Block, Entry, Site
from dsv41_jax.cache import Cache, Handoff
from dsv41_jax.config import Config
from dsv41_jax.dspark import Draft, DraftStage, propose
from dsv41_jax.engram import TokenMap, compressed_history, next_history
from dsv41_jax.indexer import Selection
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, Weight
from pallas_kernels.numerics import Numerics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Features:
    """The decoder half's output: streams h [B, T, S, D], pre f32 [B, T, S], what both make the
    head's input, normed [B, T, D]; DSpark taps [B, T, 3 D].
    """

    h: Array
    pre: Array
    normed: Array
    taps: Array


class Model(nnx.Module):
    """DeepSeek-V4.1-Flash. ``encoder`` runs layers up to the last KV source, ``decoder`` the layers
    after it.

    Parameters carry the released tensor names. mtp: the DSpark stages, or None. token_map, int32
    [V], belongs to the tokenizer and is set by the loader.
    """

    def __init__(self, cfg: Config, *, numerics: Numerics, rngs: nnx.Rngs, mtp: bool = True):
        def weight() -> Weight:
            return Weight(
                cfg.vocab_size, cfg.hidden_size, encoding=None, numerics=numerics, rngs=rngs
            )

        self.embed, self.head = weight(), weight()
        self.norm = Norm(cfg.hidden_size, cfg.rms_norm_eps, numerics=numerics)
        plan = layer_plan(cfg)
        self.layers = nnx.List([Block(cfg, layer, numerics=numerics, rngs=rngs) for layer in plan])
        stages = range(cfg.num_nextn_predict_layers) if mtp else ()
        self.mtp = nnx.List([DraftStage(cfg, i, numerics=numerics, rngs=rngs) for i in stages])
        self.token_map = TokenMap(jnp.full(cfg.vocab_size, -1, jnp.int32))
        self.cfg = cfg

    def set_token_map(self, token_map: np.ndarray) -> None:
        """Set the compressed ids of the tokenizer's ids; ids beyond them stay barriers. ValueError
        if they are too many.
        """
        if token_map.shape[0] > self.cfg.vocab_size:
            raise ValueError(f"{token_map.shape=} must not exceed vocab_size={self.cfg.vocab_size}")
        padding = (0, self.cfg.vocab_size - token_map.shape[0])
        self.token_map[...] = jnp.asarray(np.pad(token_map, padding, constant_values=-1), jnp.int32)

    def embedded(self, ops: Ops, tokens: Array) -> tuple[Array, Array]:
        """Streams [B, T, S, D] and pre [B, T, S] in front of the first block, from token ids int32
        [B, T].
        """
        ids = jnp.clip(tokens, 0, self.cfg.vocab_size - 1)
        x = ops.embedding(self.embed(), ids).astype(ops.numerics.dtype)
        h = jnp.broadcast_to(
            x[..., None, :], (*tokens.shape, self.cfg.hc_mult, self.cfg.hidden_size)
        )
        pre = jnp.zeros((*tokens.shape, self.cfg.hc_mult), jnp.float32).at[..., 0].set(1)
        return h, pre

    def encoder(self, ops: Ops, rows: Rows, cache: Cache) -> tuple[Handoff, Cache]:
        """Layers up to the last KV source over the rows; stores the token history of each slot."""
        handoff, _, cache = self._encoded(ops, rows, cache, None)
        return handoff, cache

    def decoder(
        self, ops: Ops, rows: Rows, handoff: Handoff, cache: Cache
    ) -> tuple[Features, Cache]:
        """The layers after the last KV source; also stores the draft stages' window rows."""
        return self._decoded(ops, rows, handoff, cache, None)

    def layers_over(self, ops: Ops, rows: Rows, cache: Cache) -> tuple[Features, Cache]:
        """``encoder``, then ``decoder`` over the same rows, as one run of layers."""
        first = self._decoder_blocks()[0]
        following = None if first.layer.engram else first.site("attn")
        handoff, x, cache = self._encoded(ops, rows, cache, following)
        return self._decoded(ops, rows, handoff, cache, x)

    def _encoded(
        self, ops: Ops, rows: Rows, cache: Cache, after: Site | None
    ) -> tuple[Handoff, Array | Entry | None, Cache]:
        """``encoder``; second what the attention ``after`` it begins with."""
        compressed = compressed_history(self.token_map[...], rows)
        pad = self.token_map[...][self.cfg.engram_pad_token_id]
        h, pre = self.embedded(ops, rows.tokens)
        x, selection, blocks = None, None, self._encoder_blocks()
        for block, following in zip(blocks, _following(blocks, after), strict=True):
            if block.layer.engram:
                h = block.engram(ops, h, block.engram.row_ids(compressed, pad), ~rows.image)
            x = block.entry(ops, h, pre) if x is None else x
            h, pre, x, cache, selection = block.step(
                ops, h, x, rows, rows.floor, cache, selection, following
            )
        assert selection is not None
        slot = jnp.where(rows.length > 0, rows.slot, cache.history.shape[0])
        history = cache.history.at[slot].set(next_history(rows), mode="drop")
        handoff = Handoff(h, pre, selection.entries, selection.candidates)
        return handoff, x, replace(cache, history=history)

    def _decoded(
        self, ops: Ops, rows: Rows, handoff: Handoff, cache: Cache, x: Array | Entry | None
    ) -> tuple[Features, Cache]:
        """``decoder``, on what its first attention begins with if that is there."""
        h, pre = handoff.h, handoff.pre
        selection = Selection(handoff.selected, handoff.candidates)
        floor = jnp.maximum(rows.floor, rows.decoder_floor)
        taps, blocks = [], self._decoder_blocks()
        for block, following in zip(blocks, _following(blocks, self.norm), strict=True):
            if block.layer.index in self.cfg.dspark_target_layer_ids:
                taps.append(jnp.mean(h.astype(jnp.float32), axis=-2).astype(h.dtype))
            x = block.entry(ops, h, pre) if x is None else x
            h, pre, x, cache, selection = block.step(
                ops, h, x, rows, floor, cache, selection, following
            )
        assert isinstance(x, Array)
        features = Features(h, pre, x, jnp.concatenate(taps, axis=-1))
        return features, self._commit_drafts(ops, rows, features, cache)

    def logits(self, ops: Ops, h: Array, pre: Array) -> Array:
        """float32 [..., V] of streams h [..., S, D] after the last block and its pre."""
        return self.scores(ops, self.norm(ops.mhc_collapse(h, pre)))

    def draft(
        self,
        ops: Ops,
        token: Array,
        slot: Array,
        start: Array,
        floor: Array,
        cache: Cache,
        length: int | None = None,
    ) -> Draft:
        """Greedy DSpark block opened by token int32 [B] at position start int32 [B]; the cache is
        only read. length: proposals to keep, default all of the block, which always runs whole.
        """
        noise = jnp.full(
            (token.shape[0], self.cfg.dspark_block_size - 1),
            self.cfg.dspark_noise_token_id,
            jnp.int32,
        )
        h, pre = self.embedded(ops, jnp.concatenate([token[:, None], noise], axis=1))
        x, sites = self.mtp[0].entry(ops, h, pre), [s.site("attn") for s in self.mtp]
        for stage, ring, following in zip(self.mtp, cache.drafts, [*sites[1:], None], strict=True):
            h, pre, x = stage.step(ops, h, x, slot, start, floor, ring, following)
        x = ops.mhc_collapse(h, pre)[:, :length]
        last = self.mtp[-1]
        return propose(ops, last, x, self.scores(ops, last.norm(x)), token)

    def scores(self, ops: Ops, x: Array) -> Array:
        """float32 [..., V] of normed rows x [..., D]."""
        return ops.gathered_linear(
            x, self.head(), outputs=self.cfg.vocab_size, out_dtype=jnp.float32
        )

    def _encoder_blocks(self) -> list[Block]:
        return list(self.layers)[: self.cfg.last_kv_source + 1]

    def _decoder_blocks(self) -> list[Block]:
        return list(self.layers)[self.cfg.last_kv_source + 1 :]

    def _commit_drafts(self, ops: Ops, rows: Rows, features: Features, cache: Cache) -> Cache:
        if not cache.drafts:
            return cache
        main_x = self.mtp[0].main_x(ops, features.taps)
        latents = ops.linears(main_x, tuple(stage.attn.wkv() for stage in self.mtp))
        drafts = tuple(
            stage.commit(ops, latent, rows, ring)
            for stage, latent, ring in zip(self.mtp, latents, cache.drafts, strict=True)
        )
        return replace(cache, drafts=drafts)


def _following(blocks: list[Block], after: Norm | Site | None) -> list[Norm | Site | None]:
    """What comes right behind each block, ``after`` the last one; None where Engram comes
    first.
    """
    return [*(None if block.layer.engram else block.site("attn") for block in blocks[1:]), after]
