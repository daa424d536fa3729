"""A static batch from prompts to tokens: chunked encode, one replay, decode one step ahead of its
reader.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dsv41_jax.cache import CacheShape, kv_bytes_per_token
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from serving.batch import Segment, build_rows, build_sampling, page_tables
from serving.compile_counter import CompileCounter
from serving.pages import PagePool
from serving.programs import Bucket, DecodeBatch, Decoded, Programs
from serving.request import Request, Result, TokenLogprobs, check_request
from serving.sampler import Sampled, Sampling

OnToken = Callable[[int, TokenLogprobs], None]


@dataclass(frozen=True)
class RunnerOptions:
    """requests: batch places. max_tokens: prompt and new tokens of a request. chunk: most prompt
    rows a dispatch.

    replay: bounded replay (ARCHITECTURE section 17, decision 6); off runs every row through every
    layer.
    """

    requests: int = 1
    max_tokens: int = 4096
    page_size: int = 64
    chunk: int = 512
    replay: bool = True
    logprobs: int = 0
    max_stop_ids: int = 8

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_tokens // self.page_size)


class Runner:
    """Runs batches of at most ``options.requests`` requests over one model; compiles everything in
    ``warm_up``.
    """

    def __init__(
        self, model: Model, ops: Ops, options: RunnerOptions, programs: Programs | None = None
    ):
        """``programs``: of another runner over the same model and shapes, to share executables."""
        shape = CacheShape(
            options.requests, options.requests * options.pages_per_request, options.page_size
        )
        self.cfg, self.options = model.cfg, options
        self.programs = programs or Programs(
            model, ops, shape, logprobs=options.logprobs, max_stop_ids=options.max_stop_ids
        )
        if self.programs.shape != shape:
            raise ValueError(f"{self.programs.shape=} must be {shape}")
        self.cache = self.programs.new_cache()
        self.kv_bytes_per_token = kv_bytes_per_token(self.cache, shape)
        self.pages = PagePool(shape.pages)
        self.compiles = CompileCounter()

    def warm_up(self, rows: Sequence[int], progress: Callable[[str], None] | None = None) -> None:
        """Compile and run once what prompts of these lengths need; nothing compiles afterwards."""
        wanted = self._needed(rows)
        for name, bucket in wanted:
            if progress:
                progress(f"compile {name} {bucket.requests} x {bucket.rows}")
            self.programs.compile(name, bucket)
        for name, bucket in wanted:
            self._run_idle(name, bucket)
        self.compiles.start()

    def generate(
        self, requests: Sequence[Request], on_token: OnToken | None = None
    ) -> list[Result]:
        """Continue every prompt; ``on_token(index, token)`` sees tokens as they are read. UserError
        for a bad request.
        """
        self._check(requests)
        results = [Result() for _ in requests]
        began = time.perf_counter()
        with self._pages(requests) as pages:
            for index, token in self._tokens(requests, pages, results):
                result = results[index]
                elapsed = 1e3 * (time.perf_counter() - began)
                if result.token_ids:
                    result.tpot_ms = (elapsed - result.ttft_ms) / len(result.token_ids)
                else:
                    result.ttft_ms = elapsed
                result.add(token, requests[index])
                if on_token:
                    on_token(index, token)
        return results

    def _check(self, requests: Sequence[Request]) -> None:
        if not 1 <= len(requests) <= self.options.requests:
            raise UserError(
                f"{len(requests)} requests must be between 1 and {self.options.requests}"
            )
        for request in requests:
            check_request(request, self.cfg)
            total = len(request.prompt) + request.max_new_tokens
            limit = self.options.max_tokens
            if total > limit:
                raise UserError(f"{total} prompt and new tokens must be at most max_tokens={limit}")
            if len(request.stop_ids) > self.options.max_stop_ids:
                raise UserError(
                    f"{len(request.stop_ids)} stop ids must be at most {self.options.max_stop_ids}"
                )

    @contextmanager
    def _pages(self, requests: Sequence[Request]) -> Iterator[list[list[int]]]:
        """The pages of each request, given back whatever happens."""
        size = self.options.page_size
        counts = [
            -(-(len(request.prompt) + request.max_new_tokens) // size) for request in requests
        ]
        taken = self.pages.take(sum(counts))
        own = iter(taken)
        try:
            yield [[next(own) for _ in range(count)] for count in counts]
        finally:
            self.pages.give_back(taken)

    def _tokens(
        self, requests: Sequence[Request], pages: list[list[int]], results: list[Result]
    ) -> Iterator[tuple[int, TokenLogprobs]]:
        sampling = build_sampling(requests, self._bucket(1))
        first = self._prefill(requests, pages, sampling, results)
        yield from enumerate(first)
        batch = self._decode_batch(requests, pages, first)
        if not np.any(batch.active):
            return
        pending = self._decode(batch, sampling)
        while True:
            following = self._decode(pending.batch, sampling)
            yield from _read(pending)
            if not np.any(np.asarray(pending.batch.active)):
                return
            pending = following

    def _prefill(
        self,
        requests: Sequence[Request],
        pages: list[list[int]],
        sampling: Sampling,
        results: list[Result],
    ) -> list[TokenLogprobs]:
        """All prompts, chunk by chunk; the first token of each request."""
        firsts: list[TokenLogprobs | None] = [None] * len(requests)
        longest = max(len(request.prompt) for request in requests)
        for start in range(0, longest, self.options.chunk):
            segments = [
                self._segment(
                    request,
                    i,
                    pages[i],
                    start,
                    min(len(request.prompt), start + self.options.chunk),
                )
                for i, request in enumerate(requests)
            ]
            bucket = self._bucket(max(s.stop - s.start for s in segments))
            rows = build_rows(segments, bucket, self.cfg.engram_max_ngram_size - 1)
            sampled = None
            if self.options.replay:
                self.cache = self.programs("encode", bucket, self.cache, rows)
            else:
                self.cache, sampled = self.programs(
                    "prefill_full", bucket, self.cache, rows, sampling
                )
            for i, segment in enumerate(segments):
                results[i].encoder_rows += segment.stop - segment.start
                if sampled is not None:
                    results[i].decoder_rows += segment.stop - segment.start
                    if segment.start < segment.stop == len(requests[i].prompt):
                        firsts[i] = _token(sampled, i)
        if self.options.replay:
            return self._replay(requests, pages, sampling, results)
        return [first for first in firsts if first is not None]

    def _replay(
        self,
        requests: Sequence[Request],
        pages: list[list[int]],
        sampling: Sampling,
        results: list[Result],
    ) -> list[TokenLogprobs]:
        segments = []
        for i, request in enumerate(requests):
            n = len(request.prompt)
            segments.append(self._segment(request, i, pages[i], self._decoder_floor(request), n))
            results[i].decoder_rows = n - segments[-1].start
        bucket = self._bucket(self.cfg.sliding_window)
        rows = build_rows(segments, bucket, self.cfg.engram_max_ngram_size - 1)
        self.cache, sampled = self.programs("replay", bucket, self.cache, rows, sampling)
        return [_token(sampled, i) for i in range(len(requests))]

    def _decode(self, batch: DecodeBatch, sampling: Sampling) -> Decoded:
        self.cache, decoded = self.programs("decode", self._bucket(1), self.cache, batch, sampling)
        return decoded

    def _decode_batch(
        self, requests: Sequence[Request], pages: list[list[int]], first: list[TokenLogprobs]
    ) -> DecodeBatch:
        bucket = self._bucket(1)
        batch = DecodeBatch(
            slot=np.arange(bucket.requests, dtype=np.int32),
            position=np.zeros(bucket.requests, np.int32),
            active=np.zeros(bucket.requests, bool),
            page_table=page_tables(pages, bucket),
            floor=np.zeros(bucket.requests, np.int32),
            decoder_floor=np.zeros(bucket.requests, np.int32),
            stop_ids=np.full((bucket.requests, self.options.max_stop_ids), -1, np.int32),
            last_position=np.zeros(bucket.requests, np.int32),
        )
        for i, request in enumerate(requests):
            n = len(request.prompt)
            batch.position[i], batch.last_position[i] = n, n + request.max_new_tokens - 1
            batch.decoder_floor[i] = self._decoder_floor(request)
            batch.stop_ids[i, : len(request.stop_ids)] = request.stop_ids
            batch.active[i] = (
                request.max_new_tokens > 1 and first[i].token_id not in request.stop_ids
            )
        return batch

    def _segment(
        self, request: Request, slot: int, pages: list[int], start: int, stop: int
    ) -> Segment:
        floor = self._decoder_floor(request)
        return Segment(request.prompt, start, max(start, stop), slot, pages, decoder_floor=floor)

    def _decoder_floor(self, request: Request) -> int:
        return max(len(request.prompt) - self.cfg.sliding_window, 0) if self.options.replay else 0

    def _bucket(self, rows: int) -> Bucket:
        """Rows are rounded up to a power of two, at most the chunk; the window of a replay is its
        own bucket.
        """
        if rows not in (1, self.cfg.sliding_window):
            rows = min(1 << (rows - 1).bit_length(), self.options.chunk)
        return Bucket(self.options.requests, rows, self.options.pages_per_request)

    def _needed(self, prompt_rows: Sequence[int]) -> list[tuple[str, Bucket]]:
        prefill = "encode" if self.options.replay else "prefill_full"
        chunk = self.options.chunk
        chunks = {min(chunk, n - start) for n in prompt_rows for start in range(0, n, chunk)}
        needed = [
            (prefill, bucket)
            for bucket in dict.fromkeys(self._bucket(rows) for rows in sorted(chunks))
        ]
        if self.options.replay:
            needed.append(("replay", self._bucket(self.cfg.sliding_window)))
        return [*needed, ("decode", self._bucket(1))]

    def _run_idle(self, name: str, bucket: Bucket) -> None:
        """One run without live rows: it stores nothing, and compiles whatever a first call
        compiles.
        """
        out = self.programs(name, bucket, self.cache, *self.programs.idle_inputs(name, bucket))
        self.cache = out if name == "encode" else out[0]


def _token(sampled: Sampled, row: int) -> TokenLogprobs:
    return next(_host_tokens(sampled, [row]))


def _host_tokens(sampled: Sampled, rows: Sequence[int]) -> Iterator[TokenLogprobs]:
    arrays = (
        np.asarray(a)
        for a in (sampled.token, sampled.logprob, sampled.top_ids, sampled.top_logprobs)
    )
    token, logprob, top_ids, top_logprobs = arrays
    for row in rows:
        top = zip(top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True)
        yield TokenLogprobs(int(token[row]), float(logprob[row]), tuple(top))


def _read(decoded: Decoded) -> Iterator[tuple[int, TokenLogprobs]]:
    """The tokens of the rows that were active, step by step."""
    active = np.asarray(decoded.active)
    sampled = [np.asarray(a) for a in (decoded.sampled.token, decoded.sampled.logprob)]
    tops = [np.asarray(a) for a in (decoded.sampled.top_ids, decoded.sampled.top_logprobs)]
    for step in range(active.shape[0]):
        rows = np.flatnonzero(active[step]).tolist()
        one = Sampled(*(a[step] for a in (*sampled, *tops)))
        yield from zip(rows, _host_tokens(one, rows), strict=True)
