"""The stored encodings as pytrees: codes and raw scale bytes (ARCHITECTURE section 0.1).

Scales are uint8 bytes, never float arrays: an E8M0 byte that is copied into a float tensor scales
by 1e40.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.quant import rounding

F32 = jnp.float32


@dataclass(frozen=True)
class Packed:
    """Codes beside scale bytes. Leaves may be JAX or NumPy arrays; ``shape`` is that of the
    values.
    """

    codes: Array
    scales: Array

    codes_per_item: ClassVar[int] = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.codes_per_item)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.codes.shape)) + int(np.prod(self.scales.shape))

    @classmethod
    def quantize(cls, x: Array) -> Self:
        raise NotImplementedError

    def dequantize(self, dtype: jnp.dtype = F32) -> Array:
        raise NotImplementedError

    @classmethod
    def rounded(cls, x: Array) -> Array:
        """float32 values of x as the encoding holds them."""
        return cls.quantize(x).dequantize()


def _groups(x: Array, size: int) -> Array:
    k = x.shape[-1]
    if k % size:
        raise ValueError(f"last axis {k=} must be a multiple of {size=}")
    return x.astype(F32).reshape(*x.shape[:-1], k // size, size)


def _amax(groups: Array, floor: float) -> Array:
    return jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), F32(floor))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Rows(Packed):
    """AQ32. codes float8_e4m3fn [..., K], scales UE8M0 uint8 [..., K/32]: activations, window rows,
    Engram rows.
    """

    @classmethod
    def quantize(cls, x: Array) -> Self:
        g = _groups(x, 32)
        scales = rounding.pow2ceil_byte(_amax(g, 1e-4) * F32(1 / 448))
        codes = rounding.e4m3(g / rounding.ue8m0(scales)[..., None])
        return cls(codes.reshape(x.shape), scales)

    def dequantize(self, dtype: jnp.dtype = F32) -> Array:
        g = _groups(self.codes, 32) * rounding.ue8m0(self.scales)[..., None]
        return g.reshape(self.codes.shape).astype(dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Blocks(Packed):
    """Dense weights. codes float8_e4m3fn [N, K], scales UE8M0 uint8 [N/32, K/32], one per 32x32
    block.
    """

    @classmethod
    def quantize(cls, x: Array) -> Self:
        blocks = _blocks(x.astype(F32))
        scales = rounding.pow2ceil_byte(
            jnp.maximum(jnp.max(jnp.abs(blocks), axis=(1, 3)), F32(1e-4)) * F32(1 / 448)
        )
        codes = rounding.e4m3(blocks / rounding.ue8m0(scales)[:, None, :, None])
        return cls(codes.reshape(x.shape), scales)

    def dequantize(self, dtype: jnp.dtype = F32) -> Array:
        values = _blocks(self.codes.astype(F32)) * rounding.ue8m0(self.scales)[:, None, :, None]
        return values.reshape(self.codes.shape).astype(dtype)


def _blocks(x: Array) -> Array:
    n, k = x.shape
    if n % 32 or k % 32:
        raise ValueError(f"weight shape {n=}, {k=} must be multiples of 32")
    return x.reshape(n // 32, 32, k // 32, 32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp4Rows(Packed):
    """FQ32. codes uint8 [..., K/2], low nibble first, scales UE8M0 uint8 [..., K/32]: index keys,
    expert weights.
    """

    codes_per_item: ClassVar[int] = 2

    @staticmethod
    def _codes(x: Array) -> tuple[Array, Array]:
        """Codes uint8 [..., K/32, 32], a byte each, and scales."""
        g = _groups(x, 32)
        scales = rounding.pow2ceil_byte(_amax(g, 6 * 2.0**-126) * F32(1 / 6))
        return rounding.e2m1_encode(g / rounding.ue8m0(scales)[..., None]), scales

    @classmethod
    def quantize(cls, x: Array) -> Self:
        codes, scales = cls._codes(x)
        return cls(rounding.nibbles_pack(codes.reshape(x.shape)), scales)

    def dequantize(self, dtype: jnp.dtype = F32) -> Array:
        return _fp4_values(self.codes, rounding.ue8m0(self.scales), 32).astype(dtype)

    @classmethod
    def rounded(cls, x: Array) -> Array:
        """The same without a packed array between, on which XLA would split its loop."""
        codes, scales = cls._codes(x)
        return (rounding.e2m1_decode(codes) * rounding.ue8m0(scales)[..., None]).reshape(x.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp4KvRows(Packed):
    """FQ16. codes uint8 [..., K/2], low nibble first, scales E4M3 bits as uint8 [..., K/16]:
    compressed latents.
    """

    codes_per_item: ClassVar[int] = 2

    @classmethod
    def quantize(cls, x: Array) -> Self:
        g = _groups(x, 16)
        scale = rounding.e4m3(rounding.divide(_amax(g, 6 * 2.0**-9), 6.0))
        codes = rounding.e2m1_encode(g, scale.astype(F32)[..., None])
        packed = rounding.nibbles_pack(codes.reshape(x.shape))
        return cls(packed, jax.lax.bitcast_convert_type(scale, jnp.uint8))

    def dequantize(self, dtype: jnp.dtype = F32) -> Array:
        scale = jax.lax.bitcast_convert_type(self.scales, jnp.float8_e4m3fn).astype(F32)
        return _fp4_values(self.codes, scale, 16).astype(dtype)


def _fp4_values(codes: Array, scale: Array, size: int) -> Array:
    values = rounding.e2m1_decode(rounding.nibbles_unpack(codes))
    return (_groups(values, size) * scale[..., None]).reshape(values.shape)


def dequantized(weight: Array | Packed, dtype: jnp.dtype) -> Array:
    """The values of a weight, packed or plain, in ``dtype``."""
    return weight.dequantize(dtype) if isinstance(weight, Packed) else weight.astype(dtype)
