"""The backbone over whole sequences, built from the model's own modules (ARCHITECTURE 3, 7 to
9).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.block import Block, expand_collapse_norm
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.training.attention import SELECTED, Shared, attend
from dsv41_jax.training.ops import with_loads
from dsv41_jax.training.rounding import Rounding
from pallas_kernels.engram.hash import BARRIER, compress_ids

State = tuple[Array, Array, Shared]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Backbone:
    """What training reads off the backbone: logits f32 [B, T, V], the features of the draft stages
    [B, T, 3 D], the index loss f32 [] (a sum over layers), and how many rows chose each expert,
    f32 [E] by layer.
    """

    logits: Array
    taps: Array
    index_loss: Array
    loads: tuple[Array, ...]


def backbone(
    model: Model,
    ops: Ops,
    rounding: Rounding,
    tokens: Array,
    dense: Array | bool = False,
    *,
    remat: bool = False,
) -> Backbone:
    """All layers on all rows of sequences int32 [B, T] that begin at position 0; T must be a
    multiple of the window and of 2, else ``ValueError``.

    The same function as ``encoder`` and ``decoder`` of the model compute in chunks through the
    caches. dense: see ``attention.attend``. remat: the backward pass computes each block again.
    """
    size = model.cfg.sliding_window
    if tokens.shape[1] % size or tokens.shape[1] % 2:
        raise ValueError(f"{tokens.shape=} must have a multiple of {size} and of 2 rows")
    history = _history(model, tokens)
    pad = model.token_map[...][model.cfg.engram_pad_token_id]
    dense = jnp.asarray(dense)
    state: State = (*model.embedded(ops, tokens), Shared())
    taps, loads, losses = [], [], []
    for block in model.layers:
        if block.layer.index in model.cfg.dspark_target_layer_ids:
            taps.append(stream_mean(state[0]))
        rows = block.engram.row_ids(history, pad) if block.layer.engram else None

        def run(state: State, rows: Array | None, dense: Array, block: Block = block) -> tuple:
            return _block(block, ops, rounding, state, rows, dense)

        if remat:
            kept = jax.checkpoint_policies.save_only_these_names(SELECTED)
            run = jax.checkpoint(run, policy=kept)
        state, loss, load = run(state, rows, dense)
        losses.append(loss)
        loads.append(load)
    logits = model.logits(ops, state[0], state[1])
    return Backbone(logits, jnp.concatenate(taps, axis=-1), sum(losses), tuple(loads))


def stream_mean(h: Array) -> Array:
    """The feature that draft stages take of streams [..., S, D] (ARCHITECTURE section 10)."""
    return jnp.mean(h.astype(jnp.float32), axis=-2).astype(h.dtype)


def _history(model: Model, tokens: Array) -> Array:
    """Compressed ids int32 [B, n-1+T]; nothing comes before a sequence."""
    before = jnp.full((tokens.shape[0], model.cfg.engram_max_ngram_size - 1), BARRIER, jnp.int32)
    return compress_ids(model.token_map[...], jnp.concatenate([before, tokens], axis=1))


def _block(
    block: Block, ops: Ops, rounding: Rounding, state: State, rows: Array | None, dense: Array
) -> tuple[State, Array, Array]:
    h, pre, shared = state
    text = jnp.zeros(h.shape[:2], bool)
    if rows is not None:
        h = block.engram(ops, h, rows, ~text)
    x = block.first_input(ops, h, pre)
    pre, post, comb = block.coefficients(ops, h, "attn")
    y, shared, loss = attend(block.attn, ops, rounding, x, shared, dense)
    h, x = expand_collapse_norm(ops, h, y, post, comb, pre, block.ffn_norm)
    counting, loads = with_loads(ops)
    h, pre, _ = block.experts(counting, h, x, text, ~text, None)
    return (h, pre, shared), loss, loads[0]
