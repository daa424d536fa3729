"""Engram's hash constants (ARCHITECTURE 9.2) and its exact hashes on the host (9.3)."""

from dataclasses import dataclass

import numpy as np

from dsv41_jax.config import Config
from pallas_kernels.engram.hash import BARRIER, split_words

_SEED = 10007


@dataclass(frozen=True)
class HashConstants:
    """What turns the compressed ids of one Engram layer into rows of its table.

    multipliers: N odd numbers below 2^63 / engram_compressed_vocab_size, one for each lookback.
    primes: [N-1][heads], the extent of each column's part of the table; offsets: where each begins.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, cfg: Config, layer_id: int) -> "HashConstants":
        """Constants of one of cfg.engram_layer_ids; ValueError for another layer."""
        if layer_id not in cfg.engram_layer_ids:
            raise ValueError(f"{layer_id=} must be one of {cfg.engram_layer_ids}")
        index = cfg.engram_layer_ids.index(layer_id)
        primes = cfg.engram_primes[index]
        ends = np.cumsum(np.array(primes, np.int64).ravel())
        assert ends[-1] == cfg.engram_num_embeddings[index]  # Config has checked it
        return cls(
            multipliers=_multipliers(
                layer_id, cfg.engram_max_ngram_size, cfg.engram_compressed_vocab_size
            ),
            primes=primes,
            offsets=(0, *ends[:-1].tolist()),
        )

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.offsets[-1] + self.primes[-1][-1]

    def device_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The last four arguments of `pallas_kernels.engram.hash.ngram_rows`, as 32-bit arrays."""
        hi, lo = split_words(np.array(self.multipliers, np.int64))
        return hi, lo, np.array(self.primes, np.uint32), np.array(self.offsets, np.int32)


def hash_rows_host(
    ids: np.ndarray,
    dead: np.ndarray,
    constants: HashConstants,
    token_map: np.ndarray,
    pad: int,
    previous: np.ndarray | None = None,
) -> np.ndarray:
    """Table rows int32 [..., T, (N-1) * heads] of T consecutive tokens of one sequence or of many.

    ids: int [..., T] raw token ids; dead: bool [..., T], True inside image spans. An id outside the
    token map is dead, too. token_map, pad: from `dsv41_jax.tokenizer.token_map`.
    previous: int [..., N-1], the raw ids just before, oldest first, -1 for none or for a dead
    token; None at the start of sequences.
    """
    if ids.ndim < 1 or dead.shape != ids.shape:
        raise ValueError(f"{ids.shape=} and {dead.shape=} must be equal, of some dimension")
    *lead, count = ids.shape
    before = (*lead, len(constants.multipliers) - 1)
    if previous is None:
        previous = np.full(before, BARRIER)
    if previous.shape != before:
        raise ValueError(f"{previous.shape=} must be {before}")
    history = np.concatenate([previous, np.where(dead, BARRIER, ids.astype(np.int64))], axis=-1)
    compressed = _compress(token_map, history)
    alive = np.ones(ids.shape, bool)
    acc = np.zeros(ids.shape, np.int64)
    columns = []
    for back, multiplier in enumerate(constants.multipliers):
        first = before[-1] - back
        token = compressed[..., first : first + count]
        alive &= token != BARRIER
        acc ^= np.where(alive, token, pad) * multiplier
        if back:
            columns.append(acc[..., None] % np.array(constants.primes[back - 1], np.int64))
    return (np.concatenate(columns, axis=-1) + constants.offsets).astype(np.int32)


def _compress(token_map: np.ndarray, ids: np.ndarray) -> np.ndarray:
    known = (ids >= 0) & (ids < len(token_map))
    return np.where(known, token_map[np.where(known, ids, 0)], BARRIER).astype(np.int64)


def _multipliers(layer_id: int, count: int, vocabulary: int) -> tuple[int, ...]:
    limit = max(1, (2**63 - 1) // vocabulary // 2)
    draws = np.random.default_rng(_SEED * layer_id).integers(0, limit, size=count, dtype=np.int64)
    return tuple(2 * int(draw) + 1 for draw in draws)
