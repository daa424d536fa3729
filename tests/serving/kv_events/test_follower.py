"""A mirror fed by events is the cache: whatever is lost, told again, interrupted or restarted."""

import logging

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from serving.kv_events.follower import Follower
from serving.kv_events.hashes import page_hashes
from serving.kv_events.hooks import DeviceWatch, PoolWatch
from serving.kv_events.log import EventLog, Pooled
from serving.kv_events.wire import (
    DEVICE,
    END,
    POOL,
    Batch,
    Cleared,
    Removed,
    Stored,
    decode,
    encode,
    sequence_bytes,
)
from serving.kv_pool.keys import Chain
from serving.pages import PagePool
from serving.prefix_cache import ROOT, PrefixCache
from tests.serving.kv_events.support import Mirror, inserted
from tests.serving.test_prefix_cache import PAGES, SIZE, PrefixCacheMachine, ids

POOLED = 5


def frames(number: int, payload: bytes = b"") -> list[bytes]:
    return [b"", sequence_bytes(number), payload]


def catch_up(follower: Follower, log: EventLog, *, lose: int | None = None) -> None:
    """A whole answer, but for one of its messages that is not the last."""
    answer = list(log.since(follower.ask()))
    if lose is not None and len(answer) > 1:
        del answer[lose % (len(answer) - 1)]
    for message in answer:
        assert not follower.replayed(frames(*message))
    assert follower.replayed(frames(END))


class TellingMachine(PrefixCacheMachine):
    """The cache's own machine, watched through a connection that may lose messages. Few are kept,
    and few pages told at once.
    """

    def __init__(self):
        super().__init__()
        self.mirror = Mirror()
        self.follower = Follower(self.mirror.deliver, rank=0, page_size=SIZE, name="worker")
        self.lossy = False
        self.begin()

    def begin(self):
        self.changes, self.pooled = [], {}
        self.log = EventLog(0, SIZE, pool_pages=POOLED, kept_bytes=700, most=3)
        self.cache.watcher = DeviceWatch(self.changes.append)
        self.pool_watch = PoolWatch(lambda rank, change: self.changes.append(change), SIZE)

    @rule(lossy=st.booleans())
    def connection(self, lossy):
        self.lossy = lossy

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def put_into_pool(self, data):
        """Some page of a holder; the pool is taken to lose what was put longest ago."""
        held = data.draw(st.sampled_from(self.holders))
        if not held.pages:
            return
        index = data.draw(st.integers(0, len(held.pages) - 1))
        name = page_hashes(held.tokens, SIZE)[index]
        self.pool_watch.stored(0, Chain(b"", SIZE), held.tokens, index)
        self.pooled.pop(name, None)
        self.pooled[name] = True
        if len(self.pooled) > POOLED:
            del self.pooled[next(iter(self.pooled))]

    @rule(filled=st.integers(0, 9), heard=st.integers(0, 9))
    def restart(self, filled, heard):
        """A new process at the same address has filled some pages and told of each, until it is
        noticed that the connection was lost; some of that was heard.
        """
        self.pool, self.content, self.holders = PagePool(PAGES), {}, []
        self.cache = PrefixCache(self.pool, SIZE)
        self.begin()
        self.mirror.strict = False
        for token in range(filled):
            [page] = self.pool.take(1)
            self.content[page] = ids(token, token).tobytes()
            self.cache.insert(ROOT, ids(token, token), page)
            self.pool.give_back([page])
            message = self.log.append([self.changes.pop()])
            if token >= filled - heard:
                self.follower.live(frames(*message))
        self.follower.forget()
        self.mirror.strict = True

    @rule(taken=st.integers(0, 5), lose=st.integers(0, 5))
    def interrupted(self, taken, lose):
        """An answer that ends too early is given up, one with a gap is not believed."""
        for message in list(self.log.since(self.follower.ask()))[:taken]:
            self.follower.replayed(frames(*message))
        self.follower.forget()
        catch_up(self.follower, self.log, lose=lose)

    @invariant()
    def mirrors(self):
        while self.changes:
            message = self.log.append([self.changes.pop(0) for _ in self.changes[:3]])
            if message and not self.lossy and not self.follower.live(frames(*message)):
                catch_up(self.follower, self.log)
                assert self.follower.live(frames(*message))
        if self.lossy:
            return
        if self.follower.next != self.log.next:
            catch_up(self.follower, self.log)
        assert self.follower.next == self.log.next
        assert self.mirror.state == {DEVICE: self.names(), POOL: set(self.pooled)}

    def names(self) -> set[int]:
        """Hashes of what the cache holds, from the tokens that its pages were filled with."""
        prefixes = [np.frombuffer(self.content[page], np.int32) for page in self.cached()]
        return {page_hashes(prefix, SIZE)[-1] for prefix in prefixes}

    def teardown(self):
        super().teardown()
        self.lossy = False
        self.mirrors()
        assert not self.mirror.state[DEVICE]


TellingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTelling = TellingMachine.TestCase


class Followed:
    """A log of one data rank and who follows it."""

    def __init__(self):
        self.log = EventLog(0, SIZE, pool_pages=4)
        self.mirror = Mirror()
        self.follower = Follower(self.mirror.deliver, rank=0, page_size=SIZE, name="worker")

    def tell(self, *changes) -> bool:
        return self.follower.live(frames(*self.log.append(changes)))


@pytest.fixture
def followed() -> Followed:
    made = Followed()
    catch_up(made.follower, made.log)
    return made


def test_pages_that_follow_each_other_share_an_event():
    log = EventLog(0, SIZE, pool_pages=4)
    first, second = page_hashes([1, 1, 2, 2], SIZE)
    [other] = page_hashes([3, 3], SIZE)
    _, payload = log.append(
        [inserted(1, ROOT, 1, 1), inserted(2, 1, 2, 2), inserted(3, ROOT, 3, 3)]
    )
    assert decode(payload).events == [
        Stored([first, second], None, [1, 1, 2, 2], SIZE, None, DEVICE),
        Stored([other], None, [3, 3], SIZE, None, DEVICE),
    ]


def test_nothing_to_tell_is_no_message():
    log = EventLog(0, SIZE, pool_pages=4)
    page = Pooled(7, None, bytes(4 * SIZE))
    assert log.append([page]) and log.append([page]) is None and log.append([]) is None
    assert log.next == 2


def test_what_is_kept_is_told_as_it_was(followed):
    told = [followed.log.append([inserted(n, ROOT, n, n)]) for n in range(1, 5)]
    assert list(followed.log.since(2)) == told[1:] and list(followed.log.since(5)) == []


@pytest.mark.parametrize("start", [0, 3, 99])
def test_what_is_not_kept_is_told_as_everything_in_numbers_that_were_used(start):
    """Five pages, two a message: three messages up to the last number."""
    log = EventLog(0, SIZE, pool_pages=4, kept_bytes=1, most=2)
    for node in range(1, 6):
        log.append([inserted(node, node - 1, node, node)])
    answer = list(log.since(start))
    assert [number for number, _ in answer] == [3, 4, 5] and log.next == 6
    assert list(log.since(6)) == []


def test_a_malformed_message_is_counted_logged_once_and_has_no_effect(followed, caplog):
    caplog.set_level(logging.WARNING)
    followed.tell(inserted(1, ROOT, 4, 4))
    before = followed.mirror.state
    wrong = Stored([7], None, [5, 5], SIZE, None, DEVICE)
    other_rank = Batch(0.0, [Cleared()], 3)
    partly = Batch(0.0, [Removed(page_hashes([4, 4], SIZE), DEVICE), wrong], 0)
    for number, payload in enumerate((b"", encode(other_rank), encode(partly)), 2):
        assert followed.follower.live(frames(number, payload))
    assert followed.follower.next == 5
    assert followed.mirror.state == before
    assert followed.follower.live([b"", b"12", b""]) and followed.follower.live([b""])
    assert followed.follower.malformed == 5 and len(caplog.records) == 1
    assert "kv events of worker: not a batch" in caplog.text
