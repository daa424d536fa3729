"""DSpark: three draft stages, Markov bias and confidence (ARCHITECTURE section 10)."""

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.attention import Projections
from dsv41_jax.block import Entry, Site, Sublayers, between, entered
from dsv41_jax.cache import Ring
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.ops import Ops
from dsv41_jax.rope import angles
from dsv41_jax.rows import Rows
from dsv41_jax.weights import Norm, Weight
from pallas_kernels.addends import Addends
from pallas_kernels.compress.store import Chunk
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp8Blocks
from pallas_kernels.rotate import rotate

log = logging.getLogger("dsv41_jax.checkpoint")
BLOCK = 5  # the heads are trained for this block; another one changes mask and positions


def check_block_size(cfg: Config, *, speculation: bool) -> None:
    """Draft heads for another block are an error if they are wanted, else one line in the log."""
    size = cfg.dspark_block_size
    if size != BLOCK and speculation:
        raise UserError(f"dspark_block_size={size} must be {BLOCK} for speculation")
    if size != BLOCK:
        log.info("no draft model: dspark_block_size=%d, not %d", size, BLOCK)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """Proposals of a block of n tokens: ids int32 [B, n], logits f32 [B, n, V] with the Markov
    bias, confidence f32 [B, n] (raw logits).
    """

    ids: Array
    logits: Array
    confidence: Array


class MarkovHead(nnx.Module):
    """Bias of the next token given the one before it, rank r."""

    def __init__(self, cfg: Config, *, numerics: Numerics, rngs: nnx.Rngs):
        shape = cfg.vocab_size, cfg.dspark_markov_rank
        self.embed = Weight(*shape, encoding=None, numerics=numerics, rngs=rngs)
        self.head = Weight(*shape, encoding=None, numerics=numerics, rngs=rngs)


class ConfidenceHead(nnx.Module):
    """Acceptance logit from the collapsed state and the Markov embedding."""

    def __init__(self, cfg: Config, *, numerics: Numerics, rngs: nnx.Rngs):
        width = cfg.hidden_size + cfg.dspark_markov_rank
        self.proj = Weight(1, width, encoding=None, numerics=numerics, rngs=rngs)


class DraftStage(Sublayers):
    """One ``mtp`` block. Its window context comes from the backbone's features, its own tokens
    never enter it.
    """

    def __init__(self, cfg: Config, index: int, *, numerics: Numerics, rngs: nnx.Rngs):
        super().__init__(
            cfg,
            cfg.dspark_n_routed_experts,
            cfg.dspark_num_experts_per_tok,
            numerics=numerics,
            rngs=rngs,
        )
        self.attn = Projections(cfg, numerics=numerics, rngs=rngs)
        d, taps = cfg.hidden_size, len(cfg.dspark_target_layer_ids)
        if index == 0:
            self.main_proj = Weight(d, taps * d, encoding=Fp8Blocks, numerics=numerics, rngs=rngs)
            self.main_norm = Norm(d, cfg.rms_norm_eps, numerics=numerics)
        if index == cfg.num_nextn_predict_layers - 1:
            self.norm = Norm(d, cfg.rms_norm_eps, numerics=numerics)
            self.markov_head = MarkovHead(cfg, numerics=numerics, rngs=rngs)
            self.confidence_head = ConfidenceHead(cfg, numerics=numerics, rngs=rngs)
        self.cfg = cfg

    def main_x(self, ops: Ops, taps: Array) -> Array:
        """Stage 0 only: the features [B, T, 3 D] that every stage takes its context from, as [B, T,
        D].
        """
        return self.main_norm(ops.linear(taps, self.main_proj()))

    def commit(self, ops: Ops, latent: Array, rows: Rows, ring: Ring) -> Ring:
        """The ring with the window rows of committed tokens, from main_x times ``attn.wkv``, [B, T,
        K].
        """
        attn, at = self.attn, angles(self.cfg, 0, rows.position)
        job = attn.window_job(latent, at, rows.slot, ring, emit=False)
        chunk = Chunk(rows.start, rows.length)
        _, planes, tags, _ = ops.store_rows(chunk, window=job, eps=attn.kv_norm.eps)
        return Ring(planes, tags)

    def __call__(
        self, ops: Ops, h: Array, pre: Array, slot: Array, start: Array, floor: Array, ring: Ring
    ) -> tuple[Array, Array]:
        """Streams and pre after the stage, for a block [B, n] at positions start .. start+n-1 of
        each slot.
        """
        x = self.first_input(ops, h, pre)
        return self.step(ops, h, x, slot, start, floor, ring)[:2]

    def step(
        self,
        ops: Ops,
        h: Array,
        x: Array | Entry,
        slot: Array,
        start: Array,
        floor: Array,
        ring: Ring,
        following: Norm | Site | None = None,
    ) -> tuple[Array, Array, Array | Entry | None]:
        """As ``Block.step``, without cache and selection."""
        x, mixed = entered(self.site("attn"), ops, h, x)
        y = self._attend(ops, x, slot, start, floor, ring)
        h, entry = between(ops, h, y, mixed, self.site("ffn"))
        everywhere = jnp.ones(h.shape[:2], bool)
        return self.experts(ops, h, entry, ~everywhere, everywhere, following)

    def _attend(
        self, ops: Ops, x: Array, slot: Array, start: Array, floor: Array, ring: Ring
    ) -> Array | Addends:
        """Every row of the block sees the window before the block and all of the block."""
        size, n = self.attn.window_size, x.shape[1]
        at = angles(self.cfg, 0, start[:, None] + jnp.arange(n))
        before, exists = ring.tail(slot, start, size)
        low, k = self.attn.inputs(ops, x)
        own = self.attn.stored(ops, k, at)
        seen = exists & (start[:, None] + jnp.arange(-size, 0) >= floor[:, None])
        kv = jnp.concatenate([rows.decode(ops.numerics.dtype) for rows in (before, own)], axis=1)
        valid = jnp.concatenate([seen, jnp.ones((x.shape[0], n), bool)], axis=1)
        lists = (jnp.broadcast_to(a[:, None], (a.shape[0], n, *a.shape[1:])) for a in (kv, valid))
        cos, sin = at.cos[:, :, None], at.sin[:, :, None]
        (q,) = self.attn.heads(ops, low)
        q = rotate(q, cos, sin)
        o = ops.list_attention(q, *lists, self.attn.attn_sink.get_value())
        return self.attn.output(ops, rotate(o, cos, sin, inverse=True))


def propose(ops: Ops, stage: DraftStage, x: Array, base: Array, token: Array) -> Draft:
    """Greedy proposals. x [B, n, D]: collapsed state of the last stage before its norm; base f32
    [B, n, V]: head logits; token int32 [B]: the token that opens the block.
    """
    head, confidence = stage.markov_head, stage.confidence_head
    ids, logits, scores = [], [], []
    for i in range(x.shape[1]):
        embedding = ops.embedding(head.embed(), token)
        row = base[:, i] + ops.gathered_linear(
            embedding, head.head(), outputs=base.shape[-1], out_dtype=jnp.float32
        )
        both = jnp.concatenate(
            [x[:, i].astype(jnp.float32), embedding.astype(jnp.float32)], axis=-1
        )
        scores.append(ops.linear(both, confidence.proj(), out_dtype=jnp.float32)[:, 0])
        token = ops.agree(jnp.argmax(row, axis=-1).astype(jnp.int32))
        ids.append(token)
        logits.append(row)
    return Draft(jnp.stack(ids, 1), jnp.stack(logits, 1), ops.agree(jnp.stack(scores, 1)))
