"""The fleet: sessions send requests, a policy places them, instances step; one clock for all."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dsv41_jax.errors import UserError
from serving.kv_pool.remote import Complete, Remote
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.replay import adopted_hit
from serving.request import Request
from serving.routing.affinity import Affinity
from serving.routing.index import Residency
from serving.routing.score import Board, Overlap, Target, Weights
from serving.scheduler import Limits
from serving.sequence import Sequence
from serving.simulate.events import Events
from serving.simulate.instance import Cost, Instance, Job
from serving.simulate.measure import Occupancy, Record
from serving.simulate.policies import Policy
from serving.simulate.pool import Everything, Keys, LeastRecent, Link, keys_of
from serving.simulate.scenario import Scenario
from serving.simulate.sessions import Session, Source, Start
from serving.simulate.times import Times
from serving.simulate.watched import WatchedCache

_PROGRESS_EVENTS = 1 << 11


@dataclass(frozen=True)
class Model:
    """What is to be known of the model and its layout. ranks: data ranks of an instance; window:
    tokens; token_bytes: of the global cache.
    """

    ranks: int
    window: int
    token_bytes: float


class Simulation:
    """One policy on one scenario; ``run`` it once."""

    def __init__(
        self, scenario: Scenario, policy: Policy, model: Model, times: Times, source: Source
    ):
        """UserError if the fleet cannot run the scenario's longest request."""
        self.scenario, self.policy, self.source = scenario, policy, source
        self.clock, self.seen = Events(), Everything()
        fleet, pool = scenario.fleet, scenario.pool
        page_bytes = model.token_bytes * fleet.page_tokens
        self.page = fleet.page_tokens // fleet.grain
        self.limits = _limits(scenario, model)
        self.pool = LeastRecent(int(pool.capacity_gb * 1e9 / page_bytes)) if policy.pool else None
        cost = Cost(times, page_bytes / (pool.link_gbps * 1e9))
        pages = _pages(scenario, page_bytes)
        self.instances, self.index = [], Residency()
        for number in range(fleet.instances):
            targets = [Target(str(number), rank) for rank in range(model.ranks)]
            remotes = [self._remote(number, cost.page_s) for _ in targets]
            caches = [self._cache(pages, target) for target in targets]
            self.instances.append(Instance(fleet, self.limits, caches, remotes, cost))
        self._busy = [False] * fleet.instances
        self.ranks = model.ranks
        board = Board(_weights(scenario))
        board.join(
            Target(str(worker), rank)
            for worker in range(fleet.instances)
            for rank in range(model.ranks)
        )
        self.board, self.homes = board, Affinity()
        step = max(rows for _, rows in fleet.shapes)
        self.router, self._woken_at = policy.router(board, self.homes, step), math.inf
        self._hop_s = fleet.hop_ms / 1e3
        since = scenario.window.settle_s
        occupancy = Occupancy(fleet.instances * model.ranks, since)
        self.record = Record(since, since + scenario.window.measure_s, occupancy)
        self._chains: dict[Session, Keys] = {}
        self.arrived = 0

    def run(self, progress: Callable[[str], None] | None = None) -> Record:
        """Simulate the window, or all that the source has if that never ends. progress: told now
        and then how far it is.
        """
        starts, record = self.source.starts(), self.record
        self._remember(sorted((s for s in starts if s.turn), key=lambda start: start.at_s))
        for start in starts:
            self.clock.at(start.at_s, partial(self._arrive, start.session, start.turn))
        while self.clock.step(record.until):
            if progress and self.clock.past % _PROGRESS_EVENTS == 0:
                seen = len(record.requests.prompt)
                progress(f"{self.clock.now:.1f} s simulated, {seen} requests counted")
        if math.isinf(record.until):
            record.until = self.clock.now
        record.occupancy.advance(record.until)
        return record

    def _remote(self, instance: int, page_s: float) -> Remote | None:
        if self.pool is None:
            return None
        return Link(
            self.clock,
            self.pool,
            lookup_s=self.scenario.pool.lookup_ms / 1e3,
            page_s=page_s,
            least_pages=self.limits.window // self.page + 1,
            ready=partial(self._kick, instance),
        )

    def _cache(self, pages: int, target: Target) -> PrefixCache:
        """Watched only if the policy asks who holds what."""
        pool = PagePool(pages)
        if not self.policy.looks:
            return PrefixCache(pool, self.page)
        return WatchedCache(pool, self.page, target, self.index)

    def _remember(self, starts: Iterable[Start]) -> None:
        """Fill the caches with what sessions sent before the beginning, in the order of their
        times.
        """
        for start in starts:
            ids = start.session.prompt(start.turn - 1)
            target = self.homes.choose(start.session, self.board.loads)
            self.instances[int(target.worker)].remember(target.rank, ids)
            keys = self._chain(start.session).keys(ids, len(ids) // self.page)
            self.seen.put(keys)
            if self.pool is not None:
                self.pool.put(keys)

    def _chain(self, session: Session) -> Keys:
        """Keys of a session's pages; of a request's, where the next does not go on from it."""
        if not session.grows:
            return Keys(self.page)
        return self._chains.setdefault(session, Keys(self.page))

    def _arrive(self, session: Session, turn: int) -> None:
        number, prompt, chain = self.arrived, session.prompt(turn), self._chain(session)
        self.arrived += 1
        keys = chain.keys(prompt, len(prompt) // self.page)
        limit = (len(prompt) - 1) // self.page
        here = self.scenario.fleet.role == "both"
        request = Request((), session.output(turn) if here else 1)
        sequence = Sequence(request, number, prompt=prompt, chain=chain)
        known = adopted_hit(self.seen.find(keys[:limit]) * self.page, self.limits.window)
        job = Job(session, turn, sequence, keys, known, self.clock.now)
        size, look = len(prompt) * self.scenario.fleet.grain, partial(self._overlaps, keys[:limit])
        self.router.add(job, size, look, self.clock.now)
        self._place()

    def _place(self) -> None:
        """Send on who goes to a rank now."""
        now, router = self.clock.now, self.router
        sent: dict[int, list[Job]] = {}
        for placed in router.place(now):
            job, target = placed.key, placed.target
            assert isinstance(job, Job)
            job.target = target
            sent.setdefault(int(target.worker), []).append(job)
        self.record.occupancy.hold(now, holds=len(router) > 0)
        for number, jobs in sent.items():
            self._hop(partial(self._add, number, jobs))
        if router.wake_at < self._woken_at:
            self._woken_at = router.wake_at
            self.clock.at(router.wake_at, self._wake)

    def _hop(self, call: Callable[[], None]) -> None:
        """Do it on the other end of the way between the router and an instance."""
        if self._hop_s:
            self.clock.at(self.clock.now + self._hop_s, call)
        else:
            call()

    def _wake(self) -> None:
        self._woken_at = math.inf
        self._place()

    def _add(self, number: int, jobs: list[Job]) -> None:
        """Requests come to an instance."""
        for job in jobs:
            self.instances[number].add(job)
        self._kick(number)

    def _overlaps(self, keys: list[bytes]) -> dict[Target, Overlap]:
        """What of a prompt every rank has, and the pool; tokens."""
        tokens = self.scenario.fleet.page_tokens
        pooled = self.pool.find(keys) * tokens if self.pool is not None else 0
        found = self.index.overlaps(keys)
        return {each: Overlap(found.get(each, 0) * tokens, pooled) for each in self.board.loads}

    def _kick(self, number: int) -> None:
        """Begin a step if none is under way and there is something to do."""
        instance = self.instances[number]
        if not self._busy[number] and (seconds := instance.begin()) is not None:
            self._busy[number] = True
            self.clock.at(self.clock.now + seconds, partial(self._end, number))
        for rank in range(self.ranks):
            self.record.occupancy.change(
                self.clock.now,
                number * self.ranks + rank,
                works=instance.works(rank),
                queues=instance.left_out[rank],
                waits=instance.waits(rank),
            )

    def _end(self, number: int) -> None:
        self._busy[number] = False
        got, complete = self.instances[number].end()
        for job, done in got:
            self._take(job, done)
        self._store(complete)
        self._hop(partial(self._hear, got))
        self._kick(number)

    def _hear(self, got: list[tuple[Job, bool]]) -> None:
        """The router sees tokens."""
        for job, done in got:
            if job.heard:
                self.board.grown(job, self.scenario.fleet.grain)
            else:
                job.heard = True
                self.router.prefilled(job, self.clock.now)
            if done:
                self.router.freed(job)
        self._place()

    def _take(self, job: Job, done: bool) -> None:
        """A job has a token more."""
        now, record = self.clock.now, self.record
        grain = self.scenario.fleet.grain
        if len(job.sequence.result.token_ids) == 1:
            self.seen.put(job.keys)
            self._count(job)
        elif record.counts(now):
            record.gaps_s.append((now - job.last_at) / grain)
        job.last_at = now
        if not done:
            return
        rest = 0.0
        if self.scenario.fleet.role == "prefill":
            gap = 1 / self.scenario.fleet.decode_tokens_per_s
            rest = (job.session.output(job.turn) * grain - 1) * gap
            if record.counts(now):
                record.gaps_s.append(gap)
        self.clock.at(now + rest, partial(self._finish, job.session, job.turn))

    def _count(self, job: Job) -> None:
        """A request's first token."""
        seen, grain, result = self.record.requests, self.scenario.fleet.grain, job.sequence.result
        if self.record.counts(self.clock.now):
            seen.ttft_s.append(self.clock.now + self._hop_s - job.arrived)
            seen.prompt.append(job.sequence.length * grain)
            seen.hit.append(job.sequence.hit * grain)
            seen.known.append(job.known * grain)
            seen.loaded.append(result.pool_tokens * grain)

    def _store(self, complete: Iterable[Complete]) -> None:
        """Pages that were filled are in the pool from now on."""
        if self.pool is None:
            return
        tokens: dict[Sequence, np.ndarray] = {}
        for item in complete:
            sequence = item.sequence
            if sequence not in tokens:
                tokens[sequence] = sequence.tokens_known()
            keys = keys_of(sequence).keys(tokens[sequence], item.index + 1)
            self.pool.put(keys[item.index :])

    def _finish(self, session: Session, turn: int) -> None:
        """A turn's last token: the session goes on, or another one begins."""
        record, now = self.record, self.clock.now
        if record.counts(now):
            record.finished += 1
            record.output += session.output(turn) * self.scenario.fleet.grain
        turn += 1
        if turn == session.turns:
            self.homes.end(session)
            self._chains.pop(session, None)
            after = self.source.next()
            if after is None:
                return
            session, turn = after, 0
        self.clock.at(now + session.delay_s(turn), partial(self._arrive, session, turn))


def _limits(scenario: Scenario, model: Model) -> Limits:
    """Of a rank's scheduler, in ids."""
    fleet = scenario.fleet
    if model.window % fleet.grain:
        raise UserError(f"fleet.grain: {fleet.grain} must divide the window, {model.window}")
    return Limits(
        slots=fleet.slots,
        page_size=fleet.page_tokens // fleet.grain,
        window=model.window // fleet.grain,
        prefill=tuple(sorted((requests, rows // fleet.grain) for requests, rows in fleet.shapes)),
    )


def _pages(scenario: Scenario, page_bytes: float) -> int:
    fleet, most = scenario.fleet, scenario.workload.max_context
    pages = int(fleet.cache_gb * 1e9 / page_bytes)
    if pages * fleet.page_tokens < most + fleet.page_tokens:
        raise UserError(f"fleet.cache_gb: {fleet.cache_gb:g} must hold max_context={most} tokens")
    return pages


def _weights(scenario: Scenario) -> Weights:
    """What a rank decodes counts only where it does."""
    fleet = scenario.fleet
    decode = 1.0 if fleet.role == "both" else 0.0
    return Weights(decode=decode, pool_credit=scenario.pool.credit, block=fleet.page_tokens)
