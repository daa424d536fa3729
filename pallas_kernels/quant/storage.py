"""Rows as the caches store them: pytrees of planes whose last axis is one row (ARCHITECTURE 4.7 and
4.8).

Planes hold int32 words, because kernels copy whole rows and Hopper's bulk copies take at most 256
elements of a dimension; a plane whose rows are not a whole number of words (small test models only)
holds bytes. Index keys are split into a plane of codes and one of scales: a pitch of 68 bytes is no
multiple of 16.
"""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import Numerics
from pallas_kernels.quant.encodings import Fp4KvRows, Fp4Rows, Fp8Rows, Packed


def words_of(data: Array) -> Array:
    """uint8 [..., n] as int32 [..., n/4], or unchanged if n is no multiple of 4."""
    n = data.shape[-1]
    if n % 4:
        return data
    return jax.lax.bitcast_convert_type(data.reshape(*data.shape[:-1], n // 4, 4), jnp.int32)


def bytes_of(words: Array) -> Array:
    """The inverse of ``words_of``."""
    if words.dtype == jnp.uint8:
        return words
    data = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return data.reshape(*words.shape[:-1], 4 * words.shape[-1])


@dataclass(frozen=True)
class StoredRows:
    """A pytree of planes [..., row]. ``encode`` takes values [..., K], ``decode`` gives them back
    in ``dtype``.
    """

    @classmethod
    def encode(cls, x: Array) -> Self:
        raise NotImplementedError

    def decode(self, dtype: jnp.dtype) -> Array:
        raise NotImplementedError

    @classmethod
    def zeros(cls, lead: tuple[int, ...], width: int) -> Self:
        """Rows [*lead, width] of zero bits."""
        planes = jax.eval_shape(cls.encode, jax.ShapeDtypeStruct((*lead, width), jnp.float32))
        return jax.tree.map(lambda plane: jnp.zeros(plane.shape, plane.dtype), planes)

    def take(self, *index: Array) -> Self:
        """The rows at integer arrays over the leading axes."""
        return jax.tree.map(lambda plane: plane[index], self)

    def put(self, rows: Self, *index: Array) -> Self:
        """Rows written at integer arrays over the leading axes; an index beyond the axis writes
        nothing.
        """
        return jax.tree.map(lambda plane, new: plane.at[index].set(new, mode="drop"), self, rows)

    @property
    def nbytes(self) -> int:
        return sum(plane.size * plane.dtype.itemsize for plane in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainRows(StoredRows):
    """Unrounded float32 values [..., K] (numerics ``float32``)."""

    values: Array

    @classmethod
    def encode(cls, x: Array) -> Self:
        return cls(x.astype(jnp.float32))

    def decode(self, dtype: jnp.dtype) -> Array:
        return self.values.astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bf16Rows(StoredRows):
    """bfloat16 values [..., K]."""

    values: Array

    @classmethod
    def encode(cls, x: Array) -> Self:
        return cls(x.astype(jnp.bfloat16))

    def decode(self, dtype: jnp.dtype) -> Array:
        return self.values.astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentRows(StoredRows):
    """FP4 latents: K/2 bytes of codes, then K/16 E4M3 scales (288 B, 72 words, at K = 512)."""

    words: Array

    @classmethod
    def encode(cls, x: Array) -> Self:
        packed = Fp4KvRows.quantize(x)
        return cls(words_of(jnp.concatenate([packed.codes, packed.scales], axis=-1)))

    def decode(self, dtype: jnp.dtype) -> Array:
        data = bytes_of(self.words)
        codes, scales = jnp.split(data, [data.shape[-1] * 8 // 9], axis=-1)
        return Fp4KvRows(codes, scales).dequantize(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowRows(StoredRows):
    """FP8 window rows: K bytes of codes, then K/32 UE8M0 scales (528 B, 132 words, at K = 512)."""

    words: Array

    @classmethod
    def encode(cls, x: Array) -> Self:
        packed = Fp8Rows.quantize(x)
        codes = jax.lax.bitcast_convert_type(packed.codes, jnp.uint8)
        return cls(words_of(jnp.concatenate([codes, packed.scales], axis=-1)))

    def decode(self, dtype: jnp.dtype) -> Array:
        data = bytes_of(self.words)
        codes, scales = jnp.split(data, [data.shape[-1] * 32 // 33], axis=-1)
        return Fp8Rows(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scales).dequantize(
            dtype
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyRows(StoredRows):
    """FP4 index keys: a plane of K/2 bytes of codes and one of K/32 UE8M0 scales (64 B and 4 B at K
    = 128).
    """

    codes: Array
    scales: Array

    @classmethod
    def encode(cls, x: Array) -> Self:
        packed = Fp4Rows.quantize(x)
        return cls(words_of(packed.codes), words_of(packed.scales))

    def decode(self, dtype: jnp.dtype) -> Array:
        return Fp4Rows(bytes_of(self.codes), bytes_of(self.scales)).dequantize(dtype)


@dataclass(frozen=True)
class RowTypes:
    """How each kind of cache row is stored, and how index queries are rounded (None: not)."""

    latent: type[StoredRows]
    window: type[StoredRows]
    key: type[StoredRows]
    query: type[Packed] | None


def row_types(numerics: Numerics) -> RowTypes:
    """Packed rows where the numerics round the cache, else float32 rows. ValueError for a
    ``cache`` that does not exist.
    """
    if not numerics.round_cache:
        return RowTypes(PlainRows, PlainRows, PlainRows, None)
    if numerics.cache not in _BY_CACHE:
        raise ValueError(f"cache {numerics.cache!r} must be one of {', '.join(_BY_CACHE)}")
    return _BY_CACHE[numerics.cache]


_BY_CACHE = {
    "fp4": RowTypes(LatentRows, WindowRows, KeyRows, Fp4Rows),
    "fp8": RowTypes(WindowRows, WindowRows, WindowRows, Fp8Rows),
    "bf16": RowTypes(Bf16Rows, Bf16Rows, Bf16Rows, None),
}
