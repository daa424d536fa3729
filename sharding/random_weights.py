"""Random weights made on the devices of a placement, for measuring: right in shape, encoding and
magnitude, in no other way like a trained model.

Numbers are hashes of an element's place, which XLA makes in the pass that stores them. On a GPU
``jax.random`` first holds 16 bytes an element.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import log2
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.load import fill_model
from dsv41_jax.checkpoint.parameters import Parameter, parameters
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Fp4Rows
from sharding.collectives import rank_of
from sharding.place import REPLICATED, Placement

# Exponents of at most 2^0 and no NaN.
_FP8_MASK = 0xBF
_FP8_RMS, _FP4_RMS = 0.6, 2.9


def random_model(cfg: Config, placement: Placement, *, numerics: Numerics) -> Model:
    """A model without draft stages whose parameters are packed as the numerics want them.

    ValueError for numerics that hold plain float32 weights.
    """
    if not numerics.packed_weights:
        raise ValueError(f"numerics {numerics.name} must keep weights packed")
    text = {path: p for path, p in parameters(inventory(cfg)).items() if p.part == "text"}

    def values() -> Iterator[tuple[str, Any]]:
        for path, parameter in text.items():
            yield path, random_value(parameter, placement)

    model = fill_model(
        values(), cfg, numerics=numerics, mtp=False, padded=placement.division.padded
    )
    model.set_token_map(np.arange(cfg.vocab_size, dtype=np.int32))
    model.token_map.set_value(placement.put(np.asarray(model.token_map[...]), REPLICATED))
    return model


def random_value(parameter: Parameter, placement: Placement) -> Any:
    """The value of one parameter on the devices of a placement, seeded by its path."""
    local = placement.division.local_specs([parameter])
    spec = placement.spec(parameter.path)
    seed = np.uint32(crc32(parameter.path.encode()))
    shapes = [spec.shape for spec in local.values()]
    if parameter.encoding is None:
        one_dim = len(shapes[0]) == 1
        scale = 0.1 if one_dim else shapes[0][-1] ** -0.5
        mean = 1.0 if one_dim and "norm" in parameter.path else 0.0
        dtype = "float32" if parameter.spec.dtype == "F32" else "bfloat16"
        return _plain(placement, spec, shapes[0], dtype)(seed, mean, scale)
    fp4 = parameter.encoding is Fp4Rows
    columns = parameter.spec.shape[-1] * parameter.encoding.codes_per_item
    rms = _FP4_RMS if fp4 else _FP8_RMS
    # Engram rows are embeddings, of order one.
    size = 1.0 if parameter.is_engram_table else columns**-0.5
    byte = np.uint8(127 + round(log2(size / rms)))
    codes = _codes(placement, spec, shapes[0], fp4)(seed)
    scales = _filled(placement, spec, shapes[1])(byte)
    return parameter.encoding(codes, scales)


def _on_devices(placement: Placement, spec: PartitionSpec, function: Any) -> Any:
    """A compiled function of replicated numbers that makes each device's part on it."""
    return jit(placement.over_ranks(function, REPLICATED, spec))


def hashed(seed: Array, shape: tuple[int, ...]) -> Array:
    """uint32 [shape]: the hash of each element's number and of the uint32 seed."""
    number, stride = jnp.full(shape, seed, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        number += place * np.uint32(stride & 0xFFFFFFFF)
        stride *= shape[axis]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x9E3779B1)):
        number = (number ^ (number >> shift)) * np.uint32(factor)
    return number ^ (number >> 15)


def _seed(seed: Array, spec: PartitionSpec) -> Array:
    """Ranks that hold copies draw the same numbers."""
    split = [(axes,) if isinstance(axes, str) else axes for axes in spec if axes]
    rank = rank_of(sum(split, ()))
    return hashed(seed + jnp.asarray(rank, jnp.uint32), (1,))[0]


@lru_cache
def _plain(placement: Placement, spec: PartitionSpec, shape: tuple[int, ...], dtype: str) -> Any:
    """Uniform, of the mean and deviation asked for."""

    def make(seed: Array, mean: Array, scale: Array) -> Array:
        unit = hashed(_seed(seed, spec), shape).astype(jnp.float32) * 2.0**-31 - 1
        return (mean + scale * 3**0.5 * unit).astype(dtype)

    return _on_devices(placement, spec, make)


@lru_cache
def _codes(placement: Placement, spec: PartitionSpec, shape: tuple[int, ...], fp4: bool) -> Any:
    def make(seed: Array) -> Array:
        bits = (hashed(_seed(seed, spec), shape) >> 24).astype(jnp.uint8)
        if fp4:
            return bits
        return jax.lax.bitcast_convert_type(bits & _FP8_MASK, jnp.float8_e4m3fn)

    return _on_devices(placement, spec, make)


@lru_cache
def _filled(placement: Placement, spec: PartitionSpec, shape: tuple[int, ...]) -> Any:
    return _on_devices(placement, spec, lambda byte: jnp.full(shape, byte, jnp.uint8))
