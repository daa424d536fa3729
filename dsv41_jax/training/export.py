"""Trained weights to a checkpoint in the released format."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax import compiling
from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.parameters import DTYPES, Parameter, Value, parameters
from dsv41_jax.checkpoint.save import save_released
from dsv41_jax.config import Config
from pallas_kernels.quant import Packed

SHARD_BYTES = 11_800_000  # and a header of up to 200 KB
# The first that matches counts.
KINDS = {
    "draft stages": r"^mtp\.",
    "embedding and head": r"^(embed|head)\.",
    "routed experts": r"\.experts\.",
    "shared experts": r"\.shared_experts\.",
    "router": r"\.gate\.",
    "hyper-connections": r"\.hc_",
    "Engram tables": r"\.engram\.embed",
    "Engram projections": r"\.engram\.",
    "compressors": r"\.compressor\.",
    "indexers": r"\.indexer\.",
    "attention": r"\.attn\.",
    "norms": r"norm\.",
}


def export(
    values: Mapping[str, jax.Array], cfg: Config, directory: Path, tokenizer_file: Path
) -> None:
    """Write float32 parameters by path as FP8, FP4, bfloat16 and float32 tensors, in shards of at
    most 12 MB. ValueError unless they are exactly the parameters of the config.
    """
    plan = parameters(inventory(cfg))
    stored = {path: _stored(plan[path], value) for path, value in values.items() if path in plan}
    stored |= {path: np.asarray(value) for path, value in values.items() if path not in plan}
    save_released(stored, cfg, directory, tokenizer_file=tokenizer_file, shard_bytes=SHARD_BYTES)


def _stored(parameter: Parameter, value: jax.Array) -> Value:
    if parameter.encoding is None:
        return np.asarray(value).astype(DTYPES[parameter.spec.dtype])
    return jax.tree.map(np.asarray, _quantise(parameter.encoding)(jnp.asarray(value)))


@cache
def _quantise(encoding: type[Packed]) -> Callable:
    return compiling.jit(encoding.quantize)


def bytes_by_kind(cfg: Config) -> dict[str, tuple[int, int]]:
    """Kind of parameter -> (parameters, stored bytes), the draft stages apart."""
    found: dict[str, tuple[int, int]] = {}
    for path, parameter in parameters(inventory(cfg)).items():
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, path))
        count, size = found.get(kind, (0, 0))
        count += len(parameter.weights) * parameter.spec.parameters
        found[kind] = count, size + parameter.nbytes
    return found
