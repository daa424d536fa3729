"""The scheduler with a pool that finds, loads, fails and gives up whenever it likes: whatever comes
when, every row finds all rows before it.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from serving.kv_pool.remote import Block, Waits
from serving.prefix_cache import PrefixCache
from serving.scheduler import Limits, Plan, Scheduler
from serving.sequence import Sequence
from tests.serving.test_scheduler import SIZE, WINDOW, Flight, SchedulerMachine, Simulation, ones

SLOW = 10**6


@dataclass
class ScriptedFetch:
    """Over after so many looks of the scheduler, the first half of them for the lookup; gives
    ``count`` pages.
    """

    tokens: list[int]
    first: int
    count: int
    looks: int
    missing: list[int] | None = None
    cancelled: bool = False
    left: int = field(init=False)

    def __post_init__(self):
        self.left = self.looks

    @property
    def waits(self) -> Waits | None:
        if self.left <= 0:
            return None
        self.left -= 1
        return Waits.LOOKUP if self.left >= self.looks / 2 else Waits.LOAD

    @property
    def stop(self) -> int:
        return self.first + (0 if self.left > 0 or self.cancelled else self.count)

    def take(self) -> list[Block]:
        assert self.left <= 0 and not self.cancelled
        pages = [self.tokens[i * SIZE : (i + 1) * SIZE] for i in range(self.first, self.stop)]
        middle = len(pages) // 2
        blocks = (self.first, pages[:middle]), (self.first + middle, pages[middle:])
        return [Block(first, len(rows), rows) for first, rows in blocks]

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedRemote:
    """Has what was stored; ``looks`` and ``share`` of the next fetches are set from outside."""

    def __init__(self):
        self.stored: dict[tuple[int, ...], list[int]] = {}
        self.looks, self.most = 0, SLOW
        self.fetches: list[tuple[int, int]] = []

    def fetch(self, sequence: Sequence, held: int, limit: int) -> ScriptedFetch:
        tokens = sequence.prompt.tolist()
        there = [tuple(tokens[: (i + 1) * SIZE]) in self.stored for i in range(limit)]
        count = 0
        while held + count < limit and there[held + count]:
            count += 1
        self.fetches.append((held, limit))
        missing = [index for index in range(held) if not there[index]]
        looks = self.looks if held < limit else 0
        return ScriptedFetch(tokens, held, min(count, self.most), looks, missing)


class PoolSimulation(Simulation):
    """The simulated device, which also loads pages and gives complete ones to the remote."""

    def __init__(self, pages: int, remote: ScriptedRemote | None = None, *, slots=2, **options):
        super().__init__(pages, slots=slots, **options)
        self.remote = remote or ScriptedRemote()
        self.cache = PrefixCache(self.pool, SIZE)
        shapes = ((1, 6), (2, 2))
        self.limits = Limits(
            slots, SIZE, WINDOW, shapes, self.limits.replay, self.limits.prefix_cache
        )
        self.scheduler = Scheduler(self.limits, self.pool, self.cache, self.remote)
        self.starved: list[set[Waits]] = []

    def take(self, plan: Plan) -> None:
        self.starved.append(plan.starved)
        if not (plan.empty and plan.starved and self.pending is None):
            super().take(plan)
        for item in self.scheduler.prefetch.drain(self.scheduler.running):
            tokens = item.sequence.tokens_known().tolist()[: (item.index + 1) * SIZE]
            assert self.content[item.page] == tokens[-SIZE:], "a page that is not what it is called"
            self.remote.stored[tuple(tokens)] = tokens[-SIZE:]

    def run(self, plan: Plan) -> Flight:
        for load in plan.loads:
            assert load.sequence in self.scheduler.running and load.stop > load.first
            loaded = []
            for block in load.blocks:
                for index, row in enumerate(block.rows, block.first):
                    if load.first <= index < load.stop:
                        page = load.sequence.pages[index]
                        assert self.pool.holders(page) == 1, "written over what others read"
                        self.content[page] = list(row)
                        loaded.append(index)
            assert loaded == list(range(load.first, load.stop))
        return super().run(plan)


class PoolMachine(SchedulerMachine):
    """Random arrivals with a pool that is fast, slow, forgetful or partial."""

    @initialize(
        pages=st.integers(8, 14),
        slots=st.integers(1, 3),
        replay=st.booleans(),
        prefix_cache=st.booleans(),
        overlap=st.booleans(),
    )
    def begin(self, pages, **options):
        self.sim = PoolSimulation(pages, **options)

    @rule(looks=st.integers(0, 9), most=st.integers(0, 5))
    def pool_changes(self, looks, most):
        self.sim.remote.looks, self.sim.remote.most = looks, most

    @rule(pick=st.integers(0, 99))
    def pool_forgets(self, pick):
        if keys := sorted(self.sim.remote.stored):
            del self.sim.remote.stored[keys[pick % len(keys)]]

    @rule()
    def device_forgets(self):
        self.sim.cache.clear()


PoolMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def filled(*tokens: int) -> ScriptedRemote:
    """A pool with every page of a prompt."""
    remote = ScriptedRemote()
    sim = PoolSimulation(24, remote)
    sim.add(tokens, 1)
    sim.finish()
    return remote


def test_what_another_stored_is_loaded_and_all_but_a_window_is_not_computed():
    remote = filled(*ones(8))
    sim = PoolSimulation(24, remote)
    sequence = sim.add([*ones(8), 0, 0], 2)
    sim.finish()
    assert (sequence.result.cached_tokens, sequence.result.pool_tokens) == (8, 8)
    assert sim.rows == 10 - 8 + WINDOW + 1


def test_only_what_the_device_lacks_is_asked_for():
    remote = filled(*ones(10))
    sim = PoolSimulation(24, remote)
    sim.add(ones(5), 1)
    while not sim.idle:
        sim.step()
    remote.fetches.clear()
    sequence = sim.add(ones(11), 1)
    sim.finish()
    assert remote.fetches == [(2, 5)]
    assert (sequence.result.cached_tokens, sequence.result.pool_tokens) == (10, 6)


def test_a_hit_that_is_no_longer_than_the_window_is_not_adopted():
    remote = filled(*ones(3))
    sim = PoolSimulation(24, remote)
    sequence = sim.add([*ones(2), 0, 0, 0], 1)
    sim.finish()
    assert sequence.result.cached_tokens == 0


def test_who_waits_for_the_pool_holds_up_nobody():
    sim = PoolSimulation(24)
    sim.remote.looks = SLOW
    stuck = sim.add(ones(8), 1)
    sim.remote.looks = 0
    others = [sim.add([0, *ones(7)], 3), sim.add([0, 0, *ones(6)], 3)]
    for _ in range(30):
        sim.step()
    assert all(other.result.finish_reason == "length" for other in others)
    assert not stuck.pages and stuck.slot < 0
    stuck.fetch.left = 0
    sim.finish()
    assert stuck.result.token_ids


def test_steps_with_room_for_who_waits_are_told_apart():
    sim = PoolSimulation(24, slots=1)
    sim.remote.looks = 8
    sim.add(ones(8), 1)
    for _ in range(7):
        sim.step()
    assert sim.starved[:7] == [{Waits.LOOKUP}] * 4 + [{Waits.LOAD}] * 3
    sim.finish()
    full = PoolSimulation(24, slots=1)
    full.add(ones(3), 8)
    full.step()
    full.remote.looks = SLOW
    waiting = full.add(ones(8), 1)
    for _ in range(4):
        full.step()
    assert full.starved == [set()] * 5, "no slot is free: the pool holds nothing up"
    waiting.fetch.left = 0
    full.finish()


def test_pages_lost_by_the_device_meanwhile_are_asked_for_once_more():
    remote = filled(*ones(10))
    sim = PoolSimulation(24, remote)
    sim.add(ones(5), 1)
    while not sim.idle:
        sim.step()
    remote.looks = 4
    remote.fetches.clear()
    sequence = sim.add(ones(11), 1)
    sim.cache.clear()
    sim.finish()
    assert remote.fetches == [(2, 5), (0, 5)]
    assert sequence.result.pool_tokens == 10


def test_what_the_pool_lost_and_the_device_holds_is_stored_again():
    sim = PoolSimulation(24)
    sim.add(ones(8), 1)
    while not sim.idle:
        sim.step()
    sim.remote.stored.clear()
    sim.add([*ones(8), 0, 0, 0], 2)
    sim.finish()
    assert sorted(map(len, sim.remote.stored)) == [2, 4, 6, 8, 10, 12]


def test_an_aborted_request_lets_go_of_its_fetch():
    sim = PoolSimulation(24)
    sim.remote.looks = SLOW
    sequence = sim.add(ones(8), 1)
    fetch = sequence.fetch
    sim.step()
    sim.abort(sequence)
    assert fetch.cancelled and sequence.fetch is None
    sim.finish()


def test_only_those_who_are_next_ask_and_nobody_starts_unasked():
    remote = filled(0, *ones(7))
    sim = PoolSimulation(24, remote, slots=1)
    remote.looks = SLOW
    sequences = [sim.add([0, *ones(7)], 1) for _ in range(4)]
    short = sim.add([0], 1)
    for _ in range(9):
        sim.step()
    assert [s.fetch is not None for s in sequences] == [True, True, False, False]
    assert short.result.token_ids and not any(s.result.token_ids for s in sequences)
    remote.looks = 0
    for sequence in sequences[:2]:
        sequence.fetch.left = 0
    sim.finish()
    assert [s.result.cached_tokens for s in sequences] == [6] * 4
