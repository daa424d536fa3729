"""What runs in the next step: plain Python, state in, plan out."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from serving.pages import PagePool
from serving.prefix_cache import ROOT, PrefixCache
from serving.replay import adopted_hit, prefill_start
from serving.sequence import Sequence, Stage


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
    """One step, in the order the engine carries it out: of a data rank, or of all of them. drafts:
    tokens drafted for ``decode``.
    """

    preempt: list[Sequence] = field(default_factory=list)
    resume: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    drafts: int = 0

    @property
    def empty(self) -> bool:
        return not (self.preempt or self.resume or self.chunks or self.decode)

    @property
    def prefill(self) -> tuple[int, int]:
        """Requests (of the data rank that has most) and rows that the chunks need a shape for."""
        return most_on_a_rank(self.chunks), max((chunk.rows for chunk in self.chunks), default=0)

    def add(self, other: "Plan") -> None:
        """What another data rank does in the same step."""
        self.preempt += other.preempt
        self.resume += other.resume
        self.chunks += other.chunks
        self.decode += other.decode


class Scheduler:
    """Owns sequences, slots and pages of a data rank. Urgent sequences go first; the least urgent
    one is preempted when pages run out.

    The most urgent running sequence makes way only if cached copies of its own prefix leave it no
    page; it comes back with them evicted, so every sequence makes progress.
    """

    def __init__(self, limits: Limits, pool: PagePool, cache: PrefixCache):
        self.limits, self.pool, self.cache = limits, pool, cache
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

    def ready(self) -> list[Sequence]:
        """Who may decode in the next step, the most urgent first."""
        decoding = [s for s in self.running if s.stage is Stage.DECODE]
        ready = [s for s in decoding if not (s.all_dispatched or s.awaits_reader)]
        return sorted(ready, key=lambda s: s.urgency)

    def plan(self, drafts: int = 0, beside: tuple[int, int] = (0, 0)) -> Plan:
        """Decide the next step and take the slots and pages it needs. drafts: tokens to draft.
        beside: ``Plan.prefill`` of other ranks; one shape must hold their chunks and these.
        """
        plan = Plan(drafts=drafts)
        self._plan_decode(plan)
        self._resume(plan)
        self._plan_prefill(plan, beside)
        return plan

    def first_row(self, sequence: Sequence) -> int:
        """The prompt row with which a request would start now."""
        _, hit = self._hit(sequence, self.cache.find)
        return prefill_start(hit, self.limits.window)

    def release(self, sequence: Sequence) -> None:
        """Give back everything a sequence holds and forget it."""
        for queue in (self.waiting, self.swapped, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._drop(sequence)
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
            piece = tokens[index * size : (index + 1) * size]
            sequence.nodes.append(self.cache.insert(parent, piece, sequence.pages[index]))

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
        while self.waiting and self._slots and not self.swapped and not plan.preempt:
            if not self._widths(plan, beside):
                return
            sequence = self.waiting[0]
            if not self._start(sequence):
                return
            self._add_chunk(plan, beside, sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot, its hit and the pages of its prompt."""
        size, limits = self.limits.page_size, self.limits
        nodes, hit = self._hit(sequence, self.cache.match)
        shared = [page for page in map(self.cache.page, nodes) if page is not None]
        self.pool.share(shared)
        missing = -(-sequence.length // size) - len(shared)
        if not self._make_room(missing):
            self.pool.give_back(shared)
            return False
        sequence.pages = shared + self.pool.take(missing)
        sequence.nodes, sequence.hit = nodes, hit
        sequence.computed = prefill_start(hit, limits.window)
        sequence.slot = self._slots.pop()
        sequence.stage = Stage.PREFILL
        sequence.result.cached_tokens = hit
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _hit(
        self, sequence: Sequence, look_up: Callable[[np.ndarray, int], list[int]]
    ) -> tuple[list[int], int]:
        """Nodes and tokens of the cached prefix that a waiting sequence may adopt."""
        matched: list[int] = []
        size, limits = self.limits.page_size, self.limits
        if limits.uses_hits and sequence.request.prompt_logprobs is None:
            matched = look_up(sequence.prompt, (sequence.length - 1) // size)
        hit = adopted_hit(len(matched) * size, limits.window)
        return matched[: hit // size], hit

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


@dataclass
class Saved:
    """What a preempted sequence held; ``state`` is filled by the engine with the bytes."""

    slot: int
    pages: list[int]
    state: object = None
