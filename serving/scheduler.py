"""What runs in the next step: plain Python, state in, plan out."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from serving.kv_pool.remote import Load, Prefetch, Remote, Waits
from serving.pages import PagePool
from serving.prefix_cache import ROOT, PrefixCache
from serving.replay import adopted_hit, prefill_start
from serving.sequence import Saved, Sequence, Stage


@dataclass(frozen=True)
class Limits:
    """slots: requests with state on the device. prefill: shapes (requests, rows) of encode
    dispatches, ascending.

    window: ``sliding_window``. replay: bounded replay on. prefix_cache: whether hits are looked up
    at all. drafts: tokens drafted a step, as long as at most ``max_drafting`` requests decode.
    """

    slots: int
    page_size: int
    window: int
    prefill: tuple[tuple[int, int], ...]
    replay: bool = True
    prefix_cache: bool = True
    drafts: int = 0
    max_drafting: int = 0

    @property
    def uses_hits(self) -> bool:
        """Without replay a hit's windows would be missing, so nothing is looked up or kept."""
        return self.prefix_cache and self.replay

    def drafts_for(self, decoding: Items[Items[Sequence]]) -> int:
        """Tokens to draft in a step of these requests of each data rank."""
        wanted = any(sequence.drafts(self.drafts) for mine in decoding for sequence in mine)
        return self.drafts if wanted and max(map(len, decoding)) <= self.max_drafting else 0

    @property
    def step_pages(self) -> int:
        """Pages beyond its rows that a request may need at once: two steps in flight."""
        return -(-2 * (1 + self.drafts) // self.page_size)


@dataclass(frozen=True)
class Chunk:
    """Prompt rows start .. stop-1 of a sequence."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == self.sequence.length

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def data_rank(self) -> int:
        return self.sequence.data_rank


def most_on_a_rank(items: Iterable[Chunk | Sequence]) -> int:
    """How many of them the data rank has that has most."""
    return max(Counter(item.data_rank for item in items).values(), default=0)


@dataclass
class Plan:
    """One step, in the order the engine carries it out: of a data rank, or of all of them. taken:
    requests that another engine began, with nothing left to encode. drafts: tokens drafted for
    ``decode``. starved: what requests wait for that could have started.
    """

    preempt: list[Sequence] = field(default_factory=list)
    resume: list[Sequence] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    taken: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    drafts: int = 0
    starved: set[Waits] = field(default_factory=set)

    @property
    def empty(self) -> bool:
        return not (self.preempt or self.resume or self.taken or self.chunks or self.decode)

    @property
    def prefill(self) -> tuple[int, int]:
        """Requests (of the data rank that has most) and rows that the chunks need a shape for."""
        return most_on_a_rank(self.chunks), max((chunk.rows for chunk in self.chunks), default=0)

    def add(self, other: "Plan") -> None:
        """What another data rank does in the same step."""
        for name in ("preempt", "resume", "loads", "taken", "chunks", "decode"):
            getattr(self, name).extend(getattr(other, name))
        self.starved |= other.starved


class Scheduler:
    """Owns sequences, slots and pages of a data rank. Urgent sequences go first; the least urgent
    one is preempted when pages run out.

    The most urgent running sequence makes way only if cached copies of its own prefix leave it no
    page; it comes back with them evicted, so every sequence makes progress. A sequence that waits
    for pages of a remote pool holds nothing and lets those behind it start.
    """

    def __init__(
        self, limits: Limits, pool: PagePool, cache: PrefixCache, remote: Remote | None = None
    ):
        self.limits, self.pool, self.cache = limits, pool, cache
        self.prefetch = Prefetch(remote, limits.page_size, limits.window)
        self.waiting: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = list(reversed(range(limits.slots)))

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.running, *self.swapped, *self.waiting]

    @property
    def spare_slots(self) -> int:
        """Slots that no sequence has or will get; below 0: sequences that must wait for one."""
        return self.limits.slots - len(self.running) - len(self.swapped) - len(self.waiting)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.swapped or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.urgency)
        self._look_ahead()

    def ready(self) -> list[Sequence]:
        """Who may decode in the next step, the most urgent first."""
        decoding = [s for s in self.running if s.stage is Stage.DECODE]
        ready = [s for s in decoding if not (s.all_dispatched or s.awaits_reader)]
        return sorted(ready, key=lambda s: s.urgency)

    def plan(self, drafts: int = 0, beside: tuple[int, int] = (0, 0)) -> Plan:
        """Decide the next step and take the slots and pages it needs. drafts: tokens to draft.
        beside: ``Plan.prefill`` of other ranks; one shape must hold their chunks and these.
        """
        assert self.prefetch.drained
        plan = Plan(drafts=drafts)
        self._look_ahead()
        self._plan_decode(plan)
        self._resume(plan)
        self._plan_prefill(plan, beside)
        return plan

    def first_row(self, sequence: Sequence) -> int:
        """The prompt row with which a request would start now."""
        size, window = self.limits.page_size, self.limits.window
        known = sequence.length if sequence.request.ticket else self._held(sequence) * size
        return prefill_start(adopted_hit(known, window), window)

    def release(self, sequence: Sequence) -> None:
        """Give back everything a sequence holds and forget it."""
        for queue in (self.waiting, self.swapped, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._drop(sequence)
        self.prefetch.forget(sequence)
        sequence.saved = None
        sequence.stage = Stage.DONE

    def register(self, sequence: Sequence) -> None:
        """Put the sequence's complete pages of known tokens into the prefix cache."""
        if not self.limits.uses_hits or not sequence.pages:
            return
        size = self.limits.page_size
        written = sequence.computed if sequence.dispatched == 0 else sequence.next_position
        complete = min(written, sequence.length + len(sequence.result.token_ids)) // size
        if complete <= len(sequence.nodes):
            return
        # A node whose page is another request's copy of the same tokens may be evicted meanwhile.
        while sequence.nodes and self.cache.page(sequence.nodes[-1]) is None:
            sequence.nodes.pop()
        tokens = sequence.tokens_known()
        for index in range(len(sequence.nodes), complete):
            parent = sequence.nodes[-1] if sequence.nodes else ROOT
            piece, page = tokens[index * size : (index + 1) * size], sequence.pages[index]
            sequence.nodes.append(self.cache.insert(parent, piece, page))
            if self.cache.page(sequence.nodes[-1]) == page:
                self.prefetch.filled(sequence, index, page)

    def _plan_decode(self, plan: Plan) -> None:
        for sequence in self.ready():
            if sequence.stage is not Stage.DECODE:  # it made way for an earlier one
                continue
            if self._grow(plan, sequence, sequence.rows_after(sequence.drafts(plan.drafts))):
                plan.decode.append(sequence)

    def _resume(self, plan: Plan) -> None:
        """Bring swapped sequences back before anything new starts, unless this step had to swap one
        out.
        """
        while self.swapped and self._slots and not plan.preempt:
            sequence = min(self.swapped, key=lambda s: s.urgency)
            kept = self._surviving_pages(sequence)
            missing = len(sequence.saved.pages) - len(kept)
            self.pool.share(kept)
            # Room for its next steps, if there is any, or it would make way again at once.
            room = min(missing + self.limits.step_pages, self.pool.pages - len(kept))
            if not self._make_room(room):
                self.pool.give_back(kept)
                return
            sequence.pages = kept + self.pool.take(missing)
            sequence.nodes = sequence.nodes[: len(kept)]
            sequence.slot = self._slots.pop()
            sequence.stage = sequence.resume_to
            self.swapped.remove(sequence)
            self.running.append(sequence)
            plan.resume.append(sequence)

    def _plan_prefill(self, plan: Plan, beside: tuple[int, int]) -> None:
        started = [
            s for s in sorted(self.running, key=lambda s: s.urgency) if s.stage is Stage.PREFILL
        ]
        for sequence in started:
            self._add_chunk(plan, beside, sequence)
        starved: set[Waits] = set()
        for sequence in list(self.waiting):
            if not self._may_start(plan, beside):
                return
            waits = self.prefetch.waits(sequence, self._held)
            if waits or self._wants(sequence):
                starved.add(waits or Waits.LOOKUP)
                continue
            if sequence.handed is not None and sequence.handed.lost:
                continue
            if not self._start(plan, sequence):
                return
            self._add_chunk(plan, beside, sequence)
        if self._may_start(plan, beside):
            plan.starved |= starved

    def _may_start(self, plan: Plan, beside: tuple[int, int]) -> bool:
        """Whether a step has room for the chunk of a request that has not begun."""
        held_up = self.swapped or plan.preempt or not self._slots
        return not held_up and bool(self._widths(plan, beside))

    def _look_ahead(self) -> None:
        """Ask the pool for those who will get the next slots and the ones after; what comes waits
        in the host's memory.
        """
        for sequence in self.waiting[: 2 * self.limits.slots]:
            if self._wants(sequence):
                self.prefetch.begin(sequence, self._held(sequence))

    def _wants(self, sequence: Sequence) -> bool:
        """Whether the pool should be asked for a sequence before it starts."""
        return self.prefetch.wanted(sequence) and self._uses_hits(sequence)

    def _start(self, plan: Plan, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot, its hit and the pages of its prompt; False if there is no
        room, so that nobody behind it may start either.
        """
        size, limits, handed = self.limits.page_size, self.limits, sequence.handed
        nodes = self._matched(sequence, self.cache.match)
        hit = adopted_hit(self.prefetch.stop(sequence, len(nodes)) * size, limits.window)
        hit = handed.hit if handed else hit
        nodes = nodes if hit else []
        shared = [page for page in map(self.cache.page, nodes) if page is not None]
        self.pool.share(shared)
        missing = -(-sequence.length // size) - len(shared)
        if not self._make_room(missing):
            self.pool.give_back(shared)
            return False
        sequence.pages = shared + self.pool.take(missing)
        sequence.nodes, sequence.hit = nodes, hit
        if load := self.prefetch.start(sequence, len(nodes), hit):
            plan.loads.append(load)
            sequence.result.pool_tokens = min(load.stop * size, hit) - load.first * size
        sequence.computed = prefill_start(hit, limits.window)
        sequence.slot = self._slots.pop()
        sequence.stage = Stage.PREFILL
        if handed and handed.has_windows:
            sequence.computed, sequence.dispatched = sequence.length, 1
            sequence.stage = Stage.DECODE
            plan.taken.append(sequence)
        sequence.result.cached_tokens = hit
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _uses_hits(self, sequence: Sequence) -> bool:
        return self.limits.uses_hits and sequence.request.prompt_logprobs is None

    def _held(self, sequence: Sequence) -> int:
        """First pages of a waiting sequence's prompt that are cached."""
        return len(self._matched(sequence, self.cache.find))

    def _matched(
        self, sequence: Sequence, look_up: Callable[[np.ndarray, int], list[int]]
    ) -> list[int]:
        """Nodes of the cached prefix of a waiting sequence; its last token is never one of
        them.
        """
        if not self._uses_hits(sequence):
            return []
        return look_up(sequence.prompt, sequence.prompt_pages(self.limits.page_size))

    def _widths(self, plan: Plan, beside: tuple[int, int]) -> list[int]:
        """Rows of the shapes that hold one more request beside the chunks already planned."""
        planned, most = plan.prefill
        requests, most = max(planned + 1, beside[0]), max(most, beside[1])
        return [rows for count, rows in self.limits.prefill if count >= requests and rows >= most]

    def _add_chunk(self, plan: Plan, beside: tuple[int, int], sequence: Sequence) -> None:
        """As many of the sequence's rows as such a shape holds."""
        left = sequence.length - sequence.computed
        widths = self._widths(plan, beside)
        if widths and sequence.stage is Stage.PREFILL and sequence in self.running:
            stop = sequence.computed + min(left, max(widths))
            plan.chunks.append(Chunk(sequence, sequence.computed, stop))

    def _grow(self, plan: Plan, sequence: Sequence, rows: int) -> bool:
        """Pages for ``rows`` rows; False if the sequence itself had to make way."""
        while len(sequence.pages) * self.limits.page_size < rows:
            if self._make_room(1):
                sequence.pages += self.pool.take(1)
                continue
            victim = max(self.running, key=lambda s: s.urgency)
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        if victim in plan.decode:
            plan.decode.remove(victim)
        victim.resume_to = victim.stage
        victim.stage = Stage.SWAPPED
        victim.saved = Saved(slot=victim.slot, pages=list(victim.pages))
        self.running.remove(victim)
        self.swapped.append(victim)
        plan.preempt.append(victim)
        self._drop(victim)
        self.prefetch.forget(victim)

    def _drop(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1

    def _surviving_pages(self, sequence: Sequence) -> list[int]:
        """Its own cached pages that were not evicted meanwhile: they hold the very bytes it wrote
        or read.
        """
        pages = []
        for index, node in enumerate(sequence.nodes):
            page = self.cache.page(node)
            if page is None or page != sequence.saved.pages[index]:
                break
            pages.append(page)
        return pages

    def _make_room(self, count: int) -> bool:
        if self.pool.free < count:
            self.cache.evict(count - self.pool.free)
        return self.pool.free >= count

    def check(self, extra: Items[Sequence] = ()) -> None:
        """Slots and pages are held by exactly the running sequences and the cache."""
        self.pool.check()
        self.cache.check()
        slots = [s.slot for s in self.running]
        assert sorted(slots + self._slots) == list(range(self.limits.slots))
        held: dict[int, int] = {}
        for sequence in (*self.running, *extra):
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
        for page in range(self.pool.pages):
            cached = self.pool.holders(page) - held.get(page, 0)
            assert cached in (0, 1), (page, self.pool.holders(page), held.get(page, 0))
        for sequence in self.running:
            rows = sequence.computed if not sequence.dispatched else sequence.next_position
            assert len(sequence.pages) * self.limits.page_size >= rows
        for sequence in self.waiting:
            assert not sequence.pages and sequence.slot < 0
