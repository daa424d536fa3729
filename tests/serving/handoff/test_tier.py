"""What a tier leaves in a pool another one finds, or it says why not."""

from dataclasses import replace

import numpy as np
import pytest

from serving.handoff.record import Record, prompt_digest, value_keys
from serving.handoff.ticket import Ticket
from serving.handoff.tier import Accepts, HandoffTier
from serving.kv_pool.counts import Counts
from serving.kv_pool.keys import Namespace
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.pool import KVPool
from serving.kv_pool.store import StoreError
from serving.kv_pool.values import HEADER_BYTES, Codec
from serving.request import Request, TokenLogprobs
from serving.sequence import Sequence
from tests.serving.kv_pool.support import WAIT_S, DictStore, eventually

SIZE, WINDOW, PAGE_BYTES = 4, 3, 64
SPACE = Namespace("model", "float32", SIZE, ((".a", "uint8", (PAGE_BYTES,)),))
OPTIONS = PoolOptions("shm", "model", lookup_s=WAIT_S, load_s=WAIT_S, batches=(1, 2))
PROMPT = tuple(range(3, 17))  # three pages and a half
STATE = np.arange(150, dtype=np.uint8)
TOKEN = TokenLogprobs(9, -0.5, ((9, -0.5), (1, -1.25)))


class Tier(HandoffTier):
    """A tier over a store that others share."""

    def __init__(self, store: DictStore, **options):
        counts, codec = Counts(), Codec(SPACE.digest, SPACE.page_bytes)
        pool = KVPool(store, codec, counts)
        super().__init__(pool, SPACE, replace(OPTIONS, **options), WINDOW, counts)
        self.accepts = Accepts.of("windows", (200, 60))

    def fetched(self, ticket: Ticket, prompt=PROMPT, held: int = 0):
        """A fetch for a request with the ticket, when it is over."""
        sequence = Sequence.of(Request(tuple(prompt), 5, ticket=ticket), 0)
        fetch = self.fetch(sequence, held, len(prompt) // SIZE)
        eventually(lambda: fetch.waits is None)
        assert sequence.handed is fetch
        return fetch


@pytest.fixture
def store():
    return DictStore()


@pytest.fixture
def make(store):
    made = []

    def tier(**options) -> Tier:
        made.append(Tier(store, **options))
        return made[-1]

    yield tier
    for gate in store.gates.values():
        gate.set()
    for one in made:
        one.close()


def page(index: int) -> np.ndarray:
    return np.full(PAGE_BYTES, index + 1, np.uint8)


def left(tier: Tier, prompt=PROMPT, *, form: str = "windows", state=STATE) -> Ticket:
    """A ticket for a request whose pages and record are in the pool."""
    sequence = Sequence.of(Request(tuple(prompt), 1, seed=4, hands_off=True), 0)
    complete = len(prompt) // SIZE
    chain = tier.chain_of(sequence)
    rows = np.zeros((complete, HEADER_BYTES + PAGE_BYTES), np.uint8)
    for index in range(complete):
        rows[index, HEADER_BYTES:] = page(index)
    assert tier.missing(sequence, chain) in ([], list(range(complete)))
    assert all(tier.pool.put(chain.keys(sequence.prompt, complete), rows).result(WAIT_S))
    assert tier.missing(sequence, chain) == []
    record = Record(form, prompt_digest(sequence.prompt), TOKEN, state)
    tail = page(99) if len(prompt) % SIZE else None
    ticket = tier.leave(sequence, record, tail)
    assert ticket is not None and ticket.seed == 4
    return ticket


def test_everything_arrives(make, store):
    a, b = make(), make()
    ticket = left(a)
    fetch = b.fetched(ticket)
    assert not fetch.lost and fetch.record.token == TOKEN and fetch.hit == len(PROMPT)
    np.testing.assert_array_equal(fetch.record.state, STATE)
    blocks = fetch.take()
    assert [(block.first, block.count, len(block.rows)) for block in blocks] == [
        (0, 2, 2),
        (2, 1, 1),
        (3, 1, 1),
    ]
    found = [row[HEADER_BYTES] for block in blocks for row in block.rows[: block.count]]
    assert found == [1, 2, 3, 100]
    assert a.snapshot().handoffs_left == 1
    b.used(Sequence.of(Request(PROMPT, 5, ticket=ticket), 0))
    b.flush()
    assert b.snapshot().handoffs_taken == 1
    assert len(store.values) == 3, "the pages stay"
    assert b.fetched(ticket).lost


def test_what_the_device_holds_is_not_loaded(make, store):
    a, b = make(), make()
    ticket = left(a, PROMPT[:12])
    store.calls.clear()
    fetch = b.fetched(ticket, PROMPT[:12], held=3)
    assert not fetch.lost and fetch.take() == []
    assert [name for name, _ in store.calls] == ["lookup", "get"]


def test_replay_takes_over_whole_pairs(make):
    a, b = make(), make()
    b.accepts = Accepts.of("replay", (200, 60))
    for length, hit in ((13, 12), (14, 14), (1, 0)):
        ticket = left(a, PROMPT[:length], form="replay", state=STATE[:0])
        fetch = b.fetched(ticket, PROMPT[:length])
        assert not fetch.lost and fetch.hit == hit and not fetch.has_windows


def keys_of(ticket: Ticket, tail: bool = True) -> list[bytes]:
    return value_keys(SPACE.digest, ticket, PAGE_BYTES, tail=tail)


@pytest.mark.parametrize("which", ["page", "tail", "record"])
@pytest.mark.parametrize("how", ["lost", "corrupt", "foreign"])
def test_what_is_damaged_is_lost_as_a_whole(make, store, which, how):
    a, b = make(), make()
    ticket = left(a)
    own = keys_of(ticket)
    pages = [key for key in store.values if key not in own]
    key = {"page": pages[1], "tail": own[0], "record": own[2]}[which]
    if how == "lost":
        del store.values[key]
    else:
        store.values[key][HEADER_BYTES + 3 if how == "corrupt" else 8] ^= 1
    fetch = b.fetched(ticket)
    assert fetch.lost and fetch.why
    b.used(Sequence.of(Request(PROMPT, 5, ticket=ticket), 0), lost=True)
    b.flush()
    assert b.snapshot().handoffs_lost == 1
    assert not set(own) & set(store.values)


def test_what_is_meant_for_others_is_lost(make):
    a, b = make(), make()
    assert "another prompt" in b.fetched(left(a), (*PROMPT[:-1], 77)).why
    assert "form replay" in b.fetched(left(a, form="replay")).why
    assert "state has 139 bytes, not 140" in b.fetched(left(a, state=STATE[:139])).why
    huge = replace(left(a), size=10**9)
    assert "none of this engine's" in b.fetched(huge).why
    other = replace(left(a), name=b"?" * 16)
    assert "gone" in b.fetched(other).why
    for lost in (b.fetched(huge), b.fetched(other)):
        assert lost.lost


def test_a_pool_that_fails_or_hangs_loses_it(make, store):
    a, b = make(), make(lookup_s=0.05)
    ticket = left(a)
    store.fail = StoreError("gone")
    assert b.fetched(ticket).lost
    store.fail = None
    c = make(lookup_s=0.05)
    gate = store.shut("lookup")
    assert c.fetched(ticket).lost and c.snapshot().late_lookups == 1
    eventually(lambda: c._hangs)
    assert c.fetched(ticket).why == "the pool does not answer"
    gate.set()
    eventually(lambda: not c._hangs)
    assert not make().fetched(ticket).lost


def test_a_pool_without_room_is_told(make, store, monkeypatch):
    a = make()
    sequence = Sequence.of(Request(PROMPT, 1, hands_off=True), 0)
    record = Record("windows", prompt_digest(sequence.prompt), TOKEN, STATE)
    real = store.put

    def put(keys, rows):
        return [*real(keys[:-1], rows[:-1]), False]

    monkeypatch.setattr(store, "put", put)
    assert a.leave(sequence, record, page(0)) is None
    assert not store.values, "what had room is taken out again"
    assert a.snapshot().handoffs_left == 0
