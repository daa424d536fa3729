"""Steps of an instance: what the engine's scheduler plans, in the time of its buckets."""

import numpy as np
import pytest

from serving.pages import PagePool
from serving.prefix_cache import PrefixCache
from serving.request import Request
from serving.routing.score import Target
from serving.scheduler import Limits
from serving.sequence import Sequence
from serving.simulate.events import Events
from serving.simulate.instance import Cost, Instance, Job
from serving.simulate.pool import Keys, LeastRecent, Link, keys_of
from serving.simulate.sessions import Made
from tests.serving.simulate.support import Simple, small

LIMITS = Limits(slots=4, page_size=4, window=2, prefill=((1, 8), (1, 32), (2, 16)))


def instance(**values) -> Instance:
    caches = [PrefixCache(PagePool(64), 4) for _ in range(2)]
    return Instance(small(**values).fleet, LIMITS, caches, [None, None], Cost(Simple(), 0.0))


def job(ids: int, rank: int, number: int = 0, tokens: int = 1, base: int = 0) -> Job:
    lengths, outputs = np.array([ids]), np.array([tokens])
    session = Made(range(0), base, lengths, outputs, np.zeros(1))
    sequence = Sequence(Request((), tokens), number, prompt=session.prompt(0), chain=Keys(4))
    return Job(session, 0, sequence, [], 0, 0.0, Target("0", rank))


def test_a_step_takes_the_time_of_the_bucket_that_holds_both_ranks():
    made, first, second = instance(), job(6, 0), job(12, 1, 1, base=100)
    made.add(first)
    made.add(second)
    # One request a rank, 12 rows of 16 tokens: the bucket of 32 rows; one replay place a rank.
    assert made.begin() == (1000 + 32 * 16 + 1000 + 32) / 1e6
    assert (made.works(0), made.works(1)) == (True, True)
    got, _ = made.end()
    assert [(each, done) for each, done in got] == [(first, True), (second, True)]
    assert made.begin() is None
    made.check()


def test_a_long_prompt_takes_several_steps_and_one_replay():
    made, only = instance(), job(70, 1)
    made.add(only)
    seconds = []
    while (step := made.begin()) is not None:
        seconds.append(step)
        assert not made.works(0)
        made.end()
    encode = [1000 + 32 * 16 + start * 16 / 100 for start in (0, 32)]
    last = 1000 + 8 * 16 + 64 * 16 // 100 + (1000 + 32)
    assert [round(1e6 * each) for each in seconds] == [round(us) for us in (*encode, last)]


def test_a_request_without_room_in_the_step_is_queued():
    made = instance()
    for number in range(3):
        made.add(job(16, 0, number, base=100 * number))
    made.begin()
    assert made.works(0)
    assert made.left_out == [True, False]
    made.add(job(16, 1, 3, base=300))
    assert made.left_out == [True, False] and made.waits(1)  # it came during the step
    made.end()
    made.begin()
    assert made.left_out == [False, False] and not made.waits(0)


def test_a_prompt_that_was_remembered_is_a_hit():
    made, again = instance(), job(21, 1)
    made.remember(1, again.sequence.prompt)
    made.add(again)
    made.begin()
    assert again.sequence.hit == 20
    assert again.sequence.result.encoder_rows == 21 - (20 - LIMITS.window)


def test_decode_steps_stand_for_a_grain_of_tokens():
    made = instance(fleet__role="both", fleet__decode_sizes=[2, 8])
    only = job(6, 0, tokens=3)
    made.add(only)
    made.begin()
    made.end()
    assert made.begin() == 16 * (1000 + 2) / 1e6
    made.end()
    made.begin()
    ((got, done),) = made.end()[0]
    assert (got, done) == (only, True)
    assert only.sequence.result.token_ids == only.session.answer(0).tolist()
    made.check()


def test_pages_of_two_ranks_move_side_by_side():
    caches = [PrefixCache(PagePool(64), 4) for _ in range(2)]
    clock, pool = Events(), LeastRecent(100)
    links = [
        Link(clock, pool, lookup_s=0, page_s=0, least_pages=1, ready=lambda: None) for _ in caches
    ]
    made = Instance(small().fleet, LIMITS, caches, links, Cost(Simple(), 0.25))
    for rank, pages in ((0, 2), (1, 3)):
        one = job(4 * pages + 1, rank, rank, base=100 * rank)
        pool.put(keys_of(one.sequence).keys(one.sequence.prompt, pages))
        made.add(one)
    programs = 1000 + 8 * 16 + 10 * 16 // 100 + 1000 + 32
    seconds = made.begin()
    assert seconds == pytest.approx(3 * 0.25 + programs / 1e6, abs=2e-6)


def test_remembering_more_than_fits_keeps_what_came_last():
    made = instance()
    for number in range(12):
        made.remember(0, np.arange(32, dtype=np.int32) + 100 * number)
    made.check()
    cache = made.ranks[0].cache
    found = [len(cache.find(np.arange(32, dtype=np.int32) + 100 * n, 8)) for n in range(12)]
    assert found == [0] * 4 + [8] * 8
