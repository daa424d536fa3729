"""Requests that wait in the router: who goes where and when, and that nobody waits for ever."""

from collections.abc import Hashable
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.routing.queue import Patience, Placed, Queue
from serving.routing.score import Board, Overlap, Target, Weights

A, B, C, D = Target("a", 0), Target("a", 1), Target("b", 0), Target("b", 1)


class Fleet:
    """Ranks, and requests with numbers for keys. step: rows of a dispatch."""

    def __init__(self, *targets: Target, step: int = 1000, share: float = 0.0, **patience):
        board = Board(Weights(decode=0, pool_credit=0.5))
        board.join(targets)
        self.queue, self.targets, self.sent = (
            Queue(board, Patience(step, share, **patience)),
            targets,
            0,
        )

    def add(self, prompt: int, now: float = 0.0, priority: int = 0, **held: int) -> int:
        """held: cached tokens by "a0", "b1", ...; or of the ranks in ``only``."""
        overlaps = {
            each: Overlap(held.get(each.worker + str(each.rank), 0)) for each in self.targets
        }
        self.queue.add(self.sent, prompt, lambda: overlaps, now, priority)
        self.sent += 1
        return self.sent - 1

    def place(self, now: float = 0.0) -> list[tuple[Hashable, Target]]:
        return [(each.key, each.target) for each in self.queue.place(now)]


def test_requests_wait_while_every_rank_has_work_for_its_next_step():
    fleet = Fleet(A, B)
    for _ in range(6):
        fleet.add(1000)
    assert fleet.place() == [(0, A), (1, B)]  # begin at once
    assert fleet.place() == [(2, A), (3, B)]  # for the next step
    assert fleet.place() == [] and len(fleet.queue) == 2
    fleet.queue.prefilled(1, 1.0)
    assert fleet.place(1.0) == [(4, B), (5, A)]


def test_a_step_that_begins_takes_a_request_for_every_rank_of_the_worker():
    fleet = Fleet(A, C, B, D)
    for _ in range(6):
        fleet.add(1000)
    assert fleet.place() == [(0, A), (1, C), (2, B), (3, D)]


def test_a_worker_in_the_middle_of_a_step_comes_last():
    fleet = Fleet(A, B, C)
    fleet.add(1000)
    assert fleet.place() == [(0, A)]
    fleet.add(1000)
    assert fleet.place() == [(1, C)]
    fleet.add(1000)
    assert fleet.place() == [(2, B)]


def test_a_step_in_the_middle_is_no_reason_to_compute_a_prefix_again():
    fleet = Fleet(A, B, C, step=4000)
    fleet.add(1000)
    assert fleet.place() == [(0, A)]
    fleet.add(9000, b0=1000, a1=3500)  # 8000 against 5500 and half a step
    assert fleet.place() == [(1, B)]


def test_a_first_token_ends_the_step_of_the_whole_worker():
    fleet = Fleet(A, B)
    fleet.add(100)
    fleet.add(100_000)
    assert fleet.place() == [(0, A), (1, B)]
    fleet.add(100)
    assert fleet.place() == [(2, A)]
    fleet.queue.prefilled(0, 1.0)
    fleet.add(100, 1.0)
    assert fleet.place(1.0) == [(3, A)]  # 2 is in the step that began


def test_the_share_of_what_waits_is_sent_when_much_does():
    """Two of twelve prompts of 100 rows begin, and steps of 100 rows take up to half of what still
    waits: three and two more are sent, for a sixth there would have to be 300 in a step and 250
    are half.
    """
    fleet = Fleet(A, B, step=100, share=1.0)
    fleet.add(100)
    fleet.add(100)
    assert len(fleet.place()) == 2
    for _ in range(10):
        fleet.add(100)
    assert len(fleet.place()) == 5
    assert fleet.place() == [] and len(fleet.queue) == 5


def test_a_step_is_filled_with_what_pads_it_least():
    """Steps of 1000 rows: 2 x 400 on a rank, but not 100 and 600: that would be padded to 1200."""
    fleet = Fleet(A, B)
    fleet.add(100)
    assert fleet.place() == [(0, A)]
    for prompt in (400, 400, 400, 400, 100):
        fleet.add(prompt)
    assert sorted(fleet.place()) == [(1, B), (2, A), (3, B), (4, A)]
    fleet.queue.prefilled(0, 1.0)
    assert fleet.place(1.0) == [(5, A)]
    fleet.add(600)
    fleet.add(600)
    assert fleet.place(1.0) == [(6, B)]


def test_a_long_prompt_takes_its_rank_and_room_of_the_other_in_the_steps_after():
    fleet = Fleet(A, B)
    fleet.add(2500)
    assert fleet.place() == [(0, A)]
    for _ in range(3):
        fleet.add(600)
    assert fleet.place() == [(1, B)]
    fleet.queue.prefilled(1, 1.0)  # it is in the second of three steps
    assert fleet.place(1.0) == [(2, B)]
    fleet.queue.prefilled(2, 2.0)  # and in the last
    assert fleet.place(2.0) == [(3, B)]
    fleet.add(600)
    assert fleet.place(2.0) == [(4, A)]


def test_a_request_waits_for_the_rank_that_has_its_prefix_but_not_for_ever():
    fleet = Fleet(A, C, wait_s=0.2)
    fleet.add(1000)
    fleet.add(1000)
    assert fleet.place() == [(0, A), (1, C)]
    fleet.add(500)
    fleet.add(400)
    assert fleet.place() == [(2, A), (3, C)]
    fleet.queue.prefilled(1, 0.05)
    late = fleet.add(9000, 0.1, a0=8000)
    assert fleet.place(0.1) == []  # 1000 + 500 + 1000 against 9000
    assert fleet.queue.wake_at == pytest.approx(0.3)
    other = fleet.add(100, 0.15)
    assert fleet.place(0.15) == [(other, C)]
    fleet.queue.prefilled(3, 0.2)
    assert fleet.place(fleet.queue.wake_at) == [(late, C)]
    assert fleet.queue.wake_at == inf


def test_waiting_for_a_prefix_must_be_worth_it():
    fleet = Fleet(A, C)
    fleet.add(8000)
    assert fleet.place() == [(0, A)]
    fleet.add(9000, a0=4000)  # 8000 + 5000 against 9000
    assert fleet.place() == [(1, C)]


def test_the_next_step_is_filled_with_what_is_alike():
    fleet = Fleet(A, B, wait_s=0.2)
    fleet.add(1000)
    fleet.add(1000)
    assert fleet.place() == [(0, A), (1, B)]
    for prompt in (500, 8000, 600):
        fleet.add(prompt)
    assert fleet.place() == [(2, A), (4, B)]


def test_nobody_is_overtaken_by_those_that_come_much_later():
    fleet = Fleet(A, B, wait_s=0.2)
    fleet.add(1000)
    fleet.add(1000)
    assert fleet.place() == [(0, A), (1, B)]
    for prompt, now in ((500, 0.0), (8000, 0.0), (600, 0.3)):
        fleet.add(prompt, now)
    assert fleet.place(0.3) == [(2, A), (3, B)]


def test_priorities_are_worth_time():
    fleet = Fleet(A, step=100, priority_s=10.0)
    first = fleet.add(100)
    assert fleet.place() == [(first, A)]
    low, high, old = fleet.add(100, 20.0, 1), fleet.add(100, 25.0), fleet.add(100, 14.0, 1)
    order = []
    for now in (26.0, 27.0, 28.0):
        [(key, _)] = fleet.place(now)
        order.append(key)
        fleet.queue.prefilled(key, now)
    assert order == [old, high, low]


def test_only_ranks_that_a_request_may_go_to():
    fleet = Fleet(A, C)
    fleet.queue.add("pinned", 100, lambda: {C: Overlap()}, 0.0)
    fleet.queue.add("nowhere", 100, dict, 0.0)
    assert fleet.queue.place(0.0) == [Placed("pinned", C, Overlap())]
    assert fleet.place() == [] and len(fleet.queue) == 1
    fleet.queue.freed("nowhere")
    assert len(fleet.queue) == 0


def test_a_rank_that_a_request_may_not_go_to_any_more():
    """What was alike when it came is looked at again before it is sent."""
    fleet = Fleet(A, B, wait_s=0.2)
    fleet.add(1000)
    fleet.add(1000)
    assert fleet.place() == [(0, A), (1, B)]
    fleet.add(500)
    assert fleet.place() == [(2, A)]
    fleet.add(8000, 0.1)
    allowed = [A, B]
    fleet.queue.add("alike", 500, lambda: dict.fromkeys(allowed, Overlap()), 0.1)
    allowed.remove(B)
    assert fleet.place(0.2) == [(3, B)]


def test_who_ends_before_it_began_makes_room():
    fleet = Fleet(A)
    for _ in range(3):
        fleet.add(1000)
    assert fleet.place() == [(0, A)] and fleet.place() == [(1, A)]
    fleet.queue.freed(1)
    assert fleet.place() == [(2, A)]


def test_ranks_that_leave_name_what_they_had():
    fleet = Fleet(A, C)
    fleet.add(100)
    fleet.add(100)
    fleet.place()
    fleet.add(100)
    assert fleet.queue.leave({A}) == [0]
    assert fleet.place(0.1) == [(2, C)]
    fleet.queue.prefilled(0, 0.2)  # what it still says is ignored
    fleet.queue.freed(0)
    fleet.queue.board.check()


@pytest.mark.parametrize(
    ("name", "value"), [("share", -1), ("wait_s", inf), ("step", -1), ("window", 0)]
)
def test_what_patience_must_be(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        Patience(**{name: value})


def test_a_key_is_used_once():
    fleet = Fleet(A)
    fleet.queue.add("x", 1, dict, 0.0)
    with pytest.raises(ValueError, match="key='x' must be new"):
        fleet.queue.add("x", 1, dict, 0.0)
    fleet.add(1)
    fleet.place()
    with pytest.raises(ValueError, match="key=0 must be new"):
        fleet.queue.add(0, 1, dict, 0.0)


class Machine(RuleBasedStateMachine):
    """Whatever happens, every request is sent once, where it may go, and none is left."""

    def __init__(self):
        super().__init__()
        self.fleet = Fleet(A, B, C)
        self.now, self.waiting, self.running = 0.0, set(), {}

    @rule(prompt=st.integers(1, 5000), cached=st.integers(0, 5000), priority=st.integers(-1, 1))
    def add(self, prompt, cached, priority):
        self.waiting.add(self.fleet.add(prompt, self.now, priority, b0=cached))

    @rule(seconds=st.floats(0, 0.3))
    def place(self, seconds):
        self.now += seconds
        for key, target in self.fleet.place(self.now):
            self.waiting.remove(key)
            self.running[key] = target

    @precondition(lambda self: self.running)
    @rule(data=st.data(), whole=st.booleans())
    def end(self, data, whole):
        key = data.draw(st.sampled_from(sorted(self.running)))
        if whole:
            self.fleet.queue.prefilled(key, self.now)
        self.fleet.queue.freed(key)
        del self.running[key]

    @invariant()
    def agrees(self):
        queue = self.fleet.queue
        assert len(queue) == len(self.waiting)
        assert queue._work == sum(each.work for each in queue._waiting)
        self.fleet.queue.board.check()

    def teardown(self):
        for _ in range(len(self.waiting) + len(self.running)):
            self.place(0.3)
            if not self.running:
                break
            key = min(self.running)
            self.fleet.queue.prefilled(key, self.now)
            self.fleet.queue.freed(key)
            del self.running[key]
        self.place(0.3)
        assert not self.waiting


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestQueue = Machine.TestCase
