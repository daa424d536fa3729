"""Rotary embedding of the last dims of a head, interleaved pairs (ARCHITECTURE 4.1)."""

import jax.numpy as jnp
from jax import Array


def rotate(x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> Array:
    """Rotate the last ``2 * cos.shape[-1]`` dims of ``x``: pairs (2i, 2i+1) are one complex number.

    x [..., K]; cos, sin float32 [..., Rd/2], broadcast against the leading axes of x. Computed in
    float32, returned in x's dtype. ``inverse`` multiplies by the conjugate.
    """
    rope_dim = 2 * cos.shape[-1]
    tail = x[..., -rope_dim:].astype(jnp.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    if inverse:
        sin = -sin
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    turned = turned.reshape(*turned.shape[:-2], rope_dim).astype(x.dtype)
    return jnp.concatenate([x[..., :-rope_dim], turned], axis=-1)
