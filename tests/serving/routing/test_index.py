"""Which rank holds which leading pages."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.routing.index import Residency
from serving.routing.score import Target

RANKS = [Target("a", 0), Target("a", 1), Target("b", 0)]


def test_leading_pages_count_and_gaps_end_them():
    index = Residency()
    index.stored(RANKS[0], "abcd")
    index.stored(RANKS[1], "acd")
    index.stored(RANKS[2], "x")
    assert index.overlaps("abcde") == {RANKS[0]: 4, RANKS[1]: 1}
    index.removed(RANKS[0], "bz")
    assert index.overlaps("abcde") == {RANKS[0]: 1, RANKS[1]: 1}
    index.removed(RANKS[0], "abcd")
    assert index.overlaps("abcde") == {RANKS[1]: 1}
    assert index.overlaps("") == {}


def test_pages_that_nobody_holds_take_no_room():
    index = Residency()
    index.stored(RANKS[0], "ab")
    index.stored(RANKS[1], "b")
    index.removed(RANKS[0], "ab")
    assert len(index) == 1
    index.removed(RANKS[1], "b")
    index.removed(RANKS[2], "b")
    assert len(index) == 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(RANKS), st.booleans(), st.text("abcdef", max_size=4))),
    st.text("abcdef", max_size=6),
)
def test_it_says_what_sets_say(changes, prompt):
    index, held = Residency(), {rank: set() for rank in RANKS}
    for rank, stored, keys in changes:
        (index.stored if stored else index.removed)(rank, keys)
        held[rank] = held[rank] | set(keys) if stored else held[rank] - set(keys)
    expected = {}
    for rank, keys in held.items():
        count = next((i for i, key in enumerate(prompt) if key not in keys), len(prompt))
        expected |= {rank: count} if count else {}
    assert index.overlaps(prompt) == expected
