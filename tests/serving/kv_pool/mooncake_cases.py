"""Cases over real Mooncake processes; run by ``test_mooncake.py`` in a network of their own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from dsv41_jax.errors import UserError
from serving.kv_pool import mooncake, pool
from serving.kv_pool.cluster import Cluster, ClusterOptions
from serving.kv_pool.counts import Counts
from serving.kv_pool.mooncake import MooncakeStore
from serving.kv_pool.pool import KVPool
from serving.kv_pool.remote import Waits
from serving.kv_pool.store import StoreError
from serving.kv_pool.tier import PoolTier
from serving.kv_pool.values import HEADER_BYTES, Codec
from tests.conftest import GOLDENS, ROOT
from tests.serving.kv_pool.support import WAIT_S, eventually
from tests.serving.kv_pool.test_second_turn import assert_measured, patient
from tests.serving.kv_pool.test_shm import key, keys
from tests.serving.kv_pool.test_tier import OPTIONS, SIZE, SPACE, WINDOW, page, pages_of, sequence

VALUE, LEASE = 57_088, 3.0
CAPACITY = 32 << 20
# A tier gives up within its waits for a lookup and a load; the rest is for a machine that is busy.
TIER_S = 5.0
NO_HANG_S = 6 * TIER_S


@pytest.fixture(scope="module")
def shared():
    with Cluster(ClusterOptions(CAPACITY, lease_s=LEASE)) as made:
        yield made


@pytest.fixture
def cluster():
    """One that a test may break."""
    with Cluster(ClusterOptions(CAPACITY, lease_s=LEASE)) as made:
        yield made


@pytest.fixture
def store(shared):
    made = MooncakeStore(shared.address, VALUE)
    yield made
    made.close()


def rows(*numbers: int, size: int = VALUE) -> np.ndarray:
    return np.array([[number % 251] * size for number in numbers], np.uint8)


def test_what_is_there_is_what_was_put(store, shared):
    other = MooncakeStore(shared.address, VALUE)
    many = list(range(100, 250))  # more than one staging buffer
    assert all(store.put(keys(*many), rows(*many)))
    assert other.lookup(keys(100, 1, 249)) == [True, False, True]
    out = np.zeros((len(many) + 1, VALUE), np.uint8)
    assert other.get(keys(*many, 1), out) == [True] * len(many) + [False]
    assert (out[:-1] == rows(*many)).all()
    assert store.put(keys(100), rows(7)) == [True], "what is there stays"
    assert other.get(keys(100), out[:1]) == [True] and (out[0] == 100).all()
    assert store.lookup([]) == [] == store.get([], out[:0]) == store.put([], out[:0])
    other.close()


def test_leases(store):
    store.put(keys(1), rows(1))
    assert store.lease(keys(1, 2)) == [True, False]
    assert store.remove(keys(1, 2)) == [False, False]
    time.sleep(LEASE + 0.3)
    assert store.remove(keys(1)) == [True]
    store.put(keys(1), rows(1))
    store.lease(keys(1))
    assert store.remove(keys(1), leased=True) == [True]
    assert store.lookup(keys(1)) == [False]


def test_values_of_another_size_are_not_taken(store, shared):
    for number, size in ((11, VALUE + 1), (12, VALUE - 1)):
        other = MooncakeStore(shared.address, size)
        assert other.put(keys(number), rows(number, size=size)) == [True]
        other.close()
    assert store.get(keys(11, 12), np.zeros((2, VALUE), np.uint8)) == [False, False]


@pytest.mark.slow
def test_more_than_fits(store):
    """What is leased stays; nothing is ever another's bytes."""
    numbers = list(range(1000, 1000 + 2 * CAPACITY // VALUE))
    for first in range(0, len(numbers), 50):
        store.put(keys(*numbers[first : first + 50]), rows(*numbers[first : first + 50]))
    out = np.zeros((len(numbers), VALUE), np.uint8)
    there = store.get(keys(*numbers), out)
    assert 0 < sum(there) < len(numbers)
    assert (out[there] == rows(*numbers)[there]).all()


@contextmanager
def slow_network(rate: str):
    """Loopback at so many bits a second; this network is the test's own."""
    queue = ["tc", "qdisc", "{}", "dev", "lo", "root"]
    limit = ["tbf", "rate", rate, "burst", "256k", "latency", "1s"]
    if shutil.which("tc") is None:
        pytest.skip("no tc here (iproute2)")
    subprocess.run([*(part.format("add") for part in queue), *limit], check=True)
    try:
        yield
    finally:
        subprocess.run([part.format("del") for part in queue], check=True)


@pytest.mark.slow
def test_leases_that_run_out_while_pages_come_slowly_cost_pages():
    """What came after its lease may be another's bytes by then: it does not count as read."""
    numbers = list(range(20))
    out = np.zeros((len(numbers), VALUE), np.uint8)
    with Cluster(ClusterOptions(CAPACITY, lease_s=0.3)) as short:
        store = MooncakeStore(short.address, VALUE)
        assert all(store.put(keys(*numbers), rows(*numbers)))
        with slow_network("4mbit"):
            there = np.array(store.get(keys(*numbers), out))
        assert not there.all()
        assert (out[there] == rows(*numbers)[there]).all() and not out[~there].any()
        eventually(lambda: all(store.get(keys(*numbers), out)))
        assert (out == rows(*numbers)).all()
        store.close()


def test_nobody_there(monkeypatch):
    monkeypatch.setattr(mooncake, "_REACH_S", 0.2)
    with pytest.raises(UserError, match=r"mooncake:127\.0\.0\.1:9: nobody answers there"):
        MooncakeStore("127.0.0.1:9", VALUE)


def test_the_command_runs_a_cluster_and_ends_it():
    command = [sys.executable, "-m", "serving.kv_pool", "mooncake", "--bytes", "16MiB"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        option, told = process.stderr.readline().split()
        assert option == "--kv-pool"
        client = MooncakeStore(told.removeprefix("mooncake:"), VALUE)
        assert client.put(keys(1), rows(1)) == [True]
        client.close()
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


class Fixture:
    """A tier over a Mooncake client; its pages are those of ``test_tier``."""

    def __init__(self, address: str):
        self.counts, codec = Counts(), Codec(SPACE.digest, SPACE.page_bytes)
        self.store = MooncakeStore(address, codec.value_bytes)
        self.pool = KVPool(self.store, codec, self.counts)
        options = replace(OPTIONS, lookup_s=TIER_S, load_s=TIER_S)
        self.tier = PoolTier(self.pool, SPACE, options, WINDOW, self.counts)
        self.keys = self.tier._chain(sequence()).keys(sequence().prompt, 10)

    def fill(self) -> list[bool]:
        out = np.zeros((10, self.pool.codec.value_bytes), np.uint8)
        out[:, HEADER_BYTES:] = [page(index) for index in range(10)]
        return self.pool.put(self.keys, out).result(WAIT_S)

    def fetch(self) -> list[int]:
        fetch = self.tier.fetch(sequence(), 0, 10)
        eventually(lambda: fetch.waits is None)
        return pages_of(fetch.take())


@pytest.fixture
def made(cluster):
    one = Fixture(cluster.address)
    yield one
    one.tier.close()


def test_a_prompts_pages_come_from_mooncake(made):
    assert all(made.fill()) and made.fetch() == list(range(10))
    assert made.tier.snapshot().loaded == 10 and SIZE == 2


@pytest.mark.slow
def test_an_owner_killed_in_mid_load_costs_pages(made, cluster):
    assert all(made.fill())
    get, killed = made.store.get, []

    def killing(wanted, out):
        if made.keys.index(wanted[0]) >= 3 and not killed:
            cluster.owners[0].send_signal(signal.SIGKILL)
            killed.append(cluster.owners[0].wait())
        return get(wanted, out)

    made.store.get = killing
    began = time.monotonic()
    assert made.fetch() == [0, 1, 2], "what came before it died is whole"
    assert time.monotonic() - began < NO_HANG_S and killed
    made.store.get = get
    cluster.owners[0] = cluster.start_owner()
    eventually(lambda: all(made.fill()) and made.fetch() == list(range(10)))


@pytest.mark.slow
def test_a_killed_master_is_done_without_until_it_is_back(made, cluster, monkeypatch):
    monkeypatch.setattr(pool, "_RETRY_S", 0.1)
    assert all(made.fill()) and made.fetch() == list(range(10))
    cluster.master.send_signal(signal.SIGKILL)
    cluster.master.wait()
    began = time.monotonic()
    assert made.fetch() == [] and time.monotonic() - began < NO_HANG_S
    assert made.tier.snapshot().errors
    with pytest.raises(StoreError, match="master does not answer"):
        made.store.lookup([key(1)])
    cluster.start_master()
    eventually(lambda: all(made.fill()) and made.fetch() == list(range(10)))


@pytest.mark.slow
def test_a_master_that_hangs_keeps_nobody(made, cluster):
    assert all(made.fill())
    cluster.master.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        fetch = made.tier.fetch(sequence(), 0, 10)
        assert fetch.waits is Waits.LOOKUP
        eventually(lambda: fetch.waits is None)
        assert made.fetch() == [] and time.monotonic() - began < NO_HANG_S
        assert made.tier.snapshot().skipped == 1
    finally:
        cluster.master.send_signal(signal.SIGCONT)
    eventually(lambda: made.fetch() == list(range(10)))


@pytest.mark.slow
def test_the_second_turn_on_another_engine(shared):
    assert_measured(patient(GOLDENS / "tiny_ckpt", backend="mooncake", address=shared.address))


@pytest.mark.slow
def test_a_cluster_without_a_process_ends():
    command = [sys.executable, "-m", "serving.kv_pool", "mooncake", "--bytes", "16MiB"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        process.stderr.readline()
        found = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True
        )
        os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
        assert process.wait(WAIT_S) == 2
        assert "has ended" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
