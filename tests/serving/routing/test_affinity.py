"""Session affinity: fewest sessions first, then always the same rank."""

import pytest

from serving.routing.affinity import Affinity
from serving.routing.score import Target

A, B = Target("a", 0), Target("b", 0)


def test_sessions_spread_and_stay():
    homes = Affinity()
    first = [homes.choose(number, [A, B]) for number in range(4)]
    assert first == [A, B, A, B]
    assert [homes.choose(number, [A, B]) for number in range(4)] == first


def test_a_session_that_ended_makes_room():
    homes = Affinity()
    for number in range(4):
        homes.choose(number, [A, B])
    homes.end(1)
    homes.end(3)
    homes.end("never seen")
    assert [homes.choose(number, [A, B]) for number in (5, 6)] == [B, B]


def test_a_session_moves_when_its_rank_leaves():
    homes = Affinity()
    assert homes.choose("x", [A, B]) == A
    assert homes.choose("x", [B]) == B
    assert homes.choose("x", [A, B]) == B
    with pytest.raises(ValueError, match="must not be empty"):
        homes.choose("x", [])
