"""Batches of a tokenised corpus as a function of the step alone, so that resuming is exact."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dsv41_jax.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """Documents one after another, each from a BOS to an EOS: uint16 [n] ids to train on and ids
    held out.
    """

    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def load(cls, path: str | Path, vocab_size: int) -> "Corpus":
        """Read a file that ``corpus`` wrote; UserError if it is another file, or of another
        vocabulary.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = {name: file[name] for name in ("train", "held_out")}
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: is not a tokenised corpus: {error}") from error
        for name, ids in parts.items():
            if ids.dtype != np.uint16 or ids.ndim != 1 or not ids.size:
                raise UserError(f"{path}: {name} must be uint16 [n], is {ids.dtype}{ids.shape}")
            if ids.max() >= vocab_size:
                raise UserError(f"{path}: token id {ids.max()} must be below {vocab_size=}")
        return cls(**parts)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.train.tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Batches:
    """Sequences of ``rows`` ids and the one behind them, ``count`` a step.

    Epoch e cuts the ids into sequences from an offset of its own and takes them in an order of its
    own; both come from (seed, e). Sequences run over document boundaries: a BOS marks them.
    """

    ids: np.ndarray
    rows: int
    count: int
    seed: int

    def __post_init__(self) -> None:
        if self.per_epoch < self.count:
            needed = self.rows * (self.count + 1) + 1
            raise UserError(f"{self.ids.size} training tokens: {needed} or more are needed")

    @property
    def per_epoch(self) -> int:
        """Sequences that fit behind any offset below ``rows``."""
        return (self.ids.size - 1) // self.rows - 1

    def step(self, step: int) -> np.ndarray:
        """int32 [count, rows + 1] of a step; the last sequences of an epoch that fill no batch
        are left out.
        """
        steps = self.per_epoch // self.count
        epoch, place = divmod(step, steps)
        offset, order = self._epoch(epoch)
        chosen = order[place * self.count : (place + 1) * self.count]
        starts = offset + chosen * self.rows
        return self.ids[starts[:, None] + np.arange(self.rows + 1)].astype(np.int32)

    def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        return int(rng.integers(self.rows)), rng.permutation(self.per_epoch)


def held_out_batches(ids: np.ndarray, rows: int, count: int, limit: int) -> list[np.ndarray]:
    """The first sequences int32 [count, rows + 1] of the held-out ids, ``limit`` batches at
    most.
    """
    per_batch = rows * count
    batches = min(limit, (ids.size - 1) // per_batch)
    if not batches:
        raise UserError(f"{ids.size} held-out tokens: {per_batch + 1} or more are needed")
    starts = rows * np.arange(batches * count).reshape(batches, count)
    index = starts[..., None] + np.arange(rows + 1)
    return list(ids[index].astype(np.int32))
