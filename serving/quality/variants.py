"""The same weights under other numerics, caches or limits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array

from dsv41_jax.cache import CacheShape, kv_bytes_per_token, new_cache
from dsv41_jax.checkpoint.load import fill_model, load_model, model_parameters
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.moe import repack_experts
from dsv41_jax.ops import Ops
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING, Numerics
from pallas_kernels.quant import Fp8Rows
from sharding.build import build_ops


@dataclass(frozen=True)
class Variant:
    """``make()`` gives the model and its operations; rows from ``first`` on are what it changes."""

    study: str
    name: str
    condition: str
    make: Callable[[], tuple[Model, Ops]]
    first: int = 0


def variants(
    checkpoint: str, model: Model, numerics: Numerics, kernels: str, length: int
) -> Iterator[Variant]:
    """What is compared with a model of these numerics on texts of ``length`` tokens."""

    def ops(other: Numerics) -> Ops:
        return build_ops("tp1", other, kernels)

    for cache in ("fp8", "bf16"):
        other = replace(numerics, cache=cache)
        size = f"{cache_bytes(model.cfg, other):g} B a token"
        yield Variant("cache", cache, size, lambda other=other: (model, ops(other)))
    rounded = partial(rounded_heads, ops(numerics))
    yield Variant("WO-A", "fp8", "activations rounded", lambda: (model, rounded()))
    limit = model.cfg.candidate_topk_blocks * model.cfg.candidate_block_size
    if limit < length:
        everything = partial(without_candidate_limit, checkpoint, numerics, kernels, length)
        condition = f"rows from {limit} on"
        yield Variant(
            "candidates", "no limit", condition, lambda: (everything(), ops(numerics)), limit
        )
    other = REFERENCE if numerics == SERVING else SERVING
    yield Variant("numerics", other.name, "", lambda: (model, ops(other)))
    yield Variant(
        "numerics",
        FLOAT32.name,
        "nothing rounded",
        lambda: (load_model(checkpoint, numerics=FLOAT32), ops(FLOAT32)),
    )


def cache_bytes(cfg: Config, numerics: Numerics) -> float:
    """Bytes a token of the global cache."""
    shape = CacheShape(slots=1, pages=1)
    return kv_bytes_per_token(jax.eval_shape(lambda: new_cache(cfg, numerics, shape)), shape)


def rounded_heads(ops: Ops) -> Ops:
    """The operations with the heads' outputs rounded to FP8 in groups of 32 in front of WO-A, as
    servers do that multiply FP8 by FP8 (ARCHITECTURE 4.6).
    """

    def project(o: Array, wo_a: Any, wo_b: Any, *, groups: int) -> Array:
        rounded = Fp8Rows.quantize(o).dequantize(o.dtype)
        return ops.output_projection(rounded, wo_a, wo_b, groups=groups)

    return replace(ops, output_projection=project)


def without_candidate_limit(
    checkpoint: str, numerics: Numerics, kernels: str, length: int
) -> Model:
    """The model with candidate blocks for every entry of ``length`` tokens (ARCHITECTURE 6.7)."""
    model = load_model(checkpoint, numerics=numerics)
    blocks = -(-length // model.cfg.candidate_block_size) + 1
    cfg = replace(model.cfg, candidate_topk_blocks=blocks)
    made = fill_model(model_parameters(model).items(), cfg, numerics=numerics, mtp=bool(model.mtp))
    made.token_map[...] = model.token_map[...]
    repack_experts(made, kernels)
    return made
