"""Carries out a plan on the device: the programs, the cache and the slots' numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from dsv41_jax.cache import Cache, CacheShape, kv_bytes_per_token
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from serving.batch import (
    NOBODY,
    Segment,
    build_rows,
    build_targets,
    by_rank,
    everything,
    page_tables,
)
from serving.buckets import Bucket, DecodeBatch, prefill_shape
from serving.forwards_speculative import Verified
from serving.handoff.mover import StateMover
from serving.kv_pool.mover import PageMover, Taken
from serving.kv_pool.remote import Complete
from serving.logit_rules import GENERATED, PROMPT
from serving.options import EngineOptions
from serving.programs import READERS, Programs, Report
from serving.replay import decoder_floor, window_floor
from serving.request import TokenLogprobs
from serving.sampler import RowScores, Sampled, Sampling
from serving.scheduler import Chunk, Plan, most_on_a_rank
from serving.sequence import Sequence, Stage
from serving.slots import SlotTable
from serving.table_rows import ENCODERS, TableRows
from sharding.place import Placement, rank_part


@dataclass
class InFlight:
    """What a step dispatched, and whose place is whose: sampled arrays, blocks with the number of
    drafts they were made for, and scores of prompt rows; reports of its sums over ranks. taken:
    requests that go on here, with the token that another engine sampled.
    """

    sampled: list[tuple[Sampled, list[Sequence | None]]] = field(default_factory=list)
    verified: list[tuple[Verified, list[Sequence | None], int]] = field(default_factory=list)
    scores: list[tuple[RowScores, list[Chunk | None]]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    taken: list[tuple[Sequence, TokenLogprobs]] = field(default_factory=list)

    @property
    def has_tokens(self) -> bool:
        return bool(self.sampled or self.verified)

    @property
    def arrays(self) -> list[Any]:
        """What the host will read."""
        found = [found[0] for found in (*self.sampled, *self.verified, *self.scores)]
        return found + [report.errors for report in self.reports]


class Executor:
    """The device side of the engine; ``run`` dispatches and waits for nothing but older saves.

    Data ranks run every program together, those without work on idle places: the rank with most
    decides the bucket. Inputs and outputs hold the places of one rank after those of the other.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        options: EngineOptions,
        placement: Placement | None = None,
        peers: str = "",
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
            peers=peers,
            speculation=options.speculation,
        )
        self.ranks = self.programs.ranks
        self.cache = self.programs.new_cache()
        self.kv_bytes_per_token = kv_bytes_per_token(self.cache, shape) / self.ranks
        self.table = SlotTable(
            self.cfg,
            options.slots,
            options.pages_per_request,
            stop_ids=options.max_stop_ids,
            bias_ids=options.max_bias_ids,
            ranks=self.ranks,
        )
        self.mover = PageMover(self.programs, options.kv_pool.batches if options.kv_pool else ())
        self.states = StateMover(self.programs)
        self._needed = options.programs(self.cfg.sliding_window)
        self._saving: list[Sequence] = []
        self._all_allowed: dict[int, jax.Array] = {}
        self.table_rows = TableRows(
            self.programs.host,
            ranks=self.ranks,
            lookback=self.cfg.engram_max_ngram_size - 1,
            device=self.programs.device,
        )

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program for every bucket and run each once without live rows."""
        for name, bucket in self._needed:
            if progress:
                progress(f"compile {name} {bucket.requests} x {bucket.rows}")
            self.programs.compile(name, bucket)
        for name, bucket in self._needed:
            self._run_idle(name, bucket)
        for report in self.programs.take_reports():
            report.check("warm-up")

    def _run_idle(self, name: str, bucket: Bucket) -> None:
        inputs = self.programs.idle_inputs(name, bucket)
        if self.programs.host and name in ENCODERS:
            whole = self._whole(bucket)
            inputs = *inputs[:-1], *self.table_rows.of_newest(whole, [])
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
        self.cache = self.mover.load(self.cache, plan.loads)
        for sequence in plan.taken:
            self.table.assign(sequence, replay=True)
        self._take_over(plan.taken, flight)
        self._prefill(plan.chunks, flight)
        if plan.decode and self.options.speculation is None:
            self._decode(plan.decode, flight)
        elif plan.decode:
            self._verify(plan.decode, plan.drafts, flight)
        flight.reports = self.programs.take_reports()
        return flight

    def take_pages(self, items: list[Complete]) -> Taken:
        """Pages as they are after the last step, on their way to the host."""
        return self.mover.take(self.cache, items)

    def take_state(self, rank: int, slot: int, length: int) -> jax.Array:
        """The state behind a prompt in a slot after the last step, on its way to the host."""
        return self.states.take(self.cache, rank, slot, length)

    def _take_over(self, sequences: list[Sequence], flight: InFlight) -> None:
        """Bring requests to where another engine left them; their prompts have been written."""
        for sequence in sequences:
            handed, sequence.handed = sequence.handed, None
            assert handed is not None and handed.record is not None
            self.table.update_pages(sequence)
            self.cache = self.states.put(self.cache, sequence, handed.record)
            if sequence.request.counts_tokens:
                self._set_counts(sequence, handed.record.token.token_id)
            flight.taken.append((sequence, handed.record.token))

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

    def _set_counts(self, sequence: Sequence, *tokens: int) -> None:
        """The prompt for the penalties, before the chunk whose token is the first to be kept, and
        ``tokens`` that have been.
        """
        counts = np.zeros((self.ranks, self.cfg.vocab_size), np.int32)
        counts[sequence.data_rank, sequence.prompt] = PROMPT
        for token in tokens:
            counts[sequence.data_rank, token] += GENERATED
        slot = self._slot(sequence.data_rank, sequence.slot)
        self.cache = self.programs("set_counts", self._one, self.cache, slot, counts)

    def _encode(self, chunks: list[Chunk]) -> None:
        bucket, places = self._prefill_places(chunks)
        rows = self._rows([self._chunk_rows(chunk) for chunk in places], bucket)
        self.cache = self.programs("encode", bucket, self.cache, rows, *self.table_rows.of(rows))

    def _prefill_full(self, chunks: list[Chunk], flight: InFlight) -> None:
        bucket, places = self._prefill_places(chunks)
        rows = self._rows([self._chunk_rows(chunk) for chunk in places], bucket)
        owners = [chunk.sequence if chunk and chunk.last else None for chunk in places]
        sampling = self._sampling(owners)
        inputs = rows, sampling, *self.table_rows.of(rows)
        self.cache, sampled = self.programs("prefill_full", bucket, self.cache, *inputs)
        self._keep(sampled, owners, flight)

    def _prefill_scored(self, chunks: list[Chunk], flight: InFlight) -> None:
        bucket, places = self._prefill_places(chunks)
        segments = [self._chunk_rows(chunk) for chunk in places]
        owners = [chunk.sequence if chunk and chunk.last else None for chunk in places]
        rows = self._rows(segments, bucket)
        targets = build_targets(segments, self._whole(bucket))
        inputs = rows, self._sampling(owners), targets, *self.table_rows.of(rows)
        self.cache, sampled, scores = self.programs("prefill_scored", bucket, self.cache, *inputs)
        flight.scores.append((scores, places))
        self._keep(sampled, owners, flight)

    def _replay(self, sequences: list[Sequence], flight: InFlight) -> None:
        count = self._enough(sequences, [requests for requests, _ in self.options.prefill])
        bucket = self.options.bucket(count, self.cfg.sliding_window)
        owners = by_rank(sequences, self.ranks, bucket.requests)
        rows = self._rows([self._replay_rows(sequence) for sequence in owners], bucket)
        sampling = self._sampling(owners)
        self.cache, sampled = self.programs("replay", bucket, self.cache, rows, sampling)
        handed = [sequence for sequence in sequences if sequence.handed is not None]
        self._keep(sampled, owners, flight)
        self._take_over(handed, flight)

    def _replay_rows(self, sequence: Sequence | None) -> Segment:
        if sequence is None:
            return NOBODY
        start = decoder_floor(sequence.length, self.cfg.sliding_window, replay=True)
        sequence.result.decoder_rows = sequence.length - start
        return self._segment(sequence, start, sequence.length)

    def _decode(self, sequences: list[Sequence], flight: InFlight) -> None:
        bucket, owners, batch, sampling = self._decode_inputs(sequences)
        inputs = batch, sampling, *self.table_rows.of_newest(self._whole(bucket), owners)
        self.cache, decoded = self.programs("decode", bucket, self.cache, *inputs)
        self._keep(decoded.sampled, owners, flight)

    def _verify(self, sequences: list[Sequence], drafts: int, flight: InFlight) -> None:
        """Draft and verify without the host in between; without drafts a row a request."""
        one, owners, batch, sampling = self._decode_inputs(sequences)
        ids: Any = np.zeros((len(owners), 0), np.int32)
        confidence: tuple = ()
        if drafts:
            made = self.programs("draft", replace(one, rows=drafts), self.cache, batch)
            ids = made.ids
            if self.options.speculation and self.options.speculation.budget:
                confidence = (made.confidence,)
        allowed = np.array([s.drafts(drafts) if s else 0 for s in owners], np.int32)
        inputs = batch, sampling, ids, allowed, *confidence
        bucket = replace(one, rows=1 + drafts)
        inputs = *inputs, *self.table_rows.of_newest(self._whole(bucket), owners, ids)
        self.cache, verified = self.programs("verify", bucket, self.cache, *inputs)
        for sequence in sequences:
            sequence.dispatch(sequence.drafts(drafts))
        flight.verified.append((verified, owners, drafts))

    def _decode_inputs(
        self, sequences: list[Sequence]
    ) -> tuple[Bucket, list[Sequence | None], DecodeBatch, Sampling]:
        for sequence in sequences:
            self.table.update_pages(sequence)
        bucket = self.options.bucket(self._enough(sequences, self.options.decode), 1)
        owners = by_rank(sequences, self.ranks, bucket.requests)
        batch, sampling = self.table.decode_inputs(owners)
        return bucket, owners, batch, self._with_grammars(sampling, owners)

    def _sampling(self, owners: list[Sequence | None]) -> Sampling:
        return self._with_grammars(self.table.sampling_of(owners), owners)

    def _with_grammars(self, sampling: Sampling, owners: list[Sequence | None]) -> Sampling:
        """The sampling with the ids that each row's grammar allows; bits travel to the device only
        if a row has a grammar. Where a grammar leaves nothing but stop ids, they may come before
        ``min_tokens``.
        """
        rules = sampling.rules
        assert rules is not None
        matchers = [(i, s, s.matcher) for i, s in enumerate(owners) if s and s.matcher]
        if not matchers:
            return replace(sampling, rules=replace(rules, allowed=self._all_ids(len(owners))))
        allowed = everything(len(owners), self.cfg.vocab_size)
        for row, sequence, matcher in matchers:
            allowed[row] = matcher.allowed
            request = sequence.request
            if request.min_tokens and matcher.allows_only(request.stop_ids):
                rules.min_position[row] = 0
        return replace(sampling, rules=replace(rules, allowed=allowed))

    def _all_ids(self, places: int) -> jax.Array:
        """``allowed`` of places without grammars, on the device since it was first needed."""
        if places not in self._all_allowed:
            array = everything(places, self.cfg.vocab_size)
            self._all_allowed[places] = self.programs.on_devices(array)
        return self._all_allowed[places]

    def _keep(self, sampled: Sampled, owners: list[Sequence | None], flight: InFlight) -> None:
        for sequence in owners:
            if sequence is not None:
                sequence.dispatch(0)
                sequence.stage = Stage.DECODE
        kept = [s if s and s.handed is None else None for s in owners]
        flight.sampled.append((sampled, kept))

    def _prefill_places(self, chunks: list[Chunk]) -> tuple[Bucket, list[Chunk | None]]:
        """The bucket of prompt chunks and where they stand in it; counts their rows."""
        shape = prefill_shape(self.options.prefill, *Plan(chunks=chunks).prefill)
        assert shape is not None, "the plan has chunks that no shape holds"
        for chunk in chunks:
            chunk.sequence.computed = chunk.stop
            chunk.sequence.result.encoder_rows += chunk.rows
            if not self.options.replay or chunk.sequence.request.prompt_logprobs is not None:
                chunk.sequence.result.decoder_rows += chunk.rows
        bucket = self.options.bucket(*shape)
        return bucket, by_rank(chunks, self.ranks, bucket.requests)

    def _enough(self, sequences: list[Sequence], sizes: Iterable[int]) -> int:
        """The smallest size that holds the requests of the data rank that has most."""
        most = most_on_a_rank(sequences)
        return min(size for size in sizes if size >= most)

    def _rows(self, segments: list[Segment], bucket: Bucket) -> Rows:
        return build_rows(segments, self._whole(bucket), self.cfg.engram_max_ngram_size - 1)

    def _whole(self, bucket: Bucket) -> Bucket:
        """The shapes of a bucket's inputs, which hold the places of all ranks."""
        return replace(bucket, requests=self.ranks * bucket.requests)

    def _chunk_rows(self, chunk: Chunk | None) -> Segment:
        return self._segment(chunk.sequence, chunk.start, chunk.stop) if chunk else NOBODY

    def _segment(self, sequence: Sequence, start: int, stop: int) -> Segment:
        floor = self.table.batch.decoder_floor[self.table.row(sequence)]
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
        saved, rank = sequence.saved, sequence.data_rank
        place = self._slot(rank, saved.slot), self._page_rows(rank, saved.pages)
        taken = self.programs("take_state", self._one, self.cache, *place)
        saved.state = rank_part(taken, rank, self.ranks)
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
        rank = sequence.data_rank
        self.table.assign(sequence, replay=self.options.replay)
        self.table.update_pages(sequence)
        place = self._slot(rank, sequence.slot), self._page_rows(rank, sequence.pages)
        state = self.programs.on_rank(sequence.saved.state, rank)
        self.cache = self.programs("put_state", self._one, self.cache, *place, state)
        sequence.saved = None

    def _slot(self, rank: int, slot: int) -> np.ndarray:
        """int32 [ranks]: the slot on its data rank, none on the others."""
        slots = np.full(self.ranks, -1, np.int32)
        slots[rank] = slot
        return slots

    def _page_rows(self, rank: int, pages: list[int]) -> np.ndarray:
        """int32 [ranks, P]: the pages on their data rank, none on the others."""
        mine = [pages if other == rank else () for other in range(self.ranks)]
        return page_tables(mine, self._whole(self._one))

    @property
    def _one(self) -> Bucket:
        return self.options.bucket(1, 1)
