"""Data ranks: who gets a request, and steps that all ranks take together, on simulated devices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.buckets import prefill_shape
from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.ranks import assign, plan_step
from serving.request import Request
from serving.scheduler import Limits, Plan, Scheduler
from serving.sequence import Sequence, Stage
from tests.serving.speculative.test_scheduler import DRAFTS, REQUESTS, Drafting
from tests.serving.test_scheduler import SIZE, WINDOW, answer, ones


def part(step: Plan, rank: int) -> Plan:
    """What one rank does in a step."""

    def mine(items: list) -> list:
        return [item for item in items if item.data_rank == rank]

    lists = {name: mine(getattr(step, name)) for name in ("preempt", "resume", "chunks", "decode")}
    return Plan(**lists, drafts=step.drafts)


class Ranks:
    """Simulated devices that take their steps together."""

    def __init__(self, count: int, pages: int, *, max_drafting: int = 1, **options):
        self.sims = [
            Drafting(pages, seed, max_drafting=max_drafting, **options) for seed in range(count)
        ]
        self.schedulers = [sim.scheduler for sim in self.sims]
        self.sequences: list[Sequence] = []

    def add(self, prompt, new: int, priority: int = 0, **request) -> Sequence:
        sequence = Sequence.of(
            Request(tuple(prompt), new, **request), len(self.sequences), priority
        )
        assign(self.schedulers, sequence)
        self.sequences.append(sequence)
        return sequence

    @property
    def idle(self) -> bool:
        return all(sim.idle for sim in self.sims)

    def step(self) -> Plan:
        step = plan_step(self.schedulers)
        decoding = [len(part(step, rank).decode) for rank in range(len(self.sims))]
        if step.drafts and not step.preempt:
            assert max(decoding) <= self.schedulers[0].limits.max_drafting
        if step.chunks:
            assert prefill_shape(self.schedulers[0].limits.prefill, *step.prefill)
        for rank, sim in enumerate(self.sims):
            sim.take(part(step, rank))
        return step

    def drain(self) -> None:
        for _ in range(2000):
            if self.idle:
                return
            self.step()
        raise AssertionError("no end")

    def finish(self) -> None:
        self.drain()
        for sim in self.sims:
            sim.finish()
        assert all(s.stage is Stage.DONE for s in self.sequences)
        for s in self.sequences:
            assert s.result.token_ids == [answer(s, i) for i in range(len(s.result.token_ids))]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=12),
    count=st.integers(1, 3),
    pages=st.integers(14, 24),
    slots=st.integers(1, 3),
    max_drafting=st.integers(1, 4),
    apart=st.integers(0, 2),
    switches=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_rank_goes_on_whatever_the_others_do(
    requests, count, pages, slots, max_drafting, apart, switches
):
    """Unequal ranks, some without requests: every step of a busy rank makes progress."""
    names = "replay", "prefix_cache", "overlap"
    options = dict(zip(names, switches, strict=True))
    ranks = Ranks(count, pages, slots=slots, max_drafting=max_drafting, **options)
    for prompt, new, priority, stop, speculative in requests:
        ranks.add(prompt, new, priority, stop_ids=stop, speculative=speculative)
        for _ in range(apart):
            ranks.step()
    ranks.finish()


def test_one_shape_holds_the_chunks_of_all_ranks():
    """Shapes 1 x 6 and 2 x 2: beside two short prompts a long one gets two rows a step."""
    ranks = Ranks(2, 40, slots=2)
    short = [ranks.add(ones(2), 1) for _ in range(4)]
    long = ranks.add([0] * 9, 1)
    assert [s.data_rank for s in (*short, long)] == [0, 1, 0, 1, 0]
    assert [chunk.rows for chunk in ranks.step().chunks] == [2, 2, 2, 2]
    ranks.finish()
    ranks = Ranks(2, 40, slots=2)
    first, second = ranks.add([0] * 7, 1), ranks.add(ones(2), 1)
    third = ranks.add(ones(3), 1)
    assert [s.data_rank for s in (first, second, third)] == [0, 1, 1]
    assert [(c.sequence, c.rows) for c in ranks.step().chunks] == [(first, 6), (second, 2)]
    ranks.finish()


def test_the_largest_batch_decides_about_drafts():
    ranks = Ranks(2, 40, slots=4, max_drafting=2)
    for new in (4, 30, 4, 30, 4):  # three on the first rank
        ranks.add(ones(2), new)
    drafts = []
    while not ranks.idle:
        step = ranks.step()
        most = max(len(part(step, rank).decode) for rank in range(2))
        if most:
            assert step.drafts == (DRAFTS if most <= 2 else 0)
            drafts.append(step.drafts)
    assert {0, DRAFTS} == set(drafts)
    ranks.finish()


def scheduler(slots: int = 4) -> Scheduler:
    pool = PagePool(64)
    limits = Limits(slots, SIZE, WINDOW, ((1, 6), (2, 2)))
    return Scheduler(limits, pool, PrefixCache(pool, SIZE))


def assigned(ranks, *lengths: int) -> list[int]:
    found = []
    for length in lengths:
        sequence = Sequence.of(Request(tuple(ones(length)), 4), len(found))
        assign(ranks, sequence)
        found.append(sequence.data_rank)
    return found


def test_requests_go_where_the_fewest_rows_wait():
    assert assigned([scheduler() for _ in range(3)], 5, 9, 3, 1, 4, 2) == [0, 1, 2, 2, 2, 0]


def test_among_equals_the_rank_with_the_fewest_requests():
    """Nothing is left to encode anywhere, but one rank decodes."""
    ranks = Ranks(2, 40)
    for _ in range(2):
        ranks.add(ones(4), 30)
    assert [len(rank.sequences) for rank in ranks.schedulers] == [1, 1]
    ranks.schedulers[0].release(ranks.sequences[0])
    while ranks.sequences[1].stage is not Stage.DECODE:
        ranks.step()
    assert ranks.add(ones(4), 3).data_rank == 0
    ranks.finish()


@pytest.mark.parametrize(("prefix", "rank"), [(9, 1), (0, 0)])
def test_a_cached_prefix_attracts(prefix, rank):
    """The second rank has the prompt's pages; looking for them makes nothing more recent."""
    ranks = [scheduler(), scheduler()]
    tokens, cache, parent = ones(9), ranks[1].cache, 0
    for index in range(4):
        [page] = ranks[1].pool.take(1)
        piece = Sequence.of(Request(tuple(tokens), 1), 0).prompt[2 * index : 2 * index + 2]
        parent = cache.insert(parent, piece, page)
        ranks[1].pool.give_back([page])
    used = [node.used for node in cache._nodes.values()]
    sequence = Sequence.of(Request(tuple([*tokens[:prefix], *[0] * (9 - prefix)]), 2), 0)
    assign(ranks, sequence)
    assert sequence.data_rank == rank
    assert sequence.computed == (8 - WINDOW if rank else 0)
    assert [node.used for node in cache._nodes.values()] == used


def test_a_free_slot_goes_before_a_cached_prefix():
    ranks = Ranks(2, 64, slots=1)
    ranks.add(ones(9), 1)
    ranks.drain()
    busy = ranks.add(ones(9), 30)
    assert busy.data_rank == 0 and busy.computed == 8 - WINDOW
    assert ranks.add(ones(9), 1).data_rank == 1
    again = [ranks.add(ones(9), 1), ranks.add(ones(9), 1)]
    assert sorted(s.data_rank for s in again) != [1, 1]
    ranks.finish()


def test_who_waits_for_a_slot_takes_one_that_gets_free_elsewhere():
    """Two long answers on each of two ranks of two slots, two short ones that wait behind them; the
    first rank gets free.
    """
    ranks = Ranks(2, 64, slots=2)
    long = [ranks.add(ones(4), 30, speculative=False) for _ in range(4)]
    waiting = [ranks.add(ones(2), 2, priority) for priority in (1, 0)]
    assert [s.data_rank for s in waiting] == [0, 1]
    for _ in range(4):
        ranks.step()
    for sequence in long:
        if sequence.data_rank == 0:
            ranks.schedulers[0].release(sequence)
    assert {c.sequence for c in ranks.step().chunks} == set(waiting)
    assert [s.data_rank for s in waiting] == [0, 0]
    assert ranks.schedulers[1].spare_slots == 0
    ranks.finish()


def test_who_was_sent_to_a_rank_waits_there():
    """Two on each of two ranks of one slot, then the first is free: of those that wait for the
    second the one may move that was not sent to it, though it is the less urgent.
    """
    ranks = Ranks(2, 64, slots=1)
    sent = [Sequence.of(Request(tuple(ones(4)), 30), i) for i in range(2)]
    for sequence in sent:
        assign(ranks.schedulers, sequence, 1)
    assert [s.data_rank for s in sent] == [1, 1] and ranks.schedulers[0].idle
    ranks.step()
    assert ranks.schedulers[1].waiting == sent[1:] and ranks.schedulers[0].idle
    other = Sequence.of(Request(tuple(ones(2)), 2), 2, priority=1)
    other.data_rank = 1
    ranks.schedulers[1].add(other)
    ranks.step()
    assert other.data_rank == 0 and ranks.schedulers[1].waiting == sent[1:]
    ranks.sequences += [*sent, other]
    ranks.finish()


@pytest.mark.parametrize(("left", "rank"), [(1, 0), (9, 1)])
def test_who_waits_for_a_slot_leaves_its_prefix_if_that_takes_less_time(left, rank):
    """The first of two ranks has 24 tokens of a prompt, four steps of six rows, and one slot, taken
    for one more token or for nine.
    """
    ranks = Ranks(2, 64, slots=1)
    known = ranks.add(ones(25), 1)
    ranks.drain()
    assert known.data_rank == 0
    busy = [ranks.add(ones(2), new, speculative=False) for new in (left + 1, 2)]
    assert [s.data_rank for s in busy] == [0, 1]
    ranks.step()
    again = Sequence.of(Request(tuple(ones(25)), 1), 9)
    again.computed = ranks.schedulers[0].first_row(again)
    ranks.schedulers[0].add(again)
    ranks.sequences.append(again)
    ranks.schedulers[1].release(busy[1])
    ranks.step()
    assert again.data_rank == rank
    ranks.finish()


def test_who_gets_a_slot_at_once_stays_with_its_prefix():
    """Nothing runs on the first of two ranks, which has a slot and two requests for it."""
    ranks = Ranks(2, 64, slots=1)
    ranks.add(ones(25), 1)
    ranks.drain()
    waiting = [Sequence.of(Request(tuple(ones(25)), 1), number) for number in (8, 9)]
    for sequence in waiting:
        assign(ranks.schedulers, sequence, 0)
        sequence.pinned = False
        ranks.sequences.append(sequence)
    ranks.step()
    assert [s.data_rank for s in waiting] == [0, 1]
    ranks.finish()


def test_requests_stay_on_their_rank_when_preempted():
    ranks = Ranks(2, 14, slots=2)
    for i in range(4):
        ranks.add(ones(4 + i), 16)
    homes = [s.data_rank for s in ranks.sequences]
    preempted = []
    while not ranks.idle:
        preempted += ranks.step().preempt
    assert preempted and homes == [s.data_rank for s in ranks.sequences]
    ranks.finish()
