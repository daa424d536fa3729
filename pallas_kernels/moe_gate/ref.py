"""Reference of ``moe_gate``."""

import jax
import jax.numpy as jnp
from jax import Array

F32 = jnp.float32


def scores(x: Array, weight: Array) -> Array:
    logits = jnp.einsum("...d,ed->...e", x.astype(F32), weight.astype(F32), precision="highest")
    return sqrt_softplus(logits)


def sqrt_softplus(logits: Array) -> Array:
    softplus = jnp.where(logits > 20, logits, jnp.log1p(jnp.exp(jnp.clip(logits, -20, 20))))
    # Below -20 softplus is exp to float32's last bit; its root does not underflow where exp would.
    return jnp.where(logits < -20, jnp.exp(logits / 2), jnp.sqrt(softplus))


def moe_gate(
    x: Array,
    weight: Array,
    bias: Array,
    bias_vl: Array | None = None,
    image: Array | None = None,
    live: Array | None = None,
    *,
    top_k: int,
    scale: float,
) -> tuple[Array, Array]:
    s = scores(x, weight)
    if image is not None:
        bias = jnp.where(image[..., None], bias_vl, bias)
    ids = jax.lax.top_k(s + bias, top_k)[1]
    picked = jnp.take_along_axis(s, ids, axis=-1)
    weights = picked / (jnp.sum(picked, axis=-1, keepdims=True) + 1e-20) * scale
    return ids if live is None else jnp.where(live[..., None], ids, -1), weights
