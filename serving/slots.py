"""Per-slot numbers of the running requests, kept as arrays so that a step's batch is one
indexing.
"""

from collections.abc import Sequence as Items

import jax
import numpy as np

from dsv41_jax.config import Config
from serving.batch import neutral_decode, neutral_sampling
from serving.buckets import DecodeBatch
from serving.replay import decoder_floor, window_floor
from serving.request import Request
from serving.sampler import Sampling
from serving.sequence import Sequence


class SlotTable:
    """Arrays of ``slots`` rows for each data rank and one neutral row after them that fills up a
    bucket.
    """

    def __init__(
        self, cfg: Config, slots: int, pages: int, *, stop_ids: int, bias_ids: int, ranks: int = 1
    ):
        rows = ranks * slots
        self.cfg, self.slots, self.neutral = cfg, slots, rows
        self.batch = neutral_decode(rows + 1, pages, stop_ids)
        self.batch.slot[:rows] = np.arange(rows) % slots
        self.batch.active[:rows] = True
        self.sampling = neutral_sampling(rows + 1, stop_ids, bias_ids)
        self.sampling.reports[:] = False
        self._pages = np.zeros(rows + 1, np.int32)

    def assign(self, sequence: Sequence, *, replay: bool) -> None:
        """Fill the row of a sequence's slot when it gets one."""
        row, request, n = self.row(sequence), sequence.request, sequence.length
        window = self.cfg.sliding_window
        self._pages[row] = 0
        self.batch.page_table[row] = -1
        self.batch.position[row] = max(sequence.next_position, n)
        self.batch.floor[row] = window_floor(sequence.hit, window)
        trimmed = replay and request.prompt_logprobs is None
        self.batch.decoder_floor[row] = decoder_floor(n, window, replay=trimmed)
        self.batch.last_position[row] = n + request.max_new_tokens - 1
        _fill(self.batch.stop_ids[row], request.stop_ids, -1)
        self._assign_sampling(row, request, n)

    def row(self, sequence: Sequence | None) -> int:
        """The row of a running sequence, the neutral one for None."""
        if sequence is None:
            return self.neutral
        return sequence.data_rank * self.slots + sequence.slot

    def _assign_sampling(self, row: int, request: Request, length: int) -> None:
        for name in ("temperature", "top_k", "top_p", "seed", "min_p"):
            getattr(self.sampling, name)[row] = getattr(request, name)
        self.sampling.reports[row] = bool(request.logprobs)
        rules = self.sampling.rules
        assert rules is not None
        rules.repetition[row] = request.repetition_penalty
        rules.frequency[row] = request.frequency_penalty
        rules.presence[row] = request.presence_penalty
        _fill(rules.bias_ids[row], [token for token, _ in request.logit_bias], -1)
        _fill(rules.bias[row], [bias for _, bias in request.logit_bias], 0)
        _fill(rules.stop_ids[row], request.stop_ids, -1)
        rules.min_position[row] = length + request.min_tokens

    def update_pages(self, sequence: Sequence) -> None:
        """Bring the page table of a sequence's slot up to date."""
        row, count = self.row(sequence), len(sequence.pages)
        known = self._pages[row]
        if count != known:
            self.batch.page_table[row, known:count] = sequence.pages[known:]
            self._pages[row] = count

    def decode_inputs(self, places: Items[Sequence | None]) -> tuple[DecodeBatch, Sampling]:
        """The rows of a decode step, neutral ones for None; moves the positions of its sequences on
        by one.
        """
        index = self._index(places)
        batch = jax.tree.map(lambda array: array[index], self.batch)
        self.batch.position[index[index != self.neutral]] += 1
        return batch, jax.tree.map(lambda array: array[index], self.sampling)

    def sampling_of(self, places: Items[Sequence | None]) -> Sampling:
        index = self._index(places)
        return jax.tree.map(lambda array: array[index], self.sampling)

    def _index(self, places: Items[Sequence | None]) -> np.ndarray:
        return np.array([self.row(sequence) for sequence in places], np.int32)


def _fill(row: np.ndarray, values, rest: float) -> None:
    row[:] = rest
    row[: len(values)] = values
