"""Carries the state of a hand-off between its record and a slot."""

from typing import Any

import jax
import numpy as np

from dsv41_jax.cache import Cache
from serving.buckets import Bucket
from serving.handoff.options import WINDOWS
from serving.handoff.record import Record
from serving.handoff.state import state_bytes
from serving.programs import Programs
from serving.sequence import Sequence
from sharding.place import rank_part

_ONE = Bucket(1, 1, 1)


class StateMover:
    """Dispatches ``take_windows``, ``put_windows`` and ``put_token``; waits for nothing."""

    def __init__(self, programs: Programs):
        self._programs = programs

    def take(self, cache: Cache, rank: int, slot: int, length: int) -> jax.Array:
        """uint8 [1, bytes] of a slot of a data rank, on its way to the host."""
        inputs = self._on(rank, slot, -1), self._on(rank, length, 0)
        taken = self._programs("take_windows", _ONE, cache, *inputs)
        row = rank_part(taken, rank, self._programs.ranks)
        row.copy_to_host_async()
        return row

    def put(self, cache: Cache, sequence: Sequence, record: Record) -> Cache:
        """The cache with what a record holds in the slot of a sequence, whose pages are there."""
        rank = sequence.data_rank
        slot = self._on(rank, sequence.slot, -1)
        token = self._on(rank, record.token.token_id, 0)
        if record.form != WINDOWS:
            return self._programs("put_token", _ONE, cache, slot, token)
        length = self._on(rank, sequence.length, 0)
        before = self._history(sequence.prompt, cache.history.shape[1])
        row = np.zeros((1, state_bytes(cache)[0]), np.uint8)
        kept = min(record.state.size, row.size)
        row[0, :kept] = record.state[:kept]
        drafted = np.full(self._programs.ranks, kept == row.size)
        history = np.tile(before, (self._programs.ranks, 1))
        values = self._programs.on_rank(row, rank)
        inputs = slot, length, token, history, drafted, values
        return self._programs("put_windows", _ONE, cache, *inputs)

    def _history(self, prompt: np.ndarray, count: int) -> np.ndarray:
        """int32 [count]: the last ids of a prompt, -1 before its first."""
        padded = np.concatenate([np.full(count, -1, np.int32), prompt])
        return padded[len(padded) - count :]

    def _on(self, rank: int, value: int, others: int) -> Any:
        """int32 [ranks]: a value on its data rank."""
        values = np.full(self._programs.ranks, others, np.int32)
        values[rank] = value
        return values
