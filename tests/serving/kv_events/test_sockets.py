"""A publisher and its subscribers over real sockets, and strangers at either end."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from dsv41_jax.errors import UserError
from serving.kv_events.hashes import page_hashes
from serving.kv_events.log import EventLog, Evicted
from serving.kv_events.publisher import Publisher
from serving.kv_events.sockets import Endpoint, new_socket
from serving.kv_events.subscriber import Subscriber
from serving.kv_events.wire import DEVICE, END, POOL, decode, sequence_bytes, sequence_number
from serving.prefix_cache import ROOT
from tests.serving.kv_events.support import WAIT_S, Mirror, inserted, wait_for
from tests.serving.listening import held_port

zmq = pytest.importorskip("zmq", reason="the extra [route] is not installed")
SIZE = 2
FREE = Endpoint("127.0.0.1", 0)
A, B, C = (page_hashes([n, n], SIZE)[0] for n in (1, 2, 3))


@contextmanager
def published(endpoint: Endpoint = FREE, ranks: int = 1, **options) -> Iterator[Publisher]:
    made = Publisher(
        endpoint, [EventLog(rank, SIZE, pool_pages=4, **options) for rank in range(ranks)]
    )
    made.start()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def followed(publisher: Publisher, rank: int = 0, quiet_s: float = 2.0):
    """(mirror, subscriber) that know a publisher's data rank."""
    mirror = Mirror()
    events, replay = publisher.endpoints[rank], publisher.replay_endpoints[rank]
    subscriber = Subscriber(
        events, replay, mirror.deliver, page_size=SIZE, rank=rank, quiet_s=quiet_s
    )
    subscriber.start()
    try:
        wait_for(lambda: subscriber.progress.next is not None)
        yield mirror, subscriber
    finally:
        subscriber.close()


def holds(mirror: Mirror, *names: int) -> bool:
    return mirror.state == {DEVICE: set(names), POOL: set()}


def test_every_rank_is_followed_from_the_first_page_on_by_who_comes_late():
    with published(ranks=2) as publisher:
        assert len({*publisher.endpoints, *publisher.replay_endpoints}) == 4
        publisher.put(0, inserted(1, ROOT, 1, 1))
        publisher.put(1, inserted(1, ROOT, 2, 2))
        with followed(publisher) as (first, _), followed(publisher, rank=1) as (second, _):
            publisher.put(0, inserted(2, ROOT, 3, 3))
            publisher.put(1, Evicted(1))
            wait_for(lambda: holds(first, A, C))
            wait_for(lambda: holds(second))
            with followed(publisher) as (late, subscriber):
                wait_for(lambda: holds(late, A, C))
                assert subscriber.progress.gaps == 0


@pytest.mark.parametrize("kept_bytes", [2**20, 1])
def test_what_was_lost_is_asked_for_with_the_next_message(kept_bytes):
    """quiet: nothing but that message makes it ask."""
    made = published(kept_bytes=kept_bytes)
    with made as publisher, followed(publisher, quiet_s=600) as (mirror, subscriber):
        wait_for(lambda: subscriber.progress.next == 1)
        publisher._logs[0].append([inserted(1, ROOT, 1, 1)])  # and not sent

        def told() -> bool:
            """The subscription may not have arrived: it is told again until it has."""
            publisher.put(0, inserted(2, ROOT, 2, 2))
            publisher.put(0, Evicted(2))
            return subscriber.progress.gaps > 0

        wait_for(told)
        publisher.put(0, inserted(3, ROOT, 3, 3))
        wait_for(lambda: holds(mirror, A, C))


def test_what_was_lost_at_the_end_is_asked_for_when_it_is_quiet():
    with published() as publisher, followed(publisher, quiet_s=0.05) as (mirror, subscriber):
        publisher._logs[0].append([inserted(1, ROOT, 1, 1)])  # and not sent
        wait_for(lambda: holds(mirror, A))
        assert subscriber.progress.malformed == 0


@contextmanager
def two_ports() -> Iterator[Endpoint]:
    """Two held ports in a row."""
    with ExitStack() as stack:
        while True:
            port = stack.enter_context(held_port())
            with suppress(OSError, OverflowError):
                stack.enter_context(held_port(port + 1))
                break
        yield Endpoint("127.0.0.1", port)


@contextmanager
def published_again(endpoint: Endpoint, log: EventLog) -> Iterator[Publisher]:
    """Where another publisher was, as soon as its ports are free."""
    made: list[Publisher] = []

    def opened() -> bool:
        with suppress(UserError):
            made.append(Publisher(endpoint, [log]))
        return bool(made)

    wait_for(opened)
    made[0].start()
    try:
        yield made[0]
    finally:
        made[0].close()


def test_a_publisher_that_restarts_is_another_one():
    """The second has told as much as the first when it is found."""
    log = EventLog(0, SIZE, pool_pages=4)
    log.append([inserted(1, ROOT, 2, 2)])
    with ExitStack() as stack:
        endpoint = stack.enter_context(two_ports())
        first = stack.enter_context(published(endpoint))
        mirror, subscriber = stack.enter_context(followed(first))
        first.put(0, inserted(1, ROOT, 1, 1))
        wait_for(lambda: holds(mirror, A))
        first.close()
        wait_for(lambda: holds(mirror) and subscriber.progress.next is None)
        assert first._logs[0].next == log.next == 2
        second = stack.enter_context(published_again(endpoint, log))
        wait_for(lambda: holds(mirror, B))
        second.put(0, inserted(2, ROOT, 3, 3))
        wait_for(lambda: holds(mirror, B, C))


def test_the_answer_is_what_a_stranger_expects():
    """[empty, number, payload], ended by -1, to any socket that sends [empty, number]."""
    with published() as publisher:
        publisher.put(0, inserted(1, ROOT, 1, 1))
        wait_for(lambda: publisher._logs[0].next == 2)
        asker = new_socket("DEALER", publisher.replay_endpoints[0])
        asker.connect(publisher.replay_endpoints[0])
        asker.rcvtimeo = int(1e3 * WAIT_S)
        asker.send_multipart([b"what"])
        asker.send_multipart([b"", b"else"])
        asker.send_multipart([b"", sequence_bytes(1)])
        empty, number, payload = asker.recv_multipart()
        assert (empty, sequence_number(number)) == (b"", 1)
        assert decode(payload).events[0].hashes == [A]
        assert asker.recv_multipart() == [b"", sequence_bytes(END), b""]
        asker.close()


def test_an_address_that_cannot_be_had_is_named():
    with published() as publisher:
        port = int(publisher.endpoints[0].rpartition(":")[2])
        with pytest.raises(UserError, match=f"--kv-events tcp://127.0.0.1:{port}: .*in use"):
            Publisher(Endpoint("127.0.0.1", port), [EventLog(0, SIZE, pool_pages=4)])
    with pytest.raises(UserError, match="65536"):
        Publisher(Endpoint("127.0.0.1", 65535), [EventLog(0, SIZE, pool_pages=4)])


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://host", "tcp://:1", "ipc://a:1", "tcp://a:1b"]
)
def test_other_addresses_are_refused(text):
    with pytest.raises(UserError, match=r"--kv-events '.*': must be tcp://HOST:PORT"):
        Endpoint.parse(text)
    with pytest.raises(UserError, match=r"kv events: .*must be"):
        Subscriber("tcp://a:1", text, lambda events: None, page_size=2)


def test_without_pyzmq_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UserError, match=r"extra \[route\] is not installed"):
        Publisher(FREE, [EventLog(0, SIZE, pool_pages=4)])
    with pytest.raises(UserError, match=r"extra \[route\] is not installed"):
        Subscriber("tcp://a:1", "tcp://a:2", lambda events: None, page_size=2)


def test_a_fault_of_the_publisher_ends_the_events_alone(caplog):
    caplog.set_level(logging.ERROR)
    with published() as publisher:
        publisher.put(0, Evicted(7))
        wait_for(lambda: not publisher._open)
        publisher.put(0, Evicted(8))
        assert publisher._changes.empty()
    assert "no more of them are published" in caplog.text
