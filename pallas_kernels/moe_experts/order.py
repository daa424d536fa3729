"""The order of columns inside the fragments of ``repack``: of weights, and of the tokens that meet
them.

In a unit of 64 columns, columns c and 32 + c lie side by side, so that one packed multiply applies
the scales of both halves. A unit of 32 columns, at the end of a chunk, keeps its order.
"""

import jax.numpy as jnp
from jax import Array


def permute(x: Array, bk: int) -> Array:
    """Columns of x [..., K] in the order of fragments, chunks of ``bk`` columns."""
    return _swap(x, bk, (2, 32))


def restore(x: Array, bk: int) -> Array:
    """The inverse of ``permute``."""
    return _swap(x, bk, (32, 2))


def _swap(x: Array, bk: int, unit: tuple[int, int]) -> Array:
    lead, k = x.shape[:-1], x.shape[-1]
    full = bk // 64 * 64
    c = x.reshape(*lead, k // bk, bk)
    units = c[..., :full].reshape(*lead, k // bk, -1, *unit).swapaxes(-1, -2)
    units = units.reshape(*lead, k // bk, full)
    return jnp.concatenate([units, c[..., full:]], axis=-1).reshape(*lead, k)
