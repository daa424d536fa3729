"""The engine: continuous batching, a step dispatched before the one before it is read."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv41_jax.dspark import check_block_size
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.tokenizer import Tokenizer
from serving.compile_counter import CompileCounter
from serving.executor import Executor, InFlight
from serving.forwards_speculative import Verified
from serving.handoff.leaving import Departures
from serving.handoff.options import check_handoff
from serving.kv_pool.connect import open_tier
from serving.options import EngineOptions
from serving.output import TextOutput
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.ranks import assign, plan_step
from serving.request import Request, TokenLogprobs, check_request
from serving.scheduler import Limits, Scheduler
from serving.sequence import Sequence, Stage
from serving.speculative import Acceptance
from serving.tokens import host_blocks, host_tokens, prompt_tokens
from sharding.place import Placement
from sharding.watchdog import Watchdog

if TYPE_CHECKING:  # llguidance is there for who uses grammars
    from serving.grammars import Grammars


# Nothing runs until a page comes, but a new request may.
_POOL_WAIT_S = 0.001


@dataclass(frozen=True)
class Event:
    """A token of a sequence and the text it lets out; ``finished`` with the last one."""

    sequence: Sequence
    token: TokenLogprobs
    text: str
    finished: bool


OnToken = Callable[[int, Event], None]


class Engine:
    """Runs requests to their end. One thread calls ``add``, ``abort`` and ``step``. Each of
    ``ranks`` holds the requests, slots and pages of a data rank; what has begun stays on its rank.
    failed: requests that the last step ended without an event, shared with another engine in vain.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        options: EngineOptions,
        tokenizer: Tokenizer | None = None,
        executables: dict | None = None,
        grammars: "Grammars | None" = None,
        placement: Placement | None = None,
        peers: str = "",
    ):
        """``executables``: ``executor.programs.executables`` of an engine over the same model and
        options but for switches, to share what it compiled. ``grammars``: those of the tokenizer,
        if requests may have one. ``placement``: of a model that is spread over devices;
        ``peers``: of ``peer_kernels``, if ``ops`` are built for "peer".
        """
        self.cfg, self.options, self.tokenizer = model.cfg, options, tokenizer
        self.grammars = grammars
        if options.speculation is not None:
            check_block_size(model.cfg, speculation=True)
            if not model.mtp:
                raise UserError("speculation: the checkpoint has no complete mtp.* stages")
        self.executor = Executor(model, ops, options, placement, peers)
        self.watchdog = Watchdog(options.step_timeout_s) if placement else None
        self.steps_read = 0
        if executables is not None:
            self.executor.programs.executables = executables
        self.kv_pool = open_tier(options, self.executor) if options.kv_pool else None
        self.departures: Departures | None = None
        if self.kv_pool is not None and options.handoff is not None:
            self.departures = Departures(self.kv_pool, options.handoff.form, self.executor)
        self.failed: list[Sequence] = []
        self.ranks = [self._new_rank() for _ in range(self.executor.ranks)]
        self.compiles = CompileCounter()
        self.acceptance = Acceptance()
        self.pending: InFlight | None = None
        self._arrivals = 0

    def _new_rank(self) -> Scheduler:
        """A data rank with all of its slots and pages free."""
        options = self.options
        limits = Limits(
            slots=options.slots,
            page_size=options.page_size,
            window=self.cfg.sliding_window,
            prefill=tuple(sorted(options.prefill)),
            replay=options.replay,
            prefix_cache=options.prefix_cache,
            drafts=options.speculation.length if options.speculation else 0,
            max_drafting=options.speculation.max_batch if options.speculation else 0,
        )
        pool = PagePool(options.pages)
        return Scheduler(limits, pool, PrefixCache(pool, options.page_size), self.kv_pool)

    def warm_up(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile everything; nothing compiles afterwards."""
        self.executor.warm_up(progress)
        self.compiles.start()

    def add(self, request: Request, priority: int = 0, data_rank: int | None = None) -> Sequence:
        """Queue a request, smaller ``priority`` first, on any data rank or a given one. UserError
        names the field that is wrong.
        """
        self.check_request(request)
        return self.add_checked(request, priority, data_rank)

    def add_checked(
        self, request: Request, priority: int = 0, data_rank: int | None = None
    ) -> Sequence:
        """Queue a request that ``check_request`` has passed."""
        sequence = Sequence.of(request, self._arrivals, priority)
        if self.tokenizer is not None:
            sequence.output = TextOutput(self.tokenizer, request.stop)
        sequence.queued_at = time.perf_counter()
        self._arrivals += 1
        assign(self.ranks, sequence, data_rank)
        return sequence

    def run(self, requests: Iterable[Request], on_token: OnToken | None = None) -> list[Sequence]:
        """Add requests and step until they are done; ``on_token(index, event)`` sees their tokens.
        UserError, before anything runs, if one of them is wrong.
        """
        requests = list(requests)
        for request in requests:
            self.check_request(request)
        sequences = [self.add_checked(request) for request in requests]
        try:
            while any(sequence.stage is not Stage.DONE for sequence in sequences):
                for event in self.step():
                    if on_token and event.sequence in sequences:
                        on_token(sequences.index(event.sequence), event)
        finally:
            for sequence in sequences:
                self.abort(sequence)
        return sequences

    def check_request(self, request: Request) -> None:
        """UserError for a request that this engine cannot run."""
        check_request(request, self.cfg)
        check_handoff(request, self.options.handoff)
        options = self.options
        total = len(request.prompt) + request.max_new_tokens
        limits = [
            ("prompt and new tokens", total, options.max_tokens),
            ("prompt and new tokens", total, options.pages * options.page_size),
            ("stop_ids", len(request.stop_ids), options.max_stop_ids),
            ("logit_bias ids", len(request.logit_bias), options.max_bias_ids),
            ("logprobs", request.logprobs or 0, options.logprobs),
            ("prompt_logprobs", request.prompt_logprobs or 0, options.logprobs),
        ]
        for name, value, limit in limits:
            if value > limit:
                raise UserError(f"{name}: {value} must be at most {limit}")
        if request.prompt_logprobs is not None and not options.prompt_logprobs:
            raise UserError("prompt_logprobs: this engine was started without them")
        if request.stop and self.tokenizer is None:
            raise UserError("stop: stop strings need a tokenizer")
        if request.grammar is not None and request.grammar.owner is not self.grammars:
            raise UserError("grammar: must be made by the grammars that this engine was given")

    def abort(self, sequence: Sequence) -> None:
        """End a request now; its pages are free for the next step."""
        if sequence.stage is Stage.LEAVING and self.departures is not None:
            self.departures.cancel(sequence)
        elif sequence.stage is not Stage.DONE:
            sequence.result.finish_reason = "abort"
            self.ranks[sequence.data_rank].release(sequence)

    @property
    def idle(self) -> bool:
        """Nothing to run and nothing to read."""
        leaving = self.departures is not None and self.departures.busy
        return self.pending is None and not leaving and all(rank.idle for rank in self.ranks)

    def step(self) -> list[Event]:
        """Dispatch the next step, then read the one before it (without ``overlap``: itself). With
        Engram tables on the host tokens are read first: their rows are fetched by them.
        """
        events = []
        if self.executor.programs.host and self.pending and self.pending.has_tokens:
            ready, self.pending = self.pending, None
            events = self._read(ready)
            self._store()
        self.failed = self._without_handoff()
        plan = plan_step(self.ranks)
        dispatched = None
        if not plan.empty:
            dispatched = self.executor.run(plan)
            for rank in self.ranks:
                for sequence in rank.running:
                    rank.register(sequence)
            if self.kv_pool is not None:
                self.kv_pool.dispatched(plan)
            events += self._taken_over(dispatched)
        ready = dispatched
        if self.options.overlap:
            ready, self.pending = self.pending, dispatched
        events += self._read(ready)
        self._store()
        waits = bool(plan.starved)
        if self.departures is not None:
            events, failed = self.departures.settle(events)
            self.failed += failed
            waits |= self.departures.busy
        if self.kv_pool is not None and plan.empty and waits and self.pending is None:
            self.kv_pool.wait(_POOL_WAIT_S)
        return events

    def _without_handoff(self) -> list[Sequence]:
        """End waiting requests for which what another engine left is gone."""
        lost = []
        for rank in self.ranks:
            for sequence in list(rank.waiting):
                handed = sequence.handed
                if handed is not None and handed.lost and self.kv_pool is not None:
                    self.kv_pool.used(sequence, lost=True)
                    sequence.result.finish_reason, sequence.result.fault = "error", handed.why
                    rank.release(sequence)
                    lost.append(sequence)
        return lost

    def _taken_over(self, flight: InFlight) -> list[Event]:
        """The first tokens of requests that another engine began."""
        for sequence, _ in flight.taken:
            assert self.kv_pool is not None
            self.kv_pool.used(sequence)
        self._advance(flight.taken)
        return [self._take(sequence, token) for sequence, token in flight.taken]

    def _store(self) -> None:
        """Send complete pages to the pool before a plan gives them to other requests."""
        if self.kv_pool is not None:
            self.kv_pool.store(self.ranks, self.executor.take_pages)
        if self.departures is not None:
            self.departures.send()

    def _read(self, flight: InFlight | None) -> list[Event]:
        """Wait for a step and hand its tokens to their sequences. StuckStep if it does not end."""
        if flight is None:
            return []
        if self.watchdog:
            self.watchdog.wait(flight.arrays, str(self.steps_read))
        for report in flight.reports:
            report.check(str(self.steps_read))
        self.steps_read += 1
        for scores, chunks in flight.scores:
            for chunk, tokens in prompt_tokens(scores, chunks):
                chunk.sequence.result.prompt_logprobs += tokens
        taken = []
        for sampled, owners in flight.sampled:
            tokens = host_tokens(sampled, owners)
            taken += [(s, token) for s, token in tokens if s.stage is not Stage.DONE]
        for verified, owners, drafts in flight.verified:
            taken += self._settled(verified, owners, drafts)
        self._advance(taken)
        # A token of a block may end its sequence before the next one.
        return [self._take(s, token) for s, token in taken if s.stage is not Stage.DONE]

    def _advance(self, taken: list[tuple[Sequence, TokenLogprobs]]) -> None:
        if self.grammars is not None:
            self.grammars.advance([(s.matcher, t.token_id) for s, t in taken if s.matcher])

    def _settled(
        self, verified: Verified, owners: list[Sequence | None], drafts: int
    ) -> list[tuple[Sequence, TokenLogprobs]]:
        """The tokens of a step with drafts; what the host did not know of it is settled."""
        taken = []
        for sequence, tokens, drafted in host_blocks(verified, owners):
            sequence.settle(sequence.drafts(drafts), len(tokens))
            if sequence.stage is not Stage.DONE:
                self.acceptance.add(drafted, len(tokens) - 1)
                sequence.result.drafted += drafted
                sequence.result.accepted += len(tokens) - 1
                taken += [(sequence, token) for token in tokens]
        return taken

    def _take(self, sequence: Sequence, token: TokenLogprobs) -> Event:
        result, now = sequence.result, time.perf_counter()
        if result.token_ids:
            result.tpot_ms = 1e3 * (now - sequence.first_token_at) / len(result.token_ids)
        else:
            sequence.first_token_at = now
            result.ttft_ms = 1e3 * (now - sequence.queued_at)
        result.add(token, sequence.request)
        if sequence.matcher is not None:
            result.follow(sequence.matcher)
        text = self._text(sequence, token)
        finished = result.finish_reason is not None
        if finished:
            rank = self.ranks[sequence.data_rank]
            rank.register(sequence)
            if self.departures and sequence.request.hands_off and result.finish_reason != "error":
                self.departures.hold(rank, sequence)
            else:
                rank.release(sequence)
        return Event(sequence, token, text, finished)

    def _text(self, sequence: Sequence, token: TokenLogprobs) -> str:
        output, result = sequence.output, sequence.result
        if output is None:
            return ""
        text = output.push(token.token_id)
        if output.stopped is not None:
            result.finish_reason = "stop"
        if result.finish_reason is not None:
            text += output.finish()
        return text

    def close(self) -> None:
        """Let go of the pool, what it holds stays for others; end the threads of host tables."""
        if self.kv_pool is not None:
            self.kv_pool.close()
        self.executor.table_rows.close()

    def check(self) -> None:
        """Invariants of the host state; for tests, after any step."""
        for rank in self.ranks:
            rank.check(self.departures.of(rank) if self.departures else ())
