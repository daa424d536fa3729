"""RMSNorm (ARCHITECTURE 0.1)."""

import jax
import jax.numpy as jnp
from jax import Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x [..., D] times rsqrt(mean(x^2) + eps) times weight [D], in float32, cast once to x's
    dtype.
    """
    v = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    return (v * scale * weight.astype(jnp.float32)).astype(x.dtype)
