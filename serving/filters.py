"""Top-k, top-p and min-p of a row of logits: by a sort, or by a search for where they cut.

A row's ids are ordered by falling logit, ids of equal logits by rising id; the filters keep a
beginning of that order. A sort of a vocabulary takes a GPU longer than the layers of a small batch,
so there the end is found digit by digit: scaled logits are at most 0, and the bits of their
absolute values, read as a number, rise along the order.
"""

import jax
import jax.numpy as jnp
from jax import Array

_BITS, _DIGIT = 32, 4
_NO_END = 2**_BITS - 1
_PART = 2048  # ids that one block of a GPU sorts in its shared memory


def kept(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """bool [B, V]: the ids of float32 logits [B, V], at most 0, that top_k int32 [B] (0: all), then
    top_p f32 [B] of what is left, then min_p f32 [B] leave. The id that crosses top_p stays, and
    the best id always does.
    """

    def filtered() -> Array:
        return jax.lax.platform_dependent(
            scaled, top_k, top_p, cpu=kept_by_sort, default=kept_by_search
        )

    asked = jnp.any((top_k > 0) | (top_p < 1))
    within = jax.lax.cond(asked, filtered, lambda: jnp.ones(scaled.shape, bool))
    return within & (scaled >= jnp.log(min_p)[:, None])


def kept_by_sort(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """``kept`` without min-p, as it is specified."""

    def of_row(scaled: Array, top_k: Array, top_p: Array) -> Array:
        order = jnp.argsort(-scaled, stable=True)
        rank = jnp.arange(scaled.shape[0])
        within_k = (top_k <= 0) | (rank < top_k)
        p = jax.nn.softmax(jnp.where(within_k, scaled[order], -jnp.inf))
        within_p = (jnp.cumsum(p) - p < top_p) | (rank == 0) | (top_p >= 1)
        return jnp.zeros(scaled.shape, bool).at[order].set(within_k & within_p)

    return jax.vmap(of_row)(scaled, top_k, top_p)


def kept_by_search(scaled: Array, top_k: Array, top_p: Array) -> Array:
    """``kept_by_sort`` but for the rounding of sums of probabilities; no loop, which would end the
    command buffer that a decode step is.
    """
    key = jax.lax.bitcast_convert_type(jnp.abs(scaled), jnp.uint32)
    rows, vocabulary = scaled.shape
    one, p = jnp.ones_like(scaled), jnp.exp(scaled)
    few = (top_k > 0) & (top_k < vocabulary)
    k = jnp.where(few, top_k, vocabulary).astype(jnp.float32)

    def of_k() -> tuple[Array, Array]:
        end = _end(key, one, k)
        # Rows without top-k have what they have if no row has it.
        return jnp.where(few, end, jnp.uint32(_NO_END)), jnp.where(
            few, k - _before(key, end, one), k
        )

    whole = jnp.full(rows, _NO_END, jnp.uint32), k
    end_k, left = jax.lax.cond(jnp.any(few), of_k, lambda: whole)
    # Ids of one key have the same p; of the last key top-k leaves ``left``.
    total = _before(key, end_k, p) + left * _each(key, end_k, p)
    target = jnp.where(top_p < 1, top_p, 2) * total
    end = jnp.minimum(_end(key, p, target), end_k)
    count = jnp.ceil((target - _before(key, end, p)) / _each(key, end, p))
    count = jnp.maximum(jnp.where(end == end_k, jnp.minimum(count, left), count), 1)
    equal = key == end[:, None]
    within = equal & (jnp.cumsum(equal, axis=1) <= count[:, None])
    return (key < end[:, None]) | within


def highest(values: Array, count: int) -> tuple[Array, Array]:
    """``jax.lax.top_k`` of f32 [..., V], for which XLA sorts whole rows: here parts of them are
    sorted first, and then what may be among the best.
    """
    vocabulary = values.shape[-1]
    parts = -(-vocabulary // _PART)
    if parts == 1 or count > _PART // 8:
        found, ids = jax.lax.top_k(values, count)
        return found, ids
    room = [(0, 0)] * (values.ndim - 1) + [(0, parts * _PART - vocabulary)]
    padded = jnp.pad(values, room, constant_values=-jnp.inf)
    some, at = jax.lax.top_k(padded.reshape(*values.shape[:-1], parts, _PART), count)
    ids = at + _PART * jnp.arange(parts)[:, None]
    found, place = jax.lax.top_k(some.reshape(*values.shape[:-1], -1), count)
    return found, jnp.take_along_axis(ids.reshape(*values.shape[:-1], -1), place, axis=-1)


def _end(key: Array, mass: Array, target: Array) -> Array:
    """uint32 [B]: the smallest key up to which the mass f32 [B, V] of a row reaches target f32 [B];
    the highest number if all of it does not.
    """
    end = jnp.zeros(target.shape, jnp.uint32)
    for shift in range(_BITS - _DIGIT, -1, -_DIGIT):
        edges = [(end + jnp.uint32(i << shift))[:, None] for i in range(1, 2**_DIGIT)]
        # All sums are one reduction, which reads the row once.
        parts = [jnp.where(key < edge, mass, 0) for edge in edges]
        sums = jax.lax.reduce(parts, [jnp.float32(0)] * len(parts), _added, (1,))
        below = sum((each < target).astype(jnp.uint32) for each in sums)
        end = end + (below << shift)
    return end


def _added(one: list[Array], other: list[Array]) -> list[Array]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _before(key: Array, end: Array, mass: Array) -> Array:
    """f32 [B]: the mass of smaller keys."""
    return jnp.sum(jnp.where(key < end[:, None], mass, 0), axis=1)


def _each(key: Array, end: Array, mass: Array) -> Array:
    """f32 [B]: the mass of one id of that key."""
    return jnp.max(jnp.where(key == end[:, None], mass, 0), axis=1)
