"""Mooncake Store with real processes, in a network of its own; see ``mooncake_cases.py``."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv41_jax.errors import UserError
from serving.kv_pool import mooncake
from serving.kv_pool.mooncake import MISSING_EXTRA, mooncake_class
from serving.kv_pool.store import StoreError
from tests.conftest import ROOT
from tests.serving.kv_pool.test_shm import keys

CASES = Path(__file__).with_name("mooncake_cases.py")
UNSHARE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def why_not() -> str | None:
    """Why the cases cannot run here."""
    try:
        mooncake_class()
    except UserError as error:
        return str(error)
    alone = shutil.which("unshare") and subprocess.run([*UNSHARE, "true"]).returncode == 0
    return None if alone else "no network namespaces here: the data ports would be open to others"


def run_cases(marker: str) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-n0", "-m", marker, str(CASES)]
    command = [*UNSHARE, sys.executable, "-m", "tests.serving.kv_pool.in_namespace", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


needs_mooncake = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))


@needs_mooncake
def test_the_store_and_the_command():
    run_cases("not slow")


@pytest.mark.slow
@needs_mooncake
def test_killed_processes_and_engines():
    run_cases("slow")


class Client:
    """In place of Mooncake's: answers what it is told to."""

    setup_status = 0

    def __init__(self):
        self.answers: list[int] = []

    def setup(self, *_) -> int:
        return self.setup_status

    def register_buffer(self, *_) -> int:
        return 0

    def batch_is_exist(self, names) -> list[int]:
        return self.answers

    def batch_get_into(self, names, *_) -> list[int]:
        return self.answers

    def batch_put_from(self, names, *_) -> list[int]:
        return self.answers

    def remove(self, name, force) -> int:
        return self.answers.pop(0)


@pytest.fixture
def client(monkeypatch):
    """The client of a store of values of 10 bytes, and that store."""
    monkeypatch.setattr(mooncake, "mooncake_class", lambda: Client)
    monkeypatch.setattr(mooncake, "_own_address", lambda address: "127.0.0.1")
    store = mooncake.MooncakeStore("127.0.0.1:1", 10)
    return store._client, store


def test_what_its_answers_mean(client):
    """-200: no room; -704: not there; -706: leased; -707: the lease ran out during the read; -800:
    the owner does not answer; 9: a value of another size.
    """
    answers, store = client
    rows = np.zeros((5, 10), np.uint8)
    answers.answers = [10, -704, -707, -800, 9]
    assert store.get(keys(1, 2, 3, 4, 5), rows) == [True, False, False, False, False]
    answers.answers = [0, -200, -800]
    assert store.put(keys(1, 2, 3), rows[:3]) == [True, False, False]
    answers.answers = [1, 0]
    assert store.lookup(keys(1, 2)) == [True, False]
    answers.answers = [0, -706, -704]
    assert store.remove(keys(1, 2, 3)) == [True, False, False]


@pytest.mark.parametrize("code", [-1, -900, -901])
def test_a_master_that_does_not_answer_is_an_error(client, code):
    answers, store = client
    rows = np.zeros((1, 10), np.uint8)
    for call in (store.lookup, store.lease, store.remove):
        answers.answers = [code]
        with pytest.raises(StoreError, match="does not answer"):
            call(keys(1))
    for call in (store.get, store.put):
        answers.answers = [code]
        with pytest.raises(StoreError, match="does not answer"):
            call(keys(1), rows)
    assert store._buffers.qsize() == 4, "no staging memory is lost"


def test_a_setup_that_fails(client, monkeypatch):
    monkeypatch.setattr(Client, "setup_status", -3)
    with pytest.raises(UserError, match="setup failed with -3"):
        mooncake.MooncakeStore("127.0.0.1:1", 10)


def test_without_the_extra_the_option_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(UserError, match=re.escape(MISSING_EXTRA)):
        mooncake.MooncakeStore("127.0.0.1:1", 10)
