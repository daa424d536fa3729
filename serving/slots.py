"""Per-slot numbers of the running requests, kept as arrays so that a step's batch is one
indexing.
"""

import jax
import numpy as np

from dsv41_jax.config import Config
from serving.batch import neutral_decode, neutral_sampling
from serving.buckets import Bucket, DecodeBatch
from serving.replay import decoder_floor, window_floor
from serving.request import Request
from serving.sampler import Sampling
from serving.sequence import Sequence


class SlotTable:
    """Arrays of ``slots`` rows and one neutral row after them that fills up a bucket."""

    def __init__(self, cfg: Config, slots: int, pages: int, *, stop_ids: int, bias_ids: int):
        self.cfg, self.neutral = cfg, slots
        self.batch = neutral_decode(slots + 1, pages, stop_ids)
        self.batch.slot[:slots] = np.arange(slots)
        self.batch.active[:slots] = True
        self.sampling = neutral_sampling(slots + 1, stop_ids, bias_ids)
        self._pages = np.zeros(slots + 1, np.int32)

    def assign(self, sequence: Sequence, *, replay: bool) -> None:
        """Fill the row of a sequence's slot when it gets one."""
        slot, request, n = sequence.slot, sequence.request, sequence.length
        window = self.cfg.sliding_window
        self._pages[slot] = 0
        self.batch.page_table[slot] = -1
        self.batch.position[slot] = max(sequence.next_position, n)
        self.batch.floor[slot] = window_floor(sequence.hit, window)
        trimmed = replay and request.prompt_logprobs is None
        self.batch.decoder_floor[slot] = decoder_floor(n, window, replay=trimmed)
        self.batch.last_position[slot] = n + request.max_new_tokens - 1
        _fill(self.batch.stop_ids[slot], request.stop_ids, -1)
        self._assign_sampling(slot, request, n)

    def _assign_sampling(self, slot: int, request: Request, length: int) -> None:
        for name in ("temperature", "top_k", "top_p", "seed", "min_p"):
            getattr(self.sampling, name)[slot] = getattr(request, name)
        rules = self.sampling.rules
        assert rules is not None
        rules.repetition[slot] = request.repetition_penalty
        rules.frequency[slot] = request.frequency_penalty
        rules.presence[slot] = request.presence_penalty
        _fill(rules.bias_ids[slot], [token for token, _ in request.logit_bias], -1)
        _fill(rules.bias[slot], [bias for _, bias in request.logit_bias], 0)
        _fill(rules.stop_ids[slot], request.stop_ids, -1)
        rules.min_position[slot] = length + request.min_tokens

    def update_pages(self, sequence: Sequence) -> None:
        """Bring the page table of a sequence's slot up to date."""
        slot, count = sequence.slot, len(sequence.pages)
        known = self._pages[slot]
        if count != known:
            self.batch.page_table[slot, known:count] = sequence.pages[known:]
            self._pages[slot] = count

    def decode_inputs(self, slots: list[int], bucket: Bucket) -> tuple[DecodeBatch, Sampling]:
        """The rows of a decode step; moves the positions of these slots on by one."""
        index = self._index(slots, bucket)
        batch = jax.tree.map(lambda array: array[index], self.batch)
        self.batch.position[slots] += 1
        return batch, jax.tree.map(lambda array: array[index], self.sampling)

    def sampling_of(self, slots: list[int], bucket: Bucket) -> Sampling:
        index = self._index(slots, bucket)
        return jax.tree.map(lambda array: array[index], self.sampling)

    def _index(self, slots: list[int], bucket: Bucket) -> np.ndarray:
        return np.array(slots + [self.neutral] * (bucket.requests - len(slots)), np.int32)


def _fill(row: np.ndarray, values, rest: float) -> None:
    row[:] = rest
    row[: len(values)] = values
