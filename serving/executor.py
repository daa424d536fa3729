"""Carries out a plan on the device: the programs, the cache and the slots' numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from dsv41_jax.cache import Cache, CacheShape, kv_bytes_per_token
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from serving.batch import Segment, build_rows, build_targets, everything
from serving.buckets import Bucket, DecodeBatch
from serving.forwards_speculative import Verified
from serving.logit_rules import PROMPT
from serving.programs import READERS, Programs
from serving.replay import decoder_floor, window_floor
from serving.sampler import RowScores, Sampled, Sampling
from serving.scheduler import Chunk, Plan
from serving.sequence import Sequence, Stage
from serving.slots import SlotTable
from serving.speculative import Speculation
from sharding.place import Placement


@dataclass(frozen=True)
class EngineOptions:
    """slots: running requests. pages: pages of the pool. max_tokens: prompt and new tokens of one
    request. prefill: (requests, rows) of prefill dispatches; decode: requests of decode dispatches,
    the largest must hold every slot. replay: bounded replay on both sides; off also means that no
    cached prefix is used. overlap: dispatch a step before the one before it is read. logprobs: most
    alternatives a token. prompt_logprobs: whether requests may ask for them (one program more a
    prefill shape). step_timeout_s: how long a step of a model that is spread over devices may take
    before it counts as stuck. speculation: None for plain decoding.
    """

    slots: int = 8
    pages: int = 256
    page_size: int = 64
    max_tokens: int = 4096
    prefill: tuple[tuple[int, int], ...] = ((1, 64), (1, 512))
    decode: tuple[int, ...] = (1, 8)
    replay: bool = True
    prefix_cache: bool = True
    overlap: bool = True
    logprobs: int = 20
    prompt_logprobs: bool = True
    max_stop_ids: int = 8
    max_bias_ids: int = 300
    step_timeout_s: float = 60.0
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if max(self.decode) < self.slots:
            raise ValueError(f"decode={self.decode} must reach slots={self.slots}")
        if any(rows < 1 or requests < 1 for requests, rows in self.prefill):
            raise ValueError(f"prefill={self.prefill} must be positive")

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_tokens // self.page_size)


@dataclass
class InFlight:
    """What a step dispatched: sampled arrays and whose row is whose, blocks with drafts and how
    many of them each owner took, and scores of prompt rows.
    """

    sampled: list[tuple[Sampled, list[Sequence | None]]] = field(default_factory=list)
    verified: list[tuple[Verified, list[tuple[Sequence, int]]]] = field(default_factory=list)
    scores: list[tuple[RowScores, list[Chunk]]] = field(default_factory=list)

    @property
    def arrays(self) -> list[Sampled | Verified | RowScores]:
        """What the host will read."""
        return [found for found, _ in (*self.sampled, *self.verified, *self.scores)]


class Executor:
    """The device side of the engine; ``run`` dispatches and waits for nothing but older saves."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        options: EngineOptions,
        placement: Placement | None = None,
    ):
        self.cfg, self.options = model.cfg, options
        shape = CacheShape(options.slots, options.pages, options.page_size)
        self.programs = Programs(
            model,
            ops,
            shape,
            logprobs=options.logprobs,
            max_stop_ids=options.max_stop_ids,
            max_bias_ids=options.max_bias_ids,
            placement=placement,
            speculation=options.speculation,
        )
        self.cache = self.programs.new_cache()
        self.kv_bytes_per_token = kv_bytes_per_token(self.cache, shape)
        self.table = SlotTable(
            self.cfg,
            options.slots,
            options.pages_per_request,
            stop_ids=options.max_stop_ids,
            bias_ids=options.max_bias_ids,
        )
        self._saving: list[Sequence] = []
        self._all_allowed: dict[int, jax.Array] = {}

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program for every bucket and run each once without live rows."""
        for name, bucket in self._everything():
            if progress:
                progress(f"compile {name} {bucket.requests} x {bucket.rows}")
            self.programs.compile(name, bucket)
        for name, bucket in self._everything():
            self._run_idle(name, bucket)

    def _run_idle(self, name: str, bucket: Bucket) -> None:
        inputs = self.programs.idle_inputs(name, bucket)
        if name == "put_state":  # puts back what it has just taken
            place = inputs[:2]
            state = self.programs("take_state", bucket, self.cache, *place)
            inputs = *place, jax.tree.map(np.asarray, state)
        out = self.programs(name, bucket, self.cache, *inputs)
        if name not in READERS:
            self.cache = out if isinstance(out, Cache) else out[0]

    def run(self, plan: Plan) -> InFlight:
        """Dispatch a step, in the plan's order."""
        flight = InFlight()
        self._move_saved_to_host()
        for sequence in plan.preempt:
            self._save(sequence)
        for sequence in plan.resume:
            self._restore(sequence)
        self._prefill(plan.chunks, flight)
        if plan.decode and self.options.speculation is None:
            self._decode(plan.decode, flight)
        elif plan.decode:
            self._verify(plan.decode, plan.drafts, flight)
        return flight

    def _prefill(self, chunks: list[Chunk], flight: InFlight) -> None:
        trimmed, full, scored = [], [], []
        for chunk in chunks:
            if chunk.sequence.result.encoder_rows == 0:
                self.table.assign(chunk.sequence, replay=self.options.replay)
            if chunk.last and chunk.sequence.request.counts_tokens:
                self._set_counts(chunk.sequence)
            self.table.update_pages(chunk.sequence)
            if chunk.sequence.request.prompt_logprobs is not None:
                scored.append(chunk)
            else:
                (trimmed if self.options.replay else full).append(chunk)
        if trimmed:
            self._encode(trimmed)
        if last := [chunk.sequence for chunk in trimmed if chunk.last]:
            self._replay(last, flight)
        if full:
            self._prefill_full(full, flight)
        if scored:
            self._prefill_scored(scored, flight)

    def _set_counts(self, sequence: Sequence) -> None:
        """The prompt for the penalties, before the chunk whose token is the first to be kept."""
        counts = np.zeros(self.cfg.vocab_size, np.int32)
        counts[sequence.prompt] = PROMPT
        slot = np.int32(sequence.slot)
        self.cache = self.programs("set_counts", self._one, self.cache, slot, counts)

    def _encode(self, chunks: list[Chunk]) -> None:
        bucket, rows, _ = self._prefill_inputs(chunks)
        self.cache = self.programs("encode", bucket, self.cache, rows)

    def _prefill_full(self, chunks: list[Chunk], flight: InFlight) -> None:
        bucket, rows, sampling = self._prefill_inputs(chunks)
        owners = [c.sequence if c.last else None for c in chunks]
        sampling = self._with_grammars("prefill_full", bucket, sampling, owners)
        self.cache, sampled = self.programs("prefill_full", bucket, self.cache, rows, sampling)
        self._keep(sampled, owners, flight)

    def _prefill_scored(self, chunks: list[Chunk], flight: InFlight) -> None:
        bucket, rows, sampling = self._prefill_inputs(chunks)
        targets = build_targets([(c.sequence.prompt, c.start, c.stop) for c in chunks], bucket)
        owners = [c.sequence if c.last else None for c in chunks]
        sampling = self._with_grammars("prefill_scored", bucket, sampling, owners)
        inputs = rows, sampling, targets
        self.cache, sampled, scores = self.programs("prefill_scored", bucket, self.cache, *inputs)
        flight.scores.append((scores, chunks))
        self._keep(sampled, owners, flight)

    def _replay(self, sequences: list[Sequence], flight: InFlight) -> None:
        window = self.cfg.sliding_window
        places = min(n for n, _ in self.options.prefill if n >= len(sequences))
        bucket = self._bucket(places, window)
        segments = []
        for sequence in sequences:
            start = decoder_floor(sequence.length, window, replay=True)
            segments.append(self._segment(sequence, start, sequence.length))
            sequence.result.decoder_rows = sequence.length - start
        rows = build_rows(segments, bucket, self.cfg.engram_max_ngram_size - 1)
        sampling = self.table.sampling_of([s.slot for s in sequences], bucket)
        sampling = self._with_grammars("replay", bucket, sampling, sequences)
        self.cache, sampled = self.programs("replay", bucket, self.cache, rows, sampling)
        self._keep(sampled, [*sequences], flight)

    def _decode(self, sequences: list[Sequence], flight: InFlight) -> None:
        bucket, batch, sampling = self._decode_inputs(sequences)
        sampling = self._with_grammars("decode", bucket, sampling, sequences)
        self.cache, decoded = self.programs("decode", bucket, self.cache, batch, sampling)
        self._keep(decoded.sampled, [*sequences], flight)

    def _verify(self, sequences: list[Sequence], drafts: int, flight: InFlight) -> None:
        """Draft and verify without the host in between; without drafts a row a request."""
        one, batch, sampling = self._decode_inputs(sequences)
        ids: Any = np.zeros((one.requests, 0), np.int32)
        if drafts:
            ids = self.programs("draft", replace(one, rows=drafts), self.cache, batch).ids
        owners = [(sequence, sequence.drafts(drafts)) for sequence in sequences]
        allowed = np.zeros(one.requests, np.int32)
        allowed[: len(owners)] = [own for _, own in owners]
        bucket = replace(one, rows=1 + drafts)
        sampling = self._with_grammars("verify", bucket, sampling, sequences)
        inputs = batch, sampling, ids, allowed
        self.cache, verified = self.programs("verify", bucket, self.cache, *inputs)
        for sequence, own in owners:
            sequence.dispatch(own)
        flight.verified.append((verified, owners))

    def _decode_inputs(self, sequences: list[Sequence]) -> tuple[Bucket, DecodeBatch, Sampling]:
        for sequence in sequences:
            self.table.update_pages(sequence)
        places = min(n for n in self.options.decode if n >= len(sequences))
        bucket = self._bucket(places, 1)
        return bucket, *self.table.decode_inputs([s.slot for s in sequences], bucket)

    def _with_grammars(
        self, name: str, bucket: Bucket, sampling: Sampling, owners: Iterable[Sequence | None]
    ) -> Sampling:
        """The sampling with the ids that each row's grammar allows; bits travel to the device only
        if a row has a grammar. Where a grammar leaves nothing but stop ids, they may come before
        ``min_tokens``.
        """
        rules = sampling.rules
        assert rules is not None
        matchers = [(i, s, s.matcher) for i, s in enumerate(owners) if s and s.matcher]
        if not matchers:
            return replace(sampling, rules=replace(rules, allowed=self._all_ids(name, bucket)))
        allowed = everything(bucket.requests, self.cfg.vocab_size)
        for row, sequence, matcher in matchers:
            allowed[row] = matcher.allowed
            request = sequence.request
            if request.min_tokens and matcher.allows_only(request.stop_ids):
                rules.min_position[row] = 0
        return replace(sampling, rules=replace(rules, allowed=allowed))

    def _all_ids(self, name: str, bucket: Bucket) -> jax.Array:
        """``allowed`` of a batch without grammars, on the device since it was first needed."""
        if bucket.requests not in self._all_allowed:
            inputs = self.programs.executables[name, bucket].input_shardings[0]
            array = everything(bucket.requests, self.cfg.vocab_size)
            self._all_allowed[bucket.requests] = jax.device_put(array, inputs[3].rules.allowed)
        return self._all_allowed[bucket.requests]

    def _keep(self, sampled: Sampled, owners: list[Sequence | None], flight: InFlight) -> None:
        for sequence in owners:
            if sequence is not None:
                sequence.dispatch(0)
                sequence.stage = Stage.DECODE
        flight.sampled.append((sampled, owners))

    def _prefill_inputs(self, chunks: list[Chunk]) -> tuple:
        """Bucket, rows and sampling of prompt chunks; counts their rows."""
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        fits = [(n, t) for n, t in self.options.prefill if n >= len(chunks) and t >= longest]
        bucket = self._bucket(*min(fits, key=lambda shape: shape[0] * shape[1]))
        segments = [self._segment(c.sequence, c.start, c.stop) for c in chunks]
        for chunk in chunks:
            chunk.sequence.computed = chunk.stop
            chunk.sequence.result.encoder_rows += chunk.stop - chunk.start
            if not self.options.replay or chunk.sequence.request.prompt_logprobs is not None:
                chunk.sequence.result.decoder_rows += chunk.stop - chunk.start
        rows = build_rows(segments, bucket, self.cfg.engram_max_ngram_size - 1)
        return bucket, rows, self.table.sampling_of([c.sequence.slot for c in chunks], bucket)

    def _segment(self, sequence: Sequence, start: int, stop: int) -> Segment:
        floor = self.table.batch.decoder_floor[sequence.slot]
        return Segment(
            sequence.prompt,
            start,
            stop,
            sequence.slot,
            sequence.pages,
            floor=window_floor(sequence.hit, self.cfg.sliding_window),
            decoder_floor=int(floor),
            write_from=sequence.hit,
        )

    def _save(self, sequence: Sequence) -> None:
        saved = sequence.saved
        place = np.int32(saved.slot), self._page_row(saved.pages)
        saved.state = self.programs("take_state", self._one, self.cache, *place)
        for array in jax.tree.leaves(saved.state):
            array.copy_to_host_async()
        self._saving.append(sequence)

    def _move_saved_to_host(self) -> None:
        """Let go of the device arrays of the step before, whose copies are under way since then."""
        for sequence in self._saving:
            if sequence.saved is not None:
                sequence.saved.state = jax.tree.map(np.asarray, sequence.saved.state)
        self._saving.clear()

    def _restore(self, sequence: Sequence) -> None:
        saved = sequence.saved
        self.table.assign(sequence, replay=self.options.replay)
        self.table.update_pages(sequence)
        place = np.int32(sequence.slot), self._page_row(sequence.pages)
        self.cache = self.programs("put_state", self._one, self.cache, *place, saved.state)
        sequence.saved = None

    def _page_row(self, pages: list[int]) -> np.ndarray:
        row = np.full(self.options.pages_per_request, -1, np.int32)
        row[: len(pages)] = pages
        return row

    @property
    def _one(self) -> Bucket:
        return self._bucket(1, 1)

    def _bucket(self, requests: int, rows: int) -> Bucket:
        return Bucket(requests, rows, self.options.pages_per_request)

    def _everything(self) -> list[tuple[str, Bucket]]:
        options = self.options
        shapes = [self._bucket(*shape) for shape in options.prefill]
        names = ["encode"] if options.replay else ["prefill_full"]
        if options.prompt_logprobs:
            names.append("prefill_scored")
        wanted = [(name, bucket) for name in names for bucket in shapes]
        if options.replay:
            places = sorted({requests for requests, _ in options.prefill})
            window = self.cfg.sliding_window
            wanted += [("replay", self._bucket(count, window)) for count in places]
        wanted += self._decoding()
        return wanted + [(name, self._one) for name in ("take_state", "put_state", "set_counts")]

    def _decoding(self) -> list[tuple[str, Bucket]]:
        """What decode steps need: with speculation, drafts wherever so few requests may decode."""
        ones = [self._bucket(count, 1) for count in sorted(self.options.decode)]
        speculation = self.options.speculation
        if speculation is None:
            return [("decode", one) for one in ones]
        wanted = [("verify", one) for one in ones]
        fewer = [0, *(one.requests for one in ones)]
        for one, below in zip(ones, fewer, strict=False):
            if below < speculation.max_batch:
                wanted.append(("draft", replace(one, rows=speculation.length)))
                wanted.append(("verify", replace(one, rows=1 + speculation.length)))
        return wanted
