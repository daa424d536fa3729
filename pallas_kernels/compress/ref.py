"""Reference of the compressor's pooling."""

import jax
import jax.numpy as jnp
from jax import Array


def pool_pairs(u: Array, g: Array) -> Array:
    return jnp.sum(jax.nn.softmax(g, axis=-2) * u, axis=-2)
