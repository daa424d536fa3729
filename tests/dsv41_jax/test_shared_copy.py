"""One copy of arrays for several processes: who makes it, who waits, what a dead one leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv41_jax.errors import UserError
from dsv41_jax.process_memory import process_memory
from dsv41_jax.shared_copy import HUGE, PART, Planes, remove_unused, shared_copy
from tests.conftest import ROOT

WAIT_S = 60.0
SIZE = 12 << 20
# Makes a copy of what stands in a file; the first argument is where it stops, if it does.
CHILD = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from dsv41_jax import shared_copy
from dsv41_jax.process_memory import process_memory
stop, source, directory = sys.argv[1:]
planes = shared_copy.Planes({"a": np.memmap(source, np.uint8, "r")})
def check(name, start, values):
    if stop == "filling":
        print("filling", flush=True)
        signal.pause()
copy = shared_copy.shared_copy(planes, Path(directory), check=check, wait_s=60)
total, before = int(copy.arrays["a"].sum(dtype=np.int64)), process_memory()
status = os.stat(copy.path)
print(json.dumps([copy.created, total, status.st_ino, before and before.shared]), flush=True)
sys.stdin.readline()
after = process_memory()
print(json.dumps([after and after.shared, after and after.private]), flush=True)
sys.stdin.readline()
copy.close()
"""


@pytest.fixture
def shm(tmp_path):
    """A folder of shared memory where the system has some."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK):
        yield tmp_path
        return
    folder = place / f"dsv41-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes())
    return path


@pytest.fixture
def start(source, shm):
    started = []

    def run(stop: str = "") -> subprocess.Popen:
        command = [sys.executable, "-c", CHILD, stop, str(source), str(shm)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, **pipes))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def said(process):
    return json.loads(process.stdout.readline())


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def planes_of(source):
    return Planes({"a": np.memmap(source, np.uint8, "r")})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_two_processes_share_one_copy(start, source, shm):
    """One makes it, both read the same file; the last one to go removes it."""
    first, second = start(), start()
    one, two = said(first), said(second)
    assert {one[0], two[0]} == {True, False}
    assert one[1] == two[1] == int(np.fromfile(source, np.uint8).sum(dtype=np.int64))
    assert one[2] == two[2]
    assert len(names(shm)) == 1
    for process in (first, second):
        go_on(process)
    memory = [said(process) for process in (first, second)]
    if process_memory() is not None:
        assert all(shared >= SIZE for shared, _ in memory), "both have touched all of it"
    go_on(first)
    first.wait(WAIT_S)
    assert len(names(shm)) == 1
    go_on(second)
    second.wait(WAIT_S)
    assert names(shm) == []


def test_a_creator_that_is_killed_blocks_nobody(start, source, shm):
    dead, waiting = start("filling"), None
    assert dead.stdout.readline() == "filling\n"
    waiting = start()
    dead.send_signal(signal.SIGKILL)
    dead.wait(WAIT_S)
    created, total, *_ = said(waiting)
    assert created and total == int(np.fromfile(source, np.uint8).sum(dtype=np.int64))


def test_the_others_wait_only_so_long(start, source, shm):
    holder = start("filling")
    assert holder.stdout.readline() == "filling\n"
    told: list[str] = []
    with pytest.raises(UserError, match=r"another process did not finish it within 0\.2 s"):
        shared_copy(planes_of(source), shm, wait_s=0.2, progress=told.append)
    assert len(told) == 1
    (left,) = names(shm)
    assert left.endswith(PART)


def test_other_arrays_get_a_copy_of_their_own(source, shm, tmp_path):
    """One byte and the file's time differ; then only the time."""
    mine = shared_copy(planes_of(source), shm)
    other, same = tmp_path / "other", tmp_path / "same"
    values = np.fromfile(source, np.uint8)
    same.write_bytes(values.tobytes())
    values[SIZE // 2 + 1000] ^= 1
    other.write_bytes(values.tobytes())
    os.utime(same, ns=(0, 0))
    theirs, later = (shared_copy(planes_of(path), shm) for path in (other, same))
    assert len(names(shm)) == 3 and theirs.created and later.created
    np.testing.assert_array_equal(theirs.arrays["a"], values)
    np.testing.assert_array_equal(mine.arrays["a"], np.fromfile(source, np.uint8))
    for copy in (mine, theirs, later):
        copy.close()
        copy.close()
    assert names(shm) == []


def test_a_foreign_file_of_that_name_is_replaced_or_named(source, shm):
    copy = shared_copy(planes_of(source), shm)
    with open(copy.path, "r+b") as file:
        file.seek(HUGE + 5)
        file.write(b"\x00\xff\x00\xff")  # within the first sample
    with pytest.raises(UserError, match=r"holds something else, and another process uses it"):
        shared_copy(planes_of(source), shm)
    path = copy.path
    copy.close()
    path.write_bytes(b"what is this")
    again = shared_copy(planes_of(source), shm)
    assert again.created
    np.testing.assert_array_equal(again.arrays["a"], np.fromfile(source, np.uint8))
    again.close()


def test_what_nobody_holds_is_removed(source, shm):
    """Of killed processes; files of others stay."""
    held = shared_copy(planes_of(source), shm)
    for name in ("dsv41-shared-0", f"dsv41-shared-1{PART}", "mine"):
        (shm / name).write_bytes(b"x")
    removed = remove_unused(shm, but=shm / "dsv41-shared-9")
    assert sorted(path.name for path in removed) == ["dsv41-shared-0", f"dsv41-shared-1{PART}"]
    assert names(shm) == sorted([held.path.name, "mine"])
    (shm / "mine").unlink()
    held.close()


def test_a_fault_leaves_nothing(source, shm, monkeypatch):
    def fail(name, start, values):
        raise UserError(f"{name} at {start}: bad")

    with pytest.raises(UserError, match="a at 0: bad"):
        shared_copy(planes_of(source), shm, check=fail)
    assert names(shm) == []
    monkeypatch.setattr("dsv41_jax.shared_copy.os.statvfs", lambda _: os.statvfs_result([0] * 10))
    with pytest.raises(UserError, match=r"0\.01 GB needed, 0\.00 GB are free"):
        shared_copy(planes_of(source), shm)
    assert names(shm) == []
    with pytest.raises(UserError, match=r"absent: is not a directory"):
        shared_copy(planes_of(source), shm / "absent")
