"""The DSpark stages on blocks all over a sequence, with the true tokens as their input
(ARCHITECTURE section 10).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Ring
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.rope import angles
from dsv41_jax.training.ops import with_loads
from dsv41_jax.training.rounding import Rounding
from pallas_kernels.quant.storage import PlainRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafted:
    """Blocks of n proposals at A places of each sequence: logits f32 [B, A, n, V] with the Markov
    bias, confidence f32 [B, A, n], rows that chose each expert f32 [E] by stage.
    """

    logits: Array
    confidence: Array
    loads: tuple[Array, ...]


def drafts(
    model: Model, ops: Ops, rounding: Rounding, tokens: Array, taps: Array, start: Array
) -> Drafted:
    """Blocks opened by the tokens at positions ``start`` int32 [A], each at least 1, of sequences
    int32 [B, T + 1]; taps [B, T, 3 D].

    Proposal i of a block is for position start + 1 + i and follows the true token before it, which
    must exist: start + n <= T. What the stages share with the backbone (features, embedding, head)
    is a constant here.
    """
    cfg, count = model.cfg, model.cfg.dspark_block_size
    batch, rows = taps.shape[:2]
    places = start[:, None] + jnp.arange(count, dtype=jnp.int32)
    opened = tokens[:, start].reshape(-1, 1)
    noise = jnp.full((opened.shape[0], count - 1), cfg.dspark_noise_token_id, jnp.int32)
    block = jnp.concatenate([opened, noise], axis=1)
    h, pre = jax.lax.stop_gradient(model.embedded(ops, block))
    main_x = model.mtp[0].main_x(ops, jax.lax.stop_gradient(taps))
    position = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
    slot = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), start.size)
    begin, floor = jnp.tile(start, batch), jnp.zeros_like(slot)
    counting, loads = with_loads(ops)
    x, norms = model.mtp[0].first_input(ops, h, pre), [s.attn_norm for s in model.mtp]
    for stage, following in zip(model.mtp, [*norms[1:], None], strict=True):
        context = stage.attn.window_rows(ops, main_x, angles(cfg, 0, position)).decode(h.dtype)
        ring = Ring(PlainRows(rounding.window(context)), position)
        h, pre, x = stage.step(counting, h, x, slot, begin, floor, ring, following)
    x = ops.mhc_collapse(h, pre)
    last = model.mtp[-1]
    head, confidence = last.markov_head, last.confidence_head
    base = ops.linear(last.norm(x), jax.lax.stop_gradient(model.head()), out_dtype=jnp.float32)
    embedding = ops.embedding(head.embed(), tokens[:, places].reshape(-1, count))
    logits = base + ops.linear(embedding.astype(x.dtype), head.head(), out_dtype=jnp.float32)
    both = jnp.concatenate([x.astype(jnp.float32), embedding.astype(jnp.float32)], axis=-1)
    scores = ops.linear(both, confidence.proj(), out_dtype=jnp.float32)[..., 0]
    shape = (batch, start.size, count)
    return Drafted(logits.reshape(*shape, -1), scores.reshape(shape), tuple(loads))
