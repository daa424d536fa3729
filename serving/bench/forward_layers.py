"""Programs of a single layer, and of what a step runs beside its layers."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Cache
from dsv41_jax.engram import compressed_history
from dsv41_jax.indexer import Selection
from dsv41_jax.rows import Rows
from serving.bench.forward_cache import noise, spread
from serving.bench.forward_programs import SharedPrograms
from serving.buckets import Bucket
from serving.sampler import Sampling, sample
from sharding.place import BY_RANK, REPLICATED

ENDS = "embed.weight", "norm.weight", "head.weight"
MANY_ROWS = 1024  # more of them keep the device busy by themselves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Between:
    """What layers hand on: h [B, T, S, D], the next attention's input x [B, T, D], pre f32 [B, T,
    S], entries int32 [B, T, k], candidates int32 [B, T, C].
    """

    h: Array
    x: Array
    pre: Array
    entries: Array
    candidates: Array


def copies(programs: SharedPrograms, bucket: Bucket) -> int:
    """How often a layer's program runs it, each time with another weight set, so that launches
    overlap as in a model and no weight is found in a cache.
    """
    return 1 if bucket.requests * bucket.rows > MANY_ROWS else min(programs.sets.count, 4)


def lowered_layer(programs: SharedPrograms, layer: int, bucket: Bucket) -> jax.stages.Lowered:
    """(weights and tables, the layer's part of the cache, ``Between``, rows) -> part, ``Between``;
    both donated.
    """
    count, sets = copies(programs, bucket), programs.sets

    def run(params: Any, part: Cache, between: Between, rows: Rows) -> tuple[Cache, Between]:
        blocks, routing = [], params["routing"]
        for number in range(count):
            weight_set = (layer + number) % sets.count
            block, routing = sets.block(params["weights"], layer, weight_set, routing)
            blocks.append(block)
        ops = programs.routed_ops(routing)
        h, x, pre, cache = between.h, between.x, between.pre, part
        selection = Selection(between.entries, between.candidates)
        after = layer > sets.cfg.last_kv_source
        floor = jnp.maximum(rows.floor, rows.decoder_floor) if after else rows.floor
        # Behind the last copy only its norm: the coefficients of the first are its own.
        sites = [None if block.layer.engram else block.site("attn") for block in blocks[1:]]
        for block, following in zip(blocks, [*sites, blocks[0].attn_norm], strict=True):
            if block.layer.engram:
                # Hashed anew each time: no two layers of a model share their hashes.
                tokens, h = jax.lax.optimization_barrier((rows.tokens, h))
                own, token_map = replace(rows, tokens=tokens), params["weights"]["token_map"]
                pad = token_map[sets.cfg.engram_pad_token_id]
                ids = block.engram.row_ids(compressed_history(token_map, own), pad)
                h = block.engram(ops, h, ids, ~rows.image)
                x = block.entry(ops, h, pre)
            h, pre, x, cache, selection = block.step(
                ops, h, x, rows, floor, cache, selection, following
            )
        candidates = between.candidates if selection.candidates is None else selection.candidates
        return cache, Between(h, x, pre, selection.entries, candidates)

    params = layer_params(programs, programs.params, layer, bucket)
    part = cache_part(programs.cache_shapes(), programs, layer)
    (rows,) = programs.inputs_as("encode", bucket)
    between = jax.eval_shape(between_layers(programs), rows, jnp.int32(1))
    between = programs.by_rank(between)
    specs = programs.specs(params), BY_RANK, BY_RANK, BY_RANK
    return programs.on_ranks(run, specs, donate=(1, 2)).lower(params, part, between, rows)


def layer_params(programs: SharedPrograms, params: Any, layer: int, bucket: Bucket) -> Any:
    """Of the parameters, or of their shapes, what the layer's program takes."""
    sets, count = programs.sets, copies(programs, bucket)
    used = {f"layers.{(layer + number) % sets.count}" for number in range(count)}
    used.add(f"layers.{layer}")
    weights = {
        path: value
        for path, value in params["weights"].items()
        if path == "token_map" or ".".join(path.split(".")[:2]) in used
    }
    return params | {"weights": weights}


def cache_part(cache: Cache, programs: SharedPrograms, layer: int) -> Cache:
    """What one layer reads and writes of a cache, or of its shapes."""
    plan = programs.sets.model.layers[layer].layer
    windows = [ring if i == layer else None for i, ring in enumerate(cache.windows)]
    return Cache(
        pools={k: pool for k, pool in cache.pools.items() if k == plan.kv_source},
        windows=tuple(windows),
        pairs={k: ring for k, ring in cache.pairs.items() if k == layer},
        drafts=(),
        history=None,
        last_token=None,
        carry=None,
    )


def put_back(cache: Cache, part: Cache) -> Cache:
    """The cache with the part that a layer's program returned."""
    windows = zip(cache.windows, part.windows, strict=True)
    return replace(
        cache,
        pools={**cache.pools, **part.pools},
        windows=tuple(old if new is None else new for old, new in windows),
        pairs={**cache.pairs, **part.pairs},
    )


def between_layers(programs: SharedPrograms) -> Any:
    """The jitted function (rows, ratio int32 []) -> ``Between``: random streams, selections spread
    evenly over what a row may see.
    """
    cfg, dtype = programs.cfg, programs.ops.numerics.dtype

    def make(rows: Rows, ratio: Array) -> Between:
        lead = rows.tokens.shape
        h = noise(jnp.zeros((*lead, cfg.hc_mult, cfg.hidden_size), dtype), 0)
        pre = jax.nn.sigmoid(noise(jnp.zeros((*lead, cfg.hc_mult), jnp.float32), 1))
        x = noise(jnp.zeros((*lead, cfg.hidden_size), dtype), 2)
        visible = (rows.position + 1) // ratio
        blocks = -(-visible // cfg.candidate_block_size)
        return Between(
            h,
            x,
            pre,
            spread(visible, cfg.index_topk),
            spread(blocks, cfg.candidate_topk_blocks),
        )

    return programs.on_ranks(make, (BY_RANK, REPLICATED))


def lowered_ends(programs: SharedPrograms, bucket: Bucket, scored: int) -> jax.stages.Lowered:
    """(weights, rows, sampling) -> tokens: embedding, head and greedy token of the last ``scored``
    rows of each request.
    """

    def run(params: Any, rows: Rows, sampling: Sampling) -> Array:
        ops, model = programs.ops, programs.sets.ends(params["weights"])
        h, pre = model.embedded(ops, rows.tokens)
        logits = model.logits(ops, h[:, -scored:], pre[:, -scored:])
        every = jax.tree.map(lambda leaf: jnp.repeat(leaf, scored, axis=0), sampling)
        places = rows.position[:, -scored:].reshape(-1)
        found = sample(logits.reshape(places.size, -1), every, places, logprobs=0)
        return ops.agree(found).token

    params = ends_params(programs.params)
    rows, sampling = programs.inputs_as("replay", bucket)
    specs = programs.specs(params), BY_RANK, BY_RANK
    return programs.on_ranks(run, specs).lower(params, rows, sampling)


def ends_params(params: Any) -> Any:
    """Of the parameters, or of their shapes, what ``lowered_ends`` takes."""
    weights = params["weights"]
    return {"weights": {path: weights[path] for path in ENDS}}
