"""The values between the operations of a forward, under the names of the trace goldens.

A module starts from the golden's own input where there is one: a difference shows where it arises.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.block import Block
from dsv41_jax.cache import Cache
from dsv41_jax.engram import compressed_history
from dsv41_jax.indexer import Selection
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.rope import angles
from dsv41_jax.rows import Rows
from pallas_kernels.engram.ref import engram_gate
from pallas_kernels.index_scores.ref import candidate_mask
from pallas_kernels.index_topk.ref import block_scores
from pallas_kernels.paging import entries_per_page
from pallas_kernels.rotate import rotate
from tests.dsv41_jax.support import Tiny, rows_for

RECORDED = (
    "linear",
    "gathered_linear",
    "moe_gate",
    "moe_experts",
    "index_scores",
    "candidate_scores",
    "sparse_attention",
    "engram_rows",
)


class Recorder:
    """Operations that keep their last arguments and result by name."""

    def __init__(self, ops: Ops):
        self.last: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self.ops = replace(ops, **{name: self._kept(name, getattr(ops, name)) for name in RECORDED})

    def _kept(self, name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.last[name] = args, result
            return result

        return call


class Tracer:
    """One forward of one request, layer by layer; ``forced`` replaces inputs by the trace's."""

    def __init__(
        self, model: Model, ops: Ops, rows: Rows, cache: Cache, forced: Mapping[str, Array]
    ):
        self.model, self.rows, self.cache, self.forced = model, rows, cache, forced
        self.recorder = Recorder(ops)
        self.ops, self.cfg = self.recorder.ops, model.cfg
        self.out: dict[str, Array] = {}
        self.selection: Selection | None = None

    def keep(self, name: str, value: Array) -> Array:
        """Record a value [1, ...] and go on with the trace's own, if it holds one."""
        self.out[name] = value[0]
        if name not in self.forced:
            return value
        return self.forced[name][None].astype(value.dtype)

    def run(self) -> dict[str, Array]:
        compressed = compressed_history(self.model.token_map[...], self.rows)
        h, pre = self.model.embedded(self.ops, self.rows.tokens)
        for block in self.model.layers:
            if block.layer.engram:
                h = self.engram(block, h, compressed)
            h, pre = self.block(block, h, pre)
        collapsed = self.keep("final.collapsed", self.ops.mhc_collapse(h, pre))
        self.keep("final.normed", self.model.norm(collapsed))
        return self.out

    def engram(self, block: Block, h: Array, compressed: Array) -> Array:
        name = f"L{block.layer.index}.engram"
        pad = self.model.token_map[...][self.cfg.engram_pad_token_id]
        ids = block.engram.row_ids(compressed, pad)
        self.keep(f"{name}.hash_ids", ids)
        kv, weights = block.engram.keys_and_value(self.ops, ids), block.engram.weights()
        keys = kv[..., : h.shape[-2] * h.shape[-1]].reshape(h.shape)
        gate = engram_gate(h, keys, *weights, ~self.rows.image, eps=block.engram.eps)
        self.keep(f"{name}.gate", gate)
        self.keep(f"{name}.rows", self.recorder.last["engram_rows"][1])
        self.keep(f"{name}.kv", self.recorder.last["gathered_linear"][1])
        return self.keep(f"{name}.h_out", block.engram(self.ops, h, ids, ~self.rows.image))

    def block(self, block: Block, h: Array, pre: Array) -> tuple[Array, Array]:
        name, rows, ops = f"L{block.layer.index}", self.rows, self.ops
        pre_attn, post, comb = self.coefficients(block, h, "attn")
        collapsed = self.keep(f"{name}.hc_attn.collapsed", ops.mhc_collapse(h, pre))
        x = self.keep(f"{name}.attn.x", block.attn_norm(collapsed))
        y = self.keep(f"{name}.attn.y", self.attention(block, x))
        h = self.keep(f"{name}.h_mid", ops.mhc_expand(h, y, post, comb))
        self.coefficients(block, h, "ffn")
        collapsed = self.keep(f"{name}.hc_ffn.collapsed", ops.mhc_collapse(h, pre_attn))
        x = self.keep(f"{name}.moe.x", block.ffn_norm(collapsed))
        self.keep(f"{name}.moe.y", block.ffn(ops, x, rows.image, rows.live))
        _, (ids, weights) = self.recorder.last["moe_gate"]
        self.keep(f"{name}.gate.indices", ids)
        self.keep(f"{name}.gate.weights", weights)
        h, pre, _ = block.experts(ops, h, x, rows.image, rows.live, None)
        return self.keep(f"{name}.h_out", h), self.keep(f"{name}.pre_mix_out", pre)

    def coefficients(self, block: Block, h: Array, site: str) -> tuple[Array, ...]:
        values = block.coefficients(self.ops, h, site)
        for part, value in zip(("pre", "post", "comb"), values, strict=True):
            self.keep(f"L{block.layer.index}.hc_{site}.{part}", value)
        return values

    def attention(self, block: Block, x: Array) -> Array:
        attn, name, rows = block.attn, f"L{block.layer.index}", self.rows
        at = angles(self.cfg, block.layer.ratio, rows.position)
        y, self.cache, self.selection = attn(
            self.ops, x, rows, rows.floor, self.cache, self.selection
        )
        arguments, o = self.recorder.last["sparse_attention"]
        cos, sin = at.cos[:, :, None], at.sin[:, :, None]
        self.keep(f"{name}.attn.q", rotate(arguments[0], cos, sin))
        self.keep(f"{name}.attn.o", o)
        window = arguments[3].decode(jnp.float32)[:, self.cfg.sliding_window - 1 :]
        self.keep(f"{name}.attn.window_kv", window)
        self.keep(f"{name}.attn.qr", attn.queries(self.ops, x)[0])
        if block.layer.owns_kv:
            self.entries(block)
        if block.layer.selects:
            self.indexer(name, block)
        return y

    def entries(self, block: Block) -> None:
        owner = block.layer.index
        pool, count = self.cache.pools[owner], self.rows.length // block.layer.ratio
        for name, rows in (("attn.ckv", pool.latents), ("indexer.k", pool.keys)):
            values = rows.decode(jnp.float32)[self.rows.page_table[0]]
            self.keep(f"L{owner}.{name}", values.reshape(1, -1, values.shape[-1]))
        self.out[f"L{owner}.entries"] = count[0]

    def scored(self, block: Block) -> tuple[tuple, Array]:
        """The arguments and the scores [1, T, N] of every entry, -inf where none were made."""
        if not block.attn.indexer.compact:
            return self.recorder.last["index_scores"]
        arguments, compact = self.recorder.last["candidate_scores"]
        page_table, candidates, size = arguments[3], arguments[5], self.cfg.candidate_block_size
        entries = page_table.shape[1] * entries_per_page(arguments[2])
        at = candidates[..., None] * size + jnp.arange(size)
        at = jnp.where(candidates[..., None] < 0, entries, at).reshape(compact.shape)
        batch, row = jnp.ogrid[: compact.shape[0], : compact.shape[1]]
        scores = jnp.full((*compact.shape[:2], entries), -jnp.inf)
        return arguments, scores.at[batch[..., None], row[..., None], at].set(compact, mode="drop")

    def indexer(self, name: str, block: Block) -> None:
        (q, weights, *_), scores = self.scored(block)
        self.keep(f"{name}.indexer.q", q)
        self.keep(f"{name}.indexer.weights", weights)
        self.keep(f"{name}.indexer.score", scores)
        self.keep(f"{name}.indexer.idx", self.selection.entries)
        if block.layer.candidate_source:
            size, visible = self.cfg.candidate_block_size, self.rows.position + 1
            blocks = -(-scores.shape[-1] // size)
            mask = candidate_mask(self.selection.candidates, blocks, size)
            self.keep(f"{name}.indexer.candidates", mask[..., : scores.shape[-1]])
            best = block_scores(scores, visible, block_size=size)
            self.keep(f"{name}.indexer.cand_block_scores", best)


@cache
def _compiled(tiny: Tiny) -> Callable:
    return tiny.module(
        lambda model, rows, cache, forced: Tracer(model, tiny.ops, rows, cache, forced).run()
    )


def trace(
    tiny: Tiny, ids: np.ndarray, forced: Mapping[str, np.ndarray], **rows: Any
) -> dict[str, np.ndarray]:
    """Values by trace name, cut to the rows (or entries) that exist."""
    inputs = rows_for(ids, size=len(ids), **rows)
    taken = {name: jnp.asarray(value) for name, value in forced.items()}
    traced = _compiled(tiny)(inputs, tiny.cache(), taken)
    out = {name: np.asarray(value) for name, value in traced.items()}
    for name in [name for name in out if name.endswith(".entries")]:
        layer, count = name.split(".")[0], int(out.pop(name))
        for entry in ("attn.ckv", "indexer.k"):
            out[f"{layer}.{entry}"] = out[f"{layer}.{entry}"][:count]
        if f"{layer}.indexer.candidates" in out:
            out[f"{layer}.indexer.candidates"] = out[f"{layer}.indexer.candidates"][:, :count]
    return out
