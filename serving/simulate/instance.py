"""An engine of the fleet: the real schedulers of its data ranks, steps that only take time."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from serving.buckets import prefill_shape
from serving.kv_pool.remote import Complete, Remote
from serving.prefix_cache import ROOT, PrefixCache
from serving.ranks import plan_step
from serving.routing.score import Target
from serving.scheduler import Chunk, Limits, Plan, Scheduler, most_on_a_rank
from serving.sequence import Sequence, Stage
from serving.simulate.scenario import Fleet
from serving.simulate.sessions import Session
from serving.simulate.times import Times


@dataclass(eq=False)
class Job:
    """Turn ``turn`` of a session on its way, on the rank ``target`` once it has one. known: ids of
    its prompt that a pool without limits would have had. heard: whether the router has seen its
    first token.
    """

    session: Session
    turn: int
    sequence: Sequence
    keys: list[bytes]
    known: int
    arrived: float
    target: Target | None = None
    heard: bool = False
    last_at: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What a page adds to the step that moves it, in seconds."""

    times: Times
    page_s: float


class Instance:
    """Data ranks that step together. A step is planned by the engine's code and takes the time of
    the buckets that the engine would dispatch.
    """

    def __init__(
        self,
        fleet: Fleet,
        limits: Limits,
        caches: list[PrefixCache],
        remotes: list[Remote | None],
        cost: Cost,
    ):
        """limits: in ids of ``fleet.grain`` tokens; caches, remotes: of each rank."""
        self.ranks = [
            Scheduler(limits, cache.pool, cache, remote)
            for cache, remote in zip(caches, remotes, strict=True)
        ]
        self.cost, self.grain, self.limits = cost, fleet.grain, limits
        self.decode_sizes = sorted(fleet.decode_sizes)
        self.jobs: dict[Sequence, Job] = {}
        self.plan: Plan | None = None
        self.left_out = [False] * len(self.ranks)

    def add(self, job: Job) -> None:
        """Queue a job on the data rank of its target."""
        assert job.target is not None
        rank, sequence = self.ranks[job.target.rank], job.sequence
        sequence.data_rank = job.target.rank
        sequence.computed = rank.first_row(sequence)
        self.jobs[sequence] = job
        rank.add(sequence)

    def begin(self) -> float | None:
        """Plan the next step and carry it out as far as the host knows; its seconds, None if there
        is nothing to do. ``left_out``: ranks with a request that found no room in it.
        """
        plan = plan_step(self.ranks)
        self.plan = None if plan.empty else plan
        self.left_out = [self.waits(rank) for rank in range(len(self.ranks))]
        if plan.empty:
            return None
        seconds = self._seconds(plan)
        for sequence in plan.resume:
            sequence.saved = None
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.stop
            chunk.sequence.result.encoder_rows += chunk.rows
        for sequence in _sampled(plan):
            sequence.dispatch(0)
            sequence.stage = Stage.DECODE
        for rank in self.ranks:
            for sequence in rank.running:
                rank.register(sequence)
        return seconds

    def end(self) -> tuple[list[tuple[Job, bool]], list[Complete]]:
        """Read the step: jobs that got a token and whether it was their last; pages to store."""
        assert self.plan is not None
        got, sampled = [], _sampled(self.plan)
        self.plan = None
        for sequence in sampled:
            job, tokens = self.jobs[sequence], sequence.result.token_ids
            answer = job.session.answer(job.turn) if sequence.request.max_new_tokens > 1 else ()
            tokens.append(int(answer[len(tokens)]) if len(tokens) < len(answer) else -1)
            done = len(tokens) == sequence.request.max_new_tokens
            if done:
                self.ranks[sequence.data_rank].register(sequence)
                self.ranks[sequence.data_rank].release(sequence)
                del self.jobs[sequence]
            got.append((job, done))
        return got, [page for rank in self.ranks for page in rank.prefetch.drain(rank.running)]

    def works(self, number: int) -> bool:
        """Whether a data rank has rows in the step."""
        plan = self.plan
        items = (*plan.chunks, *plan.decode) if plan else ()
        return any(item.data_rank == number for item in items)

    def waits(self, number: int) -> bool:
        """Whether a data rank has a request that is in no step and waits for no page."""
        waiting = self.ranks[number].waiting
        return any(s.fetch is None or s.fetch.waits is None for s in waiting)

    def remember(self, number: int, prompt: np.ndarray) -> None:
        """Cache a prompt on a data rank as if it had run there."""
        rank, size = self.ranks[number], self.limits.page_size
        whole = len(prompt) // size
        missing = whole - len(rank.cache.match(prompt, whole))
        if rank.pool.free < missing:
            rank.cache.evict(missing - rank.pool.free)
        nodes = rank.cache.match(prompt, whole)
        pages = rank.pool.take(min(whole - len(nodes), rank.pool.free))
        parent = nodes[-1] if nodes else ROOT
        for index, page in enumerate(pages, len(nodes)):
            parent = rank.cache.insert(parent, prompt[index * size : (index + 1) * size], page)
        rank.pool.give_back(pages)

    def _seconds(self, plan: Plan) -> float:
        """Programs of all ranks together; pages move over each rank's own link."""
        moved: Counter[int] = Counter()
        for load in plan.loads:
            moved[load.data_rank] += load.stop - load.first
        for sequence in plan.preempt:
            moved[sequence.data_rank] += len(sequence.saved.pages)
        for sequence in plan.resume:
            moved[sequence.data_rank] += len(sequence.pages)
        us = self._prefill_us(plan.chunks) + self._decode_us(plan.decode)
        return us / 1e6 + max(moved.values(), default=0) * self.cost.page_s

    def _prefill_us(self, chunks: list[Chunk]) -> float:
        if not chunks:
            return 0.0
        shape = prefill_shape(self.limits.prefill, *Plan(chunks=chunks).prefill)
        assert shape is not None
        requests, rows = shape
        context = self._context(chunks, lambda chunk: chunk.start)
        us = self.cost.times.encode(requests, rows * self.grain, context)
        if last := [chunk for chunk in chunks if chunk.last]:
            places = _enough(most_on_a_rank(last), [count for count, _ in self.limits.prefill])
            us += self.cost.times.replay(places, self._context(last, lambda chunk: chunk.stop))
        return us

    def _decode_us(self, sequences: list[Sequence]) -> float:
        """A simulated step stands for as many as an id for tokens."""
        if not sequences:
            return 0.0
        places = _enough(most_on_a_rank(sequences), self.decode_sizes)
        context = self._context(sequences, lambda sequence: sequence.next_position)
        return self.grain * self.cost.times.decode(places, context)

    def _context(self, items: Iterable, ids: Callable) -> int:
        """Mean tokens of a data rank's items, of the rank with the longest."""
        counts: dict[int, list[int]] = defaultdict(list)
        for item in items:
            counts[item.data_rank].append(ids(item))
        return round(self.grain * max(sum(own) / len(own) for own in counts.values()))

    def check(self) -> None:
        """The schedulers' own checks."""
        for rank in self.ranks:
            rank.check()


def _sampled(plan: Plan) -> list[Sequence]:
    return [chunk.sequence for chunk in plan.chunks if chunk.last] + plan.decode


def _enough(count: int, sizes: Iterable[int]) -> int:
    return min(size for size in sizes if size >= count)
