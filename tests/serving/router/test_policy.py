"""Where a prompt goes, and what its rank has on its books until it ends."""

import asyncio
import itertools
import json
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.kv_events.hashes import page_hashes
from serving.kv_events.wire import DEVICE, POOL, Cleared, Removed, Stored
from serving.router.announcement import announcement
from serving.router.hop import _Events
from serving.router.placer import Placer, Sessions
from serving.router.policy import NoRank, OwnPolicy, Prompt, RoundRobin
from serving.router.residency import DevicePages, Pages
from serving.routing.score import NOTHING, Overlap, Target, Weights
from tests.serving.router.fake import PAGE, announced

A0, A1, B0, B1 = (Target(worker, rank) for worker in "AB" for rank in (0, 1))
TOKENS = list(range(10, 10 + 5 * PAGE))
HASHES = page_hashes(TOKENS, PAGE)
SAID = announcement(json.dumps(announced()).encode(), "http://h")


def prompt(tokens=TOKENS):
    whole = (len(tokens) - 1) // PAGE * PAGE
    return Prompt(tokens, page_hashes(tokens[:whole], PAGE), PAGE)


def stored(pages=5, medium=DEVICE, tokens=TOKENS, first=0):
    hashes = page_hashes(tokens, PAGE)
    piece = tokens[first * PAGE : pages * PAGE]
    parent = hashes[first - 1] if first else None
    return Stored(hashes[first:pages], parent, piece, PAGE, None, medium)


def own(pool=None):
    policy = OwnPolicy(Weights())
    asyncio.run(policy.join([A0, A1], SAID, pool))
    asyncio.run(policy.join([B0, B1], SAID, pool))
    return policy


def place(policy, key, prompt, targets):
    return asyncio.run(policy.place(key, prompt, lambda: targets))


def put(placer, prompt, targets, **options):
    return asyncio.run(placer.place(prompt, lambda: targets, **options))


def test_pages_on_the_device_and_in_pools():
    pages = Pages()
    for target, pool in ((A0, "p"), (A1, "p"), (B0, "q"), (B1, None)):
        pages.join(target, pool)
    pages.apply(A0, [stored(3), stored(4, POOL)])
    pages.apply(B0, [stored(2, POOL)])
    found = pages.overlaps(HASHES, PAGE, [A0, A1, B0, B1])
    expected = [Overlap(12, 16), Overlap(0, 16), Overlap(0, 8), NOTHING]
    assert [found[target] for target in (A0, A1, B0, B1)] == expected
    pages.apply(A1, [Removed([HASHES[2]], POOL)])
    pages.apply(A0, [Removed([HASHES[2]], DEVICE), Removed([7], DEVICE)])
    assert pages.overlaps(HASHES, PAGE, [A0, A1])[A0] == Overlap(8, 8)
    pages.apply(A0, [Cleared()])
    assert set(pages.overlaps(HASHES, PAGE, [A0, A1]).values()) == {NOTHING}
    assert pages.overlaps(HASHES, PAGE, [B0])[B0] == Overlap(0, 8)
    pages.leave(B0)
    pages.join(B0, "q")
    assert pages.overlaps(HASHES, PAGE, [B0])[B0] == NOTHING


_CHANGES = st.tuples(
    st.sampled_from([A0, A1, B0]),
    st.sampled_from(["stored", "removed", "cleared", "swept"]),
    st.lists(st.integers(0, 9), max_size=8),
)


@given(st.lists(_CHANGES, max_size=30))
def test_device_pages_are_those_of_a_plain_set(changes):
    """Whatever has been swept away of what was lost."""
    pages, held = DevicePages(), {A0: set(), A1: set(), B0: set()}
    with mock.patch("serving.router.residency._SWEPT", 2):
        for target, kind, names in changes:
            if kind == "stored":
                pages.apply(target, Stored(names, None, [], PAGE, None, DEVICE))
                held[target] |= set(names)
            elif kind == "removed":
                pages.apply(target, Removed(names, DEVICE))
                held[target] -= set(names)
            elif kind == "cleared":
                pages.clear(target)
                held[target] = set()
            else:
                pages.sweep()
            for start in range(10):
                hashes = range(start, 10)
                leading = {
                    target: sum(1 for _ in itertools.takewhile(names.__contains__, hashes))
                    for target, names in held.items()
                }
                expected = {target: count for target, count in leading.items() if count}
                assert pages.overlaps(hashes) == expected
            assert len(pages) == sum(map(len, held.values()))
        for _ in range(300):
            pages.sweep()
    assert pages._lost == [] and len(pages._index) == len(set().union(*held.values()))
    assert pages._made <= 3 + sum(kind == "cleared" for _, kind, _ in changes)


def test_a_prompt_goes_where_its_pages_are():
    policy = own()
    policy.events(B1, [stored(4)])
    placed = place(policy, 1, prompt(), [A0, A1, B0, B1])
    assert (placed.target, placed.overlap) == (B1, Overlap(16, 0))
    assert place(policy, 2, prompt(), [A0, A1, B0]).target != B1
    asyncio.run(policy.leave([B0, B1]))
    policy.grown(1, 5)
    policy.freed(1)
    asyncio.run(policy.join([B0, B1], SAID, None))
    assert place(policy, 3, prompt(), [A0, B1]).overlap == NOTHING
    policy.board.check()


def test_pages_in_the_pool_count_less_than_on_the_device():
    policy = own("pool")
    policy.events(A0, [stored(4, POOL)])
    policy.events(B0, [stored(4)])
    targets = [A0, A1, B0, B1]
    placed = [place(policy, key, prompt(), targets) for key in range(3)]
    assert placed[0].target == B0 and placed[0].overlap == Overlap(16, 16)
    assert [one.overlap for one in placed[1:]] == [Overlap(0, 16)] * 2
    assert policy.board.loads[placed[1].target].prefill == 20 - 0.75 * 16


def test_round_robin_takes_turns():
    policy = RoundRobin()
    asyncio.run(policy.join([A0, A1], SAID, None))
    asyncio.run(policy.join([B0], SAID, None))
    chosen = [place(policy, key, prompt(), [A0, A1, B0]).target for key in range(6)]
    assert chosen == [A0, A1, B0] * 2
    assert place(policy, 7, prompt(), [B0]).target == B0
    with pytest.raises(NoRank):
        place(policy, 8, prompt(), [])
    asyncio.run(policy.leave([B0]))


def test_a_prompt_is_computed_with_its_last_whole_page():
    """If the answer is not streamed."""
    policy = own()
    placer = Placer(policy)
    first, second = (put(placer, prompt(), [A0], tells=False) for _ in range(2))
    load = policy.board.loads[A0]
    assert load.prefill == 40
    placer.events(A0, [stored(3)])
    placer.events(A1, [stored(5)])
    placer.events(A0, [stored(4, POOL)])
    assert load.prefill == 40
    placer.events(A0, [stored(4, first=3)])
    assert load.prefill == 0 and load.active == 40
    cached = put(placer, prompt(), [A0], tells=False)
    assert load.prefill == 0 and cached.overlap.cached == 16
    streamed = put(placer, prompt([*TOKENS, *TOKENS]), [A0])
    assert load.prefill == 24
    placer.prefilled(streamed)
    placer.grown(streamed, 3)
    assert (load.prefill, load.active) == (0, 103)
    for placed in (first, second, cached, streamed):
        placer.freed(placed)
    assert (load.active, load.requests, placer._last_pages) == (0, 0, {})


def test_sessions_stay_and_are_forgotten():
    sessions = Sessions(most=2)
    homes = [sessions.choose(name, [A0, A1, B0]) for name in "xy"]
    assert sorted(homes) == [A0, A1]
    assert sessions.choose("x", [A0, A1, B0]) == homes[0]
    assert sessions.choose("y", [B0]) == B0
    sessions.choose("z", [A0, A1, B0])
    assert len(sessions._heard) == 2 and sum(sessions._affinity._sessions.values()) == 2


@pytest.mark.parametrize("session", [None, "s"])
def test_a_session_is_placed_on_its_rank(session):
    placer = Placer(own(), sticky=True)
    targets = [A0, A1, B0, B1]
    placed = {put(placer, prompt(), targets, session=session).target for _ in range(4)}
    assert len(placed) == (1 if session else 4)


@given(st.lists(st.sampled_from([b"data: x\n\n", b"x\r\n\r\n", b"\n", b"abc", b"\r"])), st.data())
def test_events_stay_whole(parts, data):
    stream, cut, events = b"".join(parts), [], _Events()
    while sum(map(len, cut)) < len(stream):
        start = sum(map(len, cut))
        cut.append(stream[start : data.draw(st.integers(start + 1, len(stream)))])
    passed = b"".join(whole for chunk in cut if (whole := events.push(chunk)))
    assert passed + events.left == stream
    assert passed == b"" or passed.endswith((b"\n\n", b"\r\n\r\n"))
    assert b"\n\n" not in events.left and b"\r\n\r\n" not in events.left
