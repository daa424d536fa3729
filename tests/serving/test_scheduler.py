"""The scheduler against a simulated device whose pages hold tokens: whatever is planned, every row
finds all rows before it.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from serving.buckets import prefill_shape
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.ranks import plan_step
from serving.request import Request, TokenLogprobs
from serving.scheduler import Limits, Plan, Scheduler
from serving.sequence import Sequence, Stage

SIZE, WINDOW = 2, 3


def answer(sequence: Sequence, index: int) -> int:
    """Token ``index`` that a prompt is answered with: the same whenever it is run."""
    return (int(sequence.prompt.sum()) + index * index) % 2


@dataclass
class Flight:
    sampled: list[Sequence]


class Simulation:
    """The engine's loop over a device that is a list of tokens by page."""

    def __init__(self, pages: int, *, slots=2, replay=True, prefix_cache=True, overlap=True):
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, SIZE)
        limits = Limits(slots, SIZE, WINDOW, ((1, 6), (2, 2)), replay, prefix_cache)
        self.scheduler = Scheduler(limits, self.pool, self.cache)
        self.limits, self.overlap = limits, overlap
        self.content = [[None] * SIZE for _ in range(pages)]
        self.pending: Flight | None = None
        self.sequences: list[Sequence] = []
        self.rows = 0

    def add(
        self, prompt, new: int, priority: int = 0, *, structured: bool = False, **request
    ) -> Sequence:
        asked = Request(tuple(prompt), new, **request)
        sequence = Sequence.of(asked, len(self.sequences), priority)
        sequence.matcher = object() if structured else None
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self.pending is None

    def step(self) -> Plan:
        plan = plan_step([self.scheduler])
        self.take(plan)
        return plan

    def take(self, plan: Plan) -> None:
        self.check_plan(plan)
        assert not plan.empty or self.pending or self.scheduler.idle, "a step without progress"
        dispatched = None
        if not plan.empty:
            dispatched = self.run(plan)
            for sequence in self.scheduler.running:
                self.scheduler.register(sequence)
        if self.overlap:
            dispatched, self.pending = self.pending, dispatched
        self.read(dispatched)
        self.scheduler.check()

    def check_plan(self, plan: Plan) -> None:
        busy = [*(chunk.sequence for chunk in plan.chunks), *plan.decode]
        assert len(busy) == len(set(map(id, busy)))
        assert all(s in self.scheduler.running and s not in plan.preempt for s in busy)
        assert len({s.slot for s in busy}) == len(busy)
        structured = [s for s in plan.decode if s.matcher]
        assert all(s.dispatched == len(s.result.token_ids) for s in structured)
        if plan.chunks:
            assert min(chunk.rows for chunk in plan.chunks) > 0
            assert prefill_shape(self.limits.prefill, *plan.prefill)
        if plan.preempt:
            urgent = min([*self.scheduler.running, *plan.preempt], key=lambda s: s.urgency)
            # Copies of its own prefix stay in the cache above the pages that it holds.
            assert urgent not in plan.preempt or len(self.cache)

    def run(self, plan: Plan) -> Flight:
        sampled = []
        for sequence in plan.preempt:
            sequence.saved.state = [list(self.content[page]) for page in sequence.saved.pages]
        for sequence in plan.resume:
            for page, saved in zip(sequence.pages, sequence.saved.state, strict=True):
                self.content[page] = list(saved)
            sequence.saved = None
        for chunk in plan.chunks:
            self.write(chunk.sequence, chunk.start, chunk.stop)
            chunk.sequence.computed = chunk.stop
            if chunk.last:
                sampled.append(chunk.sequence)
        for sequence in plan.decode:
            self.write(sequence, sequence.next_position, sequence.next_position + 1)
            sampled.append(sequence)
        for sequence in sampled:
            sequence.dispatched += 1
            sequence.stage = Stage.DECODE
        return Flight(sampled)

    def write(self, sequence: Sequence, start: int, stop: int) -> None:
        """Rows store their tokens, but not below a hit; they see every token before them."""
        new = [answer(sequence, i) for i in range(sequence.request.max_new_tokens)]
        tokens = [*sequence.prompt.tolist(), *new][:stop]
        for position in range(max(start, sequence.hit), stop):
            page = sequence.pages[position // SIZE]
            shared = self.pool.holders(page) > 1
            assert not shared or self.content[page][position % SIZE] == tokens[position]
            self.content[page][position % SIZE] = tokens[position]
        pages = sequence.pages[: -(-stop // SIZE)]
        assert [t for page in pages for t in self.content[page]][:stop] == tokens
        self.rows += stop - start

    def read(self, flight: Flight | None) -> None:
        for sequence in flight.sampled if flight else ():
            if sequence.stage is not Stage.DONE:
                token = answer(sequence, len(sequence.result.token_ids))
                sequence.result.add(TokenLogprobs(token, 0.0, ()), sequence.request)
                if sequence.result.finish_reason:
                    self.scheduler.register(sequence)
                    self.scheduler.release(sequence)

    def abort(self, sequence: Sequence) -> None:
        sequence.result.finish_reason = "abort"
        self.scheduler.release(sequence)

    def finish(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.idle:
                break
            self.step()
        assert self.idle, "no end"
        assert all(s.stage is Stage.DONE and s.saved is None for s in self.sequences)
        self.cache.clear()
        assert len(self.cache) == 0 and self.pool.free == self.pool.pages
        self.scheduler.check()


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=11)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, priorities, early ends and aborts in pools that barely hold one request."""

    @initialize(
        pages=st.integers(8, 14),
        slots=st.integers(1, 3),
        replay=st.booleans(),
        prefix_cache=st.booleans(),
        overlap=st.booleans(),
    )
    def begin(self, pages, **options):
        self.sim = Simulation(pages, **options)

    @rule(
        prompt=PROMPTS,
        new=st.integers(1, 5),
        priority=st.integers(0, 2),
        stop=st.sampled_from([(), (), (1,)]),
        scored=st.booleans(),
        structured=st.booleans(),
    )
    def add(self, prompt, new, priority, stop, scored, structured):
        scores = {"prompt_logprobs": 1 if scored else None}
        self.sim.add(prompt, new, priority, structured=structured, stop_ids=stop, **scores)

    @rule(pick=st.integers(0, 99), new=st.integers(1, 5))
    def next_turn(self, pick, new):
        """A prompt that repeats an earlier one and its answer."""
        known = [s.tokens_known().tolist() for s in self.sim.sequences if s.stage is Stage.DONE]
        if known := [tokens for tokens in known if len(tokens) < 15]:
            tokens = known[pick % len(known)]
            self.sim.add([*tokens, 1], min(new, 15 - len(tokens)))

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.sim.step()

    @rule(pick=st.integers(0, 99))
    def abort(self, pick):
        if alive := [s for s in self.sim.sequences if s.stage is not Stage.DONE]:
            self.sim.abort(alive[pick % len(alive)])

    @invariant()
    def agrees(self):
        self.sim.scheduler.check()

    def teardown(self):
        self.sim.finish()
        for s in self.sim.sequences:
            assert s.result.token_ids == [answer(s, i) for i in range(len(s.result.token_ids))]


SchedulerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
TestScheduler = SchedulerMachine.TestCase


def ones(count: int) -> list[int]:
    return [1] * count


def test_a_copy_of_a_cached_prefix_goes_on_after_the_copy_is_evicted():
    """Two cold prompts of equal tokens: the cache keeps the first one's pages, and loses them while
    the second one still grows.
    """
    sim = Simulation(24)
    sim.add(ones(4), 1)
    twin = sim.add(ones(4), 8)
    while not twin.nodes or twin.pages[0] == sim.cache.page(twin.nodes[0]):
        sim.step()
    sim.cache.clear()
    assert sim.cache.page(twin.nodes[0]) is None
    sim.finish()


@pytest.mark.parametrize(
    ("shared", "hit"), [(1, 0), (2, 0), (3, 0), (4, 4), (5, 4), (6, 6), (7, 6), (8, 8)]
)
def test_hits_are_whole_pages_longer_than_the_window(shared, hit):
    sim = Simulation(20)
    sim.add(ones(8), 1)
    while not sim.idle:
        sim.step()
    rows = sim.rows
    later = sim.add([*ones(shared), *[0] * (12 - shared)], 1)
    sim.finish()
    assert later.result.cached_tokens == hit
    assert sim.rows - rows == 12 - (hit - WINDOW if hit else 0)


def test_the_last_token_of_a_prompt_is_never_cached():
    sim = Simulation(20)
    for _ in range(2):
        again = sim.add(ones(8), 1)
        while not sim.idle:
            sim.step()
    assert again.result.cached_tokens == 6


@pytest.mark.parametrize("option", ["replay", "prefix_cache"])
def test_switched_off_nothing_is_adopted(option):
    sim = Simulation(20, **{option: False})
    for _ in range(2):
        again = sim.add(ones(8), 1)
        while not sim.idle:
            sim.step()
    assert again.result.cached_tokens == 0
    sim.finish()


def test_urgent_requests_start_first_and_late_ones_make_way():
    sim = Simulation(8, slots=2)
    late, urgent = sim.add(ones(4), 10, priority=1), sim.add([0] * 5, 10)
    preempted = []
    while not sim.idle:
        preempted += sim.step().preempt
    assert late in preempted and urgent not in preempted
    assert len(late.result.token_ids) == len(urgent.result.token_ids) == 10


def test_a_request_with_a_grammar_waits_for_its_reader_and_nobody_else_does():
    sim = Simulation(20)
    structured, plain = sim.add(ones(2), 5, structured=True), sim.add(ones(2), 9)
    decoded = []
    while not sim.idle:
        decoded.append(sim.step().decode)
    with_plain = [plain in batch for batch in decoded]
    with_structured = [structured in batch for batch in decoded]
    assert with_plain[:10] == [False] + [True] * 8 + [False]
    assert with_structured[:9] == [False, False, True, False, True, False, True, False, True]


def test_arrival_decides_among_equals():
    sim = Simulation(20, slots=1)
    order = [sim.add(ones(2), 1), sim.add(ones(2), 1), sim.add(ones(2), 1, priority=-1)]
    started = []
    while not sim.idle:
        started += [chunk.sequence for chunk in sim.step().chunks]
    assert started == [order[2], order[0], order[1]]


def test_a_prompt_that_does_not_fit_waits_and_keeps_its_place():
    sim = Simulation(8, slots=2)
    sim.add(ones(8), 8)
    big, small = sim.add([0] * 15, 1), sim.add([0], 1)
    sim.step()
    assert [big.stage, small.stage] == [Stage.WAITING, Stage.WAITING]
    sim.finish()


def test_chunks_share_a_dispatch_as_wide_as_the_widest():
    sim = Simulation(20, slots=2)
    sim.add(ones(2), 2), sim.add([0] * 7, 2)
    chunks = [(chunk.start, chunk.stop) for chunk in sim.step().chunks]
    assert chunks == [(0, 2), (0, 2)]
    shapes = sim.limits.prefill
    assert prefill_shape(shapes, 2, 2) == (2, 2)
    assert prefill_shape(shapes, 1, 2) == (2, 2)
    assert prefill_shape(shapes, 1, 3) == (1, 6)
    assert prefill_shape(shapes, 2, 3) is None
    sim.finish()


def test_a_long_prompt_needs_only_pages_not_a_wide_window():
    """F64: the window bounds nothing; the widest shape is the widest chunk."""
    sim = Simulation(600, slots=1)
    sim.add([0, 1] * 500, 1)
    widths = []
    while not sim.idle:
        widths += [chunk.stop - chunk.start for chunk in sim.step().chunks]
    assert max(widths) == 6 and sum(widths) == 1000


def test_preempted_pages_that_stayed_in_the_cache_are_taken_back():
    sim = Simulation(12, slots=2)
    sim.add([0] * 5, 10)
    late = sim.add(ones(6), 10, priority=1)
    kept = []
    while not sim.idle:
        plan = sim.step()
        if late in plan.resume:
            kept.append(len(late.nodes))
    assert kept and kept[0] > 0
    sim.finish()


def test_text_of_the_prompt_alone_is_registered_until_tokens_are_read():
    sim = Simulation(20)
    sequence = sim.add(ones(4), 6)
    while not sim.idle:
        sim.step()
        known = sequence.length + len(sequence.result.token_ids)
        assert len(sequence.nodes) <= known // SIZE
    tokens = sequence.tokens_known()
    assert isinstance(tokens, np.ndarray) and len(tokens) == 10
    # The last token was never fed.
    assert len(sim.cache.match(tokens, 9)) == 4
