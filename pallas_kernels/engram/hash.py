"""Engram n-gram hashes on the device (ARCHITECTURE 9.3), exact in 32-bit integers.

64-bit integers exist in JAX only while jax_enable_x64 is on, and floats would lose bits of the
multipliers, so a 64-bit word is two uint32 here.
"""

import jax
import jax.numpy as jnp
import numpy as np

BARRIER = (
    -1
)  # compressed id of what ends every n-gram: the start of a sequence, a dead or foreign token


def compress_ids(token_map: jax.Array | np.ndarray, ids: jax.Array) -> jax.Array:
    """Compressed ids int32 [...] of token ids int32 [...]; `token_map` is int32 [vocabulary].

    An id outside the vocabulary (padding, placeholders) gives BARRIER and never forms an index.
    """
    known = (ids >= 0) & (ids < token_map.shape[0])
    return jnp.where(known, jnp.asarray(token_map)[jnp.where(known, ids, 0)], BARRIER)


def split_words(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low uint32 words of non-negative int64 `values`, on the host."""
    words = np.asarray(values, np.int64).astype(np.uint64)
    return (words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32)


def ngram_rows(
    compressed: jax.Array,
    pad: jax.Array | int,
    multipliers_hi: jax.Array | np.ndarray,
    multipliers_lo: jax.Array | np.ndarray,
    primes: jax.Array | np.ndarray,
    offsets: jax.Array | np.ndarray,
) -> jax.Array:
    """Table rows of every position's 2- to N-grams (ARCHITECTURE 9.3).

    compressed: int32 [..., N-1 + T], compressed ids of the N-1 tokens before the rows and of the
        rows; BARRIER for a position before the start of the sequence and for a dead token. What
        lies behind a barrier counts as `pad`, the barrier included.
    pad: compressed padding id.
    multipliers_hi, multipliers_lo: uint32 [N], the words of multipliers below 2^63 / vocabulary.
    primes: uint32 [N-1, heads], below 2^24. offsets: int32 [(N-1) * heads].
    Returns int32 [..., T, (N-1) * heads], columns ordered by n-gram size, then head. A barrier row
    gives the rows of an all-padding n-gram, which exist in the table.
    """
    longest = multipliers_hi.shape[0]
    rows = compressed.shape[-1] - (longest - 1)
    pad = jnp.asarray(pad, jnp.int32)
    alive = jnp.ones((*compressed.shape[:-1], rows), bool)
    acc_hi = acc_lo = jnp.zeros(alive.shape, jnp.uint32)
    by_size = []
    for back in range(longest):
        first = longest - 1 - back
        token = compressed[..., first : first + rows]
        alive = alive & (token >= 0)
        word = jnp.where(alive, token, pad).astype(jnp.uint32)
        hi, lo = _multiply(word, multipliers_hi[back], multipliers_lo[back])
        acc_hi, acc_lo = acc_hi ^ hi, acc_lo ^ lo
        if back:
            by_size.append(_remainder(acc_hi[..., None], acc_lo[..., None], primes[back - 1]))
    return jnp.concatenate(by_size, axis=-1).astype(jnp.int32) + jnp.asarray(offsets, jnp.int32)


def _multiply(
    word: jax.Array, hi: jax.Array | np.uint32, lo: jax.Array | np.uint32
) -> tuple[jax.Array, jax.Array]:
    """uint32 times a 64-bit word; the product has to fit 64 bits."""
    low, high = word & 0xFFFF, word >> 16
    lo_low, lo_high = lo & 0xFFFF, lo >> 16
    bottom = low * lo_low
    middle = low * lo_high + (bottom >> 16)
    cross = high * lo_low + (middle & 0xFFFF)
    top = high * lo_high + (middle >> 16) + (cross >> 16)
    return top + word * hi, (cross << 16) | (bottom & 0xFFFF)


def _remainder(hi: jax.Array, lo: jax.Array, prime: jax.Array | np.ndarray) -> jax.Array:
    """The 64-bit word (hi, lo) modulo `prime`, byte by byte: below 2^24, so a step fits 32 bits."""
    prime = jnp.asarray(prime, jnp.uint32)
    rest = jnp.zeros((), jnp.uint32)
    for word in (hi, lo):
        for shift in (24, 16, 8, 0):
            rest = ((rest << 8) | ((word >> shift) & 0xFF)) % prime
    return rest
