"""The shared-memory pool: what is there is what was put, and who goes first when it is full."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from dsv41_jax.errors import UserError
from serving.kv_pool import shm
from serving.kv_pool.lanes import Lane
from serving.kv_pool.shm import SharedMemoryStore
from serving.kv_pool.shm_table import ENTRY_BYTES, READY, WRITER_S, WRITING
from serving.kv_pool.store import ForeignStore, StoreError
from tests.serving.kv_pool.support import WAIT_S, eventually

VALUE, LEASE = 200, 5.0
SLOT = 256 + ENTRY_BYTES


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def rows(*numbers: int) -> np.ndarray:
    """A value that tells its number in every byte."""
    return np.array([[number] * VALUE for number in numbers], np.uint8)


def room(slots: int) -> int:
    return 2 * 4096 + slots * SLOT


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def attach(tmp_path, clock):
    """``attach(slots=4, value=VALUE)``: another process's view of one pool."""
    stores = []

    def make(slots: int = 4, value: int = VALUE) -> SharedMemoryStore:
        path = tmp_path / "pool"
        stores.append(SharedMemoryStore(path, room(slots), value, lease_s=LEASE, clock=clock))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def put(store: SharedMemoryStore, *numbers: int) -> list[bool]:
    return store.put(keys(*numbers), rows(*numbers))


def get(store: SharedMemoryStore, *numbers: int) -> list[bool]:
    """Which are there; those have their own bytes."""
    out = np.zeros((len(numbers), VALUE), np.uint8)
    found = store.get(keys(*numbers), out)
    for number, there, row in zip(numbers, found, out, strict=True):
        assert not there or (row == number).all()
    return found


def test_others_see_what_one_puts(attach):
    a, b = attach(), attach()
    assert put(a, 1, 2) == [True, True]
    assert b.lookup(keys(1, 3, 2)) == [True, False, True]
    assert get(b, 2, 1, 3) == [True, True, False]
    assert (a.capacity, b.used) == (4, 2)
    assert a.lookup([]) == [] == get(a) == put(a)


def test_it_outlives_those_who_filled_it(attach):
    first = attach()
    put(first, 1)
    first.close()
    assert get(attach(), 1) == [True]
    with pytest.raises(StoreError, match="is closed"):
        first.lookup(keys(1))


def test_what_is_there_stays(attach):
    store = attach()
    put(store, 1)
    assert store.put(keys(1), rows(9)) == [True]
    assert get(store, 1) == [True] and store.used == 1


def test_the_end_of_the_prefix_used_longest_ago_goes_first(attach, clock):
    a, b = attach(), attach()
    put(a, 1, 2), put(a, 11, 12)
    a.lookup(keys(1, 2))
    clock.now += LEASE + 1
    assert put(b, 21, 22) == [True, True]
    assert a.lookup(keys(1, 2, 11, 12, 21, 22)) == [True, True, False, False, True, True]
    clock.now += LEASE + 1
    put(b, 31)
    assert a.lookup(keys(1, 2, 21, 22, 31)) == [True, True, True, False, True]


def test_a_lease_keeps_a_page_and_a_full_pool_takes_no_more(attach, clock):
    store = attach()
    put(store, 1, 2, 3, 4)
    assert store.lease(keys(1, 2, 3, 4)) == [True] * 4
    assert put(store, 5) == [False]
    assert store.remove(keys(1, 9)) == [False, False]
    clock.now += LEASE + 0.1
    assert put(store, 5) == [True]
    assert get(store, 1, 2, 3, 4, 5).count(True) == 4
    assert store.remove(keys(5)) == [False], "reading leases, too"
    assert store.remove(keys(5), leased=True) == [True] and get(store, 5) == [False]


def test_a_page_that_is_overwritten_while_it_is_read_is_lost(attach, monkeypatch):
    store, other = attach(1), attach(1)
    put(store, 1)
    locked, calls = store._locked, []

    def overtaken():
        """Between the look-up and the copy another process takes the slot."""
        calls.append(1)
        return locked()

    class Rows:
        def __getitem__(self, slot):
            other.remove(keys(1), leased=True)
            put(other, 7)
            return other._rows[slot]

    monkeypatch.setattr(store, "_locked", overtaken)
    monkeypatch.setattr(store, "_rows", Rows())
    assert store.get(keys(1), np.zeros((1, VALUE), np.uint8)) == [False]


def test_a_dead_writers_slot_is_found_by_nobody_and_taken_later(attach, clock):
    store, dead = attach(1), attach(1)
    with dead._locked():
        claim = dead.table.claim(key(1), clock())
    assert store.lookup(keys(1)) == [False] and put(store, 2) == [False]
    clock.now += WRITER_S + 1
    assert put(store, 2) == [True]
    with dead._locked():
        assert dead.table.commit([claim]) == [False], "a slow writer has lost its slot"
    assert get(store, 1, 2) == [False, True]


def test_a_dead_writers_key_is_stored_again(attach, clock):
    store, dead = attach(2), attach(2)
    with dead._locked():
        dead.table.claim(key(1), clock())
    assert put(store, 1) == [True] and get(store, 1) == [False], "its writer may be slow"
    clock.now += WRITER_S + 1
    assert put(store, 1) == [True] and get(store, 1) == [True]


def test_the_lock_of_the_dead_is_free(attach, tmp_path):
    store = attach()
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1)"
    command = [sys.executable, "-c", f"{hold}; sys.stdout.flush(); sys.stdin.read()"]
    with subprocess.Popen(
        [*command, str(tmp_path / "pool")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        done = Lane("put").submit(put, store, 1)
        time.sleep(0.05)
        assert not done.done()
        child.kill()
        assert done.result(WAIT_S) == [True]


@pytest.mark.parametrize("field", ["state", "lease", "log", "used", "generation", "key"])
def test_damage_costs_pages_and_nothing_else(attach, clock, field):
    store = attach()
    put(store, 1, 2, 3)
    getattr(store.table, field)[:] = np.array(-(2**62)).astype(getattr(store.table, field).dtype)
    fresh = attach()
    get(fresh, 1, 2, 3)
    clock.now += WRITER_S + 1
    assert put(fresh, 4, 5) == [True, True] and get(fresh, 4, 5) == [True, True]


def test_another_pool_is_left_alone(attach, tmp_path):
    store = attach()
    put(store, 1)
    with pytest.raises(ForeignStore, match="values of 200 bytes, not of 201"):
        attach(value=201)
    path, whole = tmp_path / "pool", (tmp_path / "pool").read_bytes()
    for damaged, message in [
        (b"?" + whole[1:], "is not a pool of pages"),
        (whole[:8] + b"\x63" + whole[9:], "version=99, this program's is 1"),
        (whole[:-1], "is damaged"),
        (whole[:10], "is not a pool of pages"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ForeignStore, match=message):
            attach()
        assert path.read_bytes() == damaged


def test_a_smaller_pool_that_is_there_is_kept_and_named(attach, caplog):
    attach(slots=4)
    assert not caplog.records
    assert attach(slots=2).slots == 4 and not caplog.records
    assert attach(slots=9).slots == 4
    assert "room for 4 pages and keeps it" in caplog.text


@pytest.mark.parametrize("size", [1, 10, room(9)])
def test_what_a_dead_maker_left_is_made_anew(attach, tmp_path, size):
    """Its memory was there, but not yet the first bytes."""
    (tmp_path / "pool").write_bytes(bytes(size))
    store = attach()
    assert store.slots == 4
    assert put(store, 1) == [True] and get(attach(), 1) == [True]


def test_no_room(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="9000 bytes hold no page of 1000 bytes"):
        SharedMemoryStore(tmp_path / "pool", 9000, 1000)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shm.os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left"):
        SharedMemoryStore(tmp_path / "pool", 90000, 1000)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="symbolic links"):
        SharedMemoryStore(tmp_path / "link", 90000, 1000)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UserError, match="No such file"):
        SharedMemoryStore(tmp_path / "none" / "pool", 90000, 1000)


def test_a_key_twice_in_a_batch(attach):
    """Takes one slot, which is found and leased as any other."""
    a, b = attach(2), attach(2)
    assert put(a, 2, 2) == [True, True] and a.table.ready == 1
    assert get(a, 2) == [True] and b.remove(keys(2)) == [False]
    assert put(b, 1) == [True] and get(b, 2, 1) == [True, True]


def test_many_slots(attach):
    """More than candidates are kept of, and than the log holds for who comes late."""
    a, b = attach(1500), attach(1500)
    b.lookup(keys(0))
    numbers = list(range(1, 1501))
    for first in range(0, 1500, 50):
        a.put(keys(*numbers[first : first + 50]), rows(*[n % 250 for n in numbers[:50]]))
    assert all(b.lookup(keys(*numbers[1000:])))
    a.put(keys(*range(2000, 2400)), rows(*[0] * 400))
    assert not any(b.lookup(keys(*numbers[:400]))) and all(b.lookup(keys(*range(2000, 2400))))


class ShmMachine(RuleBasedStateMachine):
    """Three processes' views of a small pool against a set of what was ever put."""

    @initialize(slots=st.integers(1, 5))
    def begin(self, slots):
        self.clock = Clock()
        self.path = shm.folder() / f"dsv41-test-{os.getpid()}"
        self.path.unlink(missing_ok=True)
        self.stores = [
            SharedMemoryStore(self.path, room(slots), VALUE, lease_s=LEASE, clock=self.clock)
            for _ in range(3)
        ]
        self.slots, self.leased = slots, {}
        self.ever: set[int] = set()

    @rule(who=st.integers(0, 2), numbers=st.lists(st.integers(1, 9), max_size=4))
    def put(self, who, numbers):
        for number, done in zip(numbers, put(self.stores[who], *numbers), strict=True):
            if done:
                self.ever.add(number)
        self.kept()

    @rule(who=st.integers(0, 2), numbers=st.lists(st.integers(1, 9), max_size=4))
    def get(self, who, numbers):
        found = get(self.stores[who], *numbers)
        for number, there in zip(numbers, found, strict=True):
            assert not there or number in self.ever
            if there:
                self.leased[number] = self.clock.now + LEASE
        self.kept()

    @rule(who=st.integers(0, 2), number=st.integers(1, 9))
    def remove(self, who, number):
        [gone] = self.stores[who].remove(keys(number))
        assert not (gone and self.leased.get(number, 0) > self.clock.now)

    @rule(seconds=st.floats(0, 2 * LEASE))
    def later(self, seconds):
        self.clock.now += seconds

    def kept(self):
        """Whatever is leased is still there, for every process."""
        leased = [n for n, until in self.leased.items() if until > self.clock.now]
        assert len(leased) <= self.slots
        for store in self.stores:
            with store._locked():
                assert (store.table.find(keys(*leased)) >= 0).all()
                assert np.isin(store.table.state, (0, WRITING, READY)).all()

    def teardown(self):
        for store in getattr(self, "stores", ()):
            store.close()
        if hasattr(self, "path"):
            self.path.unlink()


ShmMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestShm = ShmMachine.TestCase


def _write_forever(path: str, seed: int) -> None:
    """Random values whose bytes tell their number, until killed."""
    store, random = SharedMemoryStore(Path(path), room(40), VALUE, lease_s=0.01), Random(seed)
    while True:
        numbers = [random.randrange(1, 250) for _ in range(8)]
        store.put(keys(*numbers), rows(*numbers))
        store.get(keys(*numbers), np.zeros((8, VALUE), np.uint8))


@pytest.mark.slow
def test_killed_writers_leave_nothing_wrong(tmp_path):
    """kill -9, again and again, in the midst of whatever: every value read is whole."""
    path = tmp_path / "pool"
    store = SharedMemoryStore(path, room(40), VALUE, lease_s=0.01)
    context, random, read = multiprocessing.get_context("spawn"), Random(0), 0
    for turn in range(10):
        writers = [
            context.Process(target=_write_forever, args=(str(path), 2 * turn + i)) for i in range(2)
        ]
        for writer in writers:
            writer.start()
        eventually(lambda: store.used)
        until = time.monotonic() + random.uniform(0.05, 0.4)
        while time.monotonic() < until:
            read += sum(get(store, *range(1, 250)))
        for writer in writers:
            writer.kill()
            writer.join()
    assert read > 1000
    store._clock = lambda: time.monotonic() + WRITER_S + 1
    assert all(put(store, *range(1, 41))) and all(get(store, *range(1, 41)))
