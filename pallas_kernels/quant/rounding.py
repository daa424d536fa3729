"""Rounding onto the E4M3, E2M1 and UE8M0 grids (ARCHITECTURE section 0.1)."""

import jax
import jax.numpy as jnp
from jax import Array

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def pow2ceil_byte(r: Array) -> Array:
    """UE8M0 byte of the smallest power of two >= ``r``: float32 > 0 in, uint8 out, from the bits
    alone.
    """
    bits = jax.lax.bitcast_convert_type(r.astype(jnp.float32), jnp.uint32)
    carry = (bits & 0x7FFFFF) != 0
    return ((bits >> 23) + carry.astype(jnp.uint32)).astype(jnp.uint8)


def ue8m0(byte: Array) -> Array:
    """2^(byte-127) as float32; byte 255 is NaN, byte 0 the subnormal 2^-127."""
    bits = byte.astype(jnp.uint32) << 23
    bits = jnp.where(byte == 0, jnp.uint32(0x00400000), bits)
    bits = jnp.where(byte == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e4m3(x: Array) -> Array:
    """Saturating round-to-nearest-even cast of float32 to float8_e4m3fn (a plain cast gives NaN
    above 464).
    """
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def e2m1_encode(x: Array, scale: Array | float = 1.0) -> Array:
    """E2M1 code (0..15, bit 3 = sign) of ``x / scale``, saturating at 6, ties to the even code;
    uint8.

    float32 ``x``; ``scale`` has at most four significant bits. The midpoints times the scale are
    then exact, and comparing with them equals a correctly rounded division; XLA would turn the
    division into a product with the reciprocal.
    """
    a = jnp.abs(x)
    above = (
        a > 0.25 * scale,
        a >= 0.75 * scale,
        a > 1.25 * scale,
        a >= 1.75 * scale,
        a > 2.5 * scale,
        a >= 3.5 * scale,
        a > 5.0 * scale,
    )
    code = sum(bit.astype(jnp.uint8) for bit in above)
    return code | (jnp.signbit(x).astype(jnp.uint8) << 3)


def e2m1_decode(code: Array) -> Array:
    """float32 value of an E2M1 code (only the low four bits count)."""
    mantissa = (code & 1).astype(jnp.int32)
    exponent = ((code >> 1) & 3).astype(jnp.int32)
    quarters = jnp.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent)
    magnitude = quarters.astype(jnp.float32) * 0.25
    return jnp.where((code & 8) != 0, -magnitude, magnitude)


def divide(x: Array, constant: float) -> Array:
    """Correctly rounded division; XLA turns a division by a visible constant into a product with
    its reciprocal.
    """
    return x / jax.lax.optimization_barrier(jnp.full_like(x, constant))


def nibbles_pack(codes: Array) -> Array:
    """uint8 codes [..., K] to bytes [..., K/2], even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def nibbles_unpack(data: Array) -> Array:
    """Bytes [..., K/2] to uint8 codes [..., K]."""
    pair = jnp.stack([data & 15, data >> 4], axis=-1)
    return pair.reshape(*data.shape[:-1], 2 * data.shape[-1])
