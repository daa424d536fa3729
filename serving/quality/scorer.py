"""Log probabilities of a known text from the serving programs, several requests at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.cache import Cache, CacheShape
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from serving.batch import Segment, build_rows, build_targets, neutral_sampling
from serving.buckets import Bucket
from serving.programs import Programs
from serving.replay import decoder_floor, window_floor


@dataclass(frozen=True)
class Score:
    """Of tokens of a text: nats float32 [n], negative log probabilities, and best int32 [n], the
    likeliest ids.
    """

    nats: np.ndarray
    best: np.ndarray

    def __getitem__(self, part: slice) -> "Score":
        return Score(self.nats[part], self.best[part])


NOTHING = Score(np.zeros(0, np.float32), np.zeros(0, np.int32))


def joined(scores: Sequence[Score]) -> Score:
    return Score(np.concatenate([s.nats for s in scores]), np.concatenate([s.best for s in scores]))


class Scorer:
    """Programs of one model and cache for ``requests`` texts of up to ``length`` tokens; dispatches
    take a window of rows a request. Slots from ``requests`` on are for prefix hits.
    """

    def __init__(self, model: Model, ops: Ops, *, requests: int, length: int):
        cfg = model.cfg
        self.window, self.requests, self.lookback = (
            cfg.sliding_window,
            requests,
            cfg.engram_max_ngram_size - 1,
        )
        self.page = self.window + self.window % 2
        self.bucket = Bucket(requests, self.window, -(-length // self.page))
        shape = CacheShape(2 * requests, requests * self.bucket.pages, self.page)
        self._rows = Programs(model, ops, shape, logprobs=1)
        # Every id's log probability, of a prompt's last row only.
        self._last = Programs(model, ops, shape, logprobs=cfg.vocab_size)
        self._sampling = neutral_sampling(requests, 0, None)

    def new_cache(self) -> Cache:
        return self._rows.new_cache()

    def prompt(self, place: int, ids: np.ndarray, stop: int) -> Segment:
        """The first ``stop`` ids of a text as a request on a place."""
        pages = self.bucket.pages
        return Segment(ids, 0, stop, place, tuple(range(place * pages, (place + 1) * pages)))

    def after_hit(self, prompt: Segment, hit: int) -> Segment:
        """A prompt of another slot that finds its first ``hit`` tokens cached (replay on the
        encoder's side): a window before the hit is computed again.
        """
        start = window_floor(hit, self.window)
        slot = prompt.slot + self.requests
        return replace(prompt, start=start, slot=slot, floor=start, write_from=hit)

    def trimmed(self, prompt: Segment) -> Segment:
        """A prompt under replay on the decoder's side."""
        return replace(prompt, decoder_floor=decoder_floor(prompt.stop, self.window, replay=True))

    def encoded(self, cache: Cache, prompts: Sequence[Segment]) -> Cache:
        """Layers up to the last KV source on every row of the prompts."""
        for part in self._chunks(prompts):
            cache = self._call(self._rows, "encode", cache, self._build(part))
        return cache

    def replayed(self, cache: Cache, prompts: Sequence[Segment]) -> tuple[Cache, list[Score]]:
        """The layers behind it on the prompts' last rows; scores of the token after each prompt."""
        starts = [max(prompt.stop - self.window, 0) for prompt in prompts]
        tails = [replace(p, start=start) for p, start in zip(prompts, starts, strict=True)]
        rows = self._build(tails)
        cache, sampled = self._call(self._last, "replay", cache, rows, self._sampling)
        ids, logprobs = np.asarray(sampled.top_ids), np.asarray(sampled.top_logprobs)
        found = []
        for i, prompt in enumerate(prompts):
            nats = -logprobs[i][ids[i] == prompt.tokens[prompt.stop]]
            found.append(Score(nats, ids[i, :1]))
        return cache, found

    def scored(self, cache: Cache, prompts: Sequence[Segment]) -> tuple[Cache, list[Score]]:
        """All layers on every row; scores of the tokens start + 1 .. stop of each prompt, of which
        all but the last are rows themselves.
        """
        parts = [[NOTHING] for _ in prompts]
        for chunk in self._chunks(prompts):
            inputs = self._build(chunk), self._sampling, build_targets(chunk, self.bucket)
            cache, _, scores = self._call(self._rows, "prefill_scored", cache, *inputs)
            logprob, best = np.asarray(scores.logprob), np.asarray(scores.top_ids)[..., 0]
            for i, segment in enumerate(chunk):
                rows = segment.stop - segment.start
                parts[i].append(Score(-logprob[i, :rows], best[i, :rows]))
        return cache, [joined(own) for own in parts]

    def continued(
        self, cache: Cache, prompts: Sequence[Segment], counts: Sequence[int]
    ) -> tuple[Cache, list[Score]]:
        """Replay of encoded prompts, then their next ``counts`` tokens as decode steps see them."""
        cache, first = self.replayed(cache, prompts)
        rows = [
            replace(p, start=p.stop, stop=p.stop + count - 1)
            for p, count in zip(prompts, counts, strict=True)
        ]
        cache, later = self.scored(cache, rows)
        return cache, [joined(both) for both in zip(first, later, strict=True)]

    def _build(self, segments: Sequence[Segment]) -> Rows:
        return build_rows(segments, self.bucket, self.lookback)

    def _call(self, programs: Programs, name: str, cache: Cache, *inputs: object) -> Any:
        programs.compile(name, self.bucket)
        return programs(name, self.bucket, cache, *inputs)

    def _chunks(self, prompts: Sequence[Segment]) -> Iterator[list[Segment]]:
        """A window of rows of each prompt at a time; one that is done has an empty segment."""
        done = [prompt.start for prompt in prompts]
        while any(at < p.stop for at, p in zip(done, prompts, strict=True)):
            ends = [min(at + self.window, p.stop) for at, p in zip(done, prompts, strict=True)]
            yield [
                replace(p, start=at, stop=end)
                for p, at, end in zip(prompts, done, ends, strict=True)
            ]
            done = ends


def copied(cache: Cache) -> Cache:
    """A cache that programs may consume while the original goes on."""
    return jax.tree.map(jnp.copy, cache)
