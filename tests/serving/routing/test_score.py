"""The scorer: the formula by hand, ties, and loads that are the sums of what is booked."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.routing.score import Board, Overlap, Target, Weights

A, B, C = Target("a", 0), Target("a", 1), Target("b", 0)


def board(*targets: Target, **weights) -> Board:
    made = Board(Weights(**weights))
    made.join(targets)
    return made


def test_cost_is_uncached_work_and_load_in_blocks():
    made = board(A, block=100, pool_credit=0.5, prefill=2, decode=3)
    made.book("x", A, 1000, Overlap(cached=200, pooled=600))  # 1000 - 200 - 400 / 2 = 600 of work
    assert made.loads[A].prefill == 600
    # 2 * (600 + 500 - 300 - 100 / 2) + 3 * (1000 + 500)
    assert made.cost(A, 500, Overlap(300, 400)) == (2 * 750 + 3 * 1500) / 100


def test_credit_beyond_all_work_is_no_gain():
    assert board(A, decode=0).cost(A, 100, Overlap(cached=128)) == 0


def test_pool_pages_count_less_than_cached_and_more_than_none():
    made = board(A, B, C, pool_credit=0.75)
    overlaps = {A: Overlap(), B: Overlap(0, 800), C: Overlap(800, 800)}
    costs = [made.cost(target, 1000, overlap) for target, overlap in overlaps.items()]
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) == 3
    assert made.choose(1000, overlaps) == C


def test_a_cached_prefix_is_left_once_its_rank_has_more_to_do():
    made = board(A, B, decode=0)
    overlaps = {A: Overlap(cached=900), B: Overlap()}
    chosen = []
    for number in range(16):
        chosen.append(made.choose(1000, overlaps))
        made.book(number, chosen[-1], 1000, overlaps[chosen[-1]])
    # After nine requests of 100 tokens both ranks cost the same, and the other has fewer requests.
    assert chosen == [A] * 9 + [B] + [A] * 6


def test_equals_are_taken_in_turn():
    made = board(A, B, C, decode=0)
    chosen = []
    for number in range(6):
        chosen.append(made.choose(10, dict.fromkeys((A, B, C), Overlap())))
        made.book(number, chosen[-1], 10)
        made.freed(number)
    assert chosen == [A, B, C, A, B, C]


def test_ranks_that_step_with_a_busy_one_come_after_those_of_an_idle_worker():
    made = board(A, B, C, decode=0)
    made.book(0, A, 10)
    assert made.choose(10, dict.fromkeys((A, B, C), Overlap())) == C
    made.book(1, C, 10)
    assert made.choose(10, dict.fromkeys((A, B, C), Overlap())) == B


def test_decode_weight_0_ignores_what_requests_hold():
    made = board(A, B, decode=0)
    made.book("long", A, 100_000)
    made.prefilled("long")
    assert made.cost(A, 10) == made.cost(B, 10)


def test_a_rank_that_left_takes_nothing_and_forgets():
    made = board(A, B)
    made.book("x", A, 10)
    made.leave([A])
    made.prefilled("x")
    made.freed("x")
    made.join([A])
    assert made.loads[A].requests == 0
    made.leave([A, B])
    with pytest.raises(ValueError, match="must be"):
        made.choose(10, {A: Overlap()})
    with pytest.raises(ValueError, match="must take requests"):
        made.book("y", A, 10)


@pytest.mark.parametrize(
    "weights", [{"pool_credit": 1.1}, {"prefill": -1}, {"prefill": 0, "decode": 0}, {"block": 0}]
)
def test_weights_out_of_range(weights):
    with pytest.raises(ValueError, match="must be"):
        Weights(**weights)


class Bookings(RuleBasedStateMachine):
    """Requests come, decode and go, ranks join and leave."""

    def __init__(self):
        super().__init__()
        self.board, self.open, self.next = board(A, B, C, pool_credit=0.75), [], 0

    @rule(
        prompt=st.integers(1, 10_000), cached=st.integers(0, 12_000), pooled=st.integers(0, 12_000)
    )
    @precondition(lambda self: self.board.loads)
    def book(self, prompt, cached, pooled):
        overlaps = dict.fromkeys(self.board.loads, Overlap(cached, pooled))
        target = self.board.choose(prompt, overlaps)
        assert self.board.cost(target, prompt, overlaps[target]) == min(
            self.board.cost(other, prompt, overlaps[other]) for other in self.board.loads
        )
        self.board.book(self.next, target, prompt, overlaps[target])
        self.open.append(self.next)
        self.next += 1

    @rule(data=st.data(), tokens=st.integers(0, 100))
    @precondition(lambda self: self.open)
    def go_on(self, data, tokens):
        number = data.draw(st.sampled_from(self.open))
        self.board.prefilled(number)
        self.board.grown(number, tokens)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def free(self, data):
        number = data.draw(st.sampled_from(self.open))
        self.open.remove(number)
        self.board.freed(number)
        self.board.freed(number)

    @rule(rank=st.sampled_from([A, B, C]), back=st.booleans())
    def change_ranks(self, rank, back):
        self.board.leave([rank])
        if back:
            self.board.join([rank])

    @invariant()
    def loads_add_up(self):
        self.board.check()


Bookings.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestBookings = Bookings.TestCase
