"""The pool in shared memory of the host: a file that engines map, no service behind it.

Engines that map the same file share their pages. The kernel lets go of the lock of a process that
dies; what that process was writing is found by nobody and written over later.
"""

import fcntl
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dsv41_jax.errors import UserError
from serving.kv_pool.shm_table import ENTRY_BYTES, READY, WRITING, Claim, Table
from serving.kv_pool.store import ForeignStore, StoreError

_log = logging.getLogger(__name__)
_MAGIC = b"DSV41SHM"
_VERSION = 1
_SUPERBLOCK = struct.Struct("<8sIQQ")  # magic, version, slots, value bytes
_NUMBERS_AT = 64
_PAGE = 4096
_ALIGN = 64


def folder() -> Path:
    """Where pools lie: memory if the system has such a folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def pool_path(name: str) -> Path:
    """The file of a pool; users do not see each other's."""
    return folder() / f"dsv41-kv-{os.geteuid()}-{name}"


def pools() -> list[str]:
    """Names of this user's pools."""
    first = pool_path("").name
    return sorted(path.name.removeprefix(first) for path in folder().glob(f"{first}*"))


def describe(path: Path) -> str:
    """What a pool is, in a line for people."""
    with path.open("rb") as file:
        block = file.read(_SUPERBLOCK.size)
    size = path.stat().st_size
    if len(block) < _SUPERBLOCK.size or not block.startswith(_MAGIC):
        return f"{size} bytes, not a pool of pages"
    _, version, slots, value_bytes = _SUPERBLOCK.unpack(block)
    return f"{size} bytes, version {version}, room for {slots} values of {value_bytes} bytes"


class SharedMemoryStore:
    """``PageStore`` over a file of memory."""

    def __init__(
        self,
        path: Path,
        capacity: int,
        value_bytes: int,
        *,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Map the pool at ``path``, made with ``capacity`` bytes if there is none; what is there
        keeps its capacity. ForeignStore if it holds something else, UserError if it cannot be made.
        """
        self.path, self.value_bytes = path, value_bytes
        self._lease_s, self._clock = lease_s, clock
        self._stride = _up(value_bytes, _ALIGN)
        self._mutex = threading.Lock()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise UserError(f"kv pool: {path}: {error}") from None
        try:
            if os.fstat(self._file).st_uid != os.geteuid():
                raise UserError(f"kv pool: {path} belongs to another user")
            with self._locked():
                if self._unfinished():
                    self._create(capacity)
                self.slots = self._slots()
            if self.slots < self._room(capacity):
                kept = f"it has room for {self.slots} pages and keeps it"
                _log.warning("kv pool: %s: %s, %d bytes were asked for", path, kept, capacity)
            self._map = mmap.mmap(self._file, self._size(self.slots))
        except BaseException:
            os.close(self._file)
            raise
        memory = memoryview(self._map)
        tick, changes = np.frombuffer(memory, np.int64, 2, _NUMBERS_AT).reshape(2, 1)
        entries = memory[_PAGE : _PAGE + self.slots * ENTRY_BYTES]
        self.table = Table(entries, self.slots, tick, changes)
        data = np.frombuffer(memory, np.uint8, self.slots * self._stride, self._data_at(self.slots))
        self._rows = data.reshape(self.slots, self._stride)[:, :value_bytes]

    @property
    def capacity(self) -> int:
        """Values that fit."""
        return self.slots

    @property
    def used(self) -> int:
        """Values that are there."""
        return self.table.ready

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        with self._locked():
            return (self._find(keys) >= 0).tolist()

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        return self.lookup(keys)

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        with self._locked():
            slots = self._find(keys)
            generations = self.table.generation[slots].tolist()
        found = []
        for row, slot, generation in zip(rows, slots.tolist(), generations, strict=True):
            if slot >= 0:
                row[:] = self._rows[slot]
            # A lease may have run out while its bytes were copied.
            found.append(slot >= 0 and self.table.holds(Claim(slot, generation)))
        return found

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        with self._locked():
            self.table.drop(self.table.abandoned(keys, self._clock()))
            there = self.table.find(keys, (READY, WRITING)) >= 0
            claims: dict[bytes, Claim | None] = {}  # of a key that comes twice, one
            for key, old in zip(keys, there, strict=True):
                if key not in claims:
                    claims[key] = None if old else self._claim(key)
        for key, row in zip(keys, rows, strict=True):
            if (claim := claims[key]) is not None:
                self._rows[claim.slot] = row
        with self._locked():
            written = dict(zip(claims, self.table.commit(list(claims.values())), strict=True))
        return [bool(old) or written[key] for key, old in zip(keys, there, strict=True)]

    def remove(self, keys: Sequence[bytes], *, leased: bool = False) -> list[bool]:
        with self._locked():
            slots = self.table.find(keys)
            free = (slots >= 0) & (leased | ~(self.table.lease[slots] > self._clock()))
            self.table.drop(slots[free])
        return free.tolist()

    def close(self) -> None:
        """The mapping goes with the process: other threads may still read it."""
        with self._mutex:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _find(self, keys: Sequence[bytes]) -> np.ndarray:
        """The slots of keys, used and leased now."""
        slots = self.table.find(keys)
        self.table.touch(slots, self._clock() + self._lease_s)
        return slots

    def _claim(self, key: bytes) -> Claim | None:
        return self.table.claim(key, self._clock())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the threads of all processes."""
        with self._mutex:
            if self._file < 0:
                raise StoreError(f"{self.path} is closed")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            except OSError as error:
                raise StoreError(f"{self.path}: {error}") from None
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _unfinished(self) -> bool:
        """Whether nobody has made the pool: its first bytes are the last that a maker, who holds
        the lock meanwhile, writes.
        """
        return not any(os.pread(self._file, _SUPERBLOCK.size, 0))

    def _create(self, capacity: int) -> None:
        slots = self._room(capacity)
        if not slots:
            raise UserError(f"kv pool: {capacity} bytes hold no page of {self.value_bytes} bytes")
        os.ftruncate(self._file, 0)
        try:
            # Memory that is not there must be missed now, not when a page is written.
            os.posix_fallocate(self._file, 0, self._size(slots))
        except OSError as error:
            os.ftruncate(self._file, 0)
            raise UserError(f"kv pool: {capacity} bytes at {self.path}: {error}") from None
        block = _SUPERBLOCK.pack(_MAGIC, _VERSION, slots, self.value_bytes)
        os.pwrite(self._file, block, 0)

    def _slots(self) -> int:
        """Slots of the pool that is there."""
        block = os.pread(self._file, _SUPERBLOCK.size, 0)
        if len(block) < _SUPERBLOCK.size:
            raise ForeignStore(f"{self.path} is not a pool of pages")
        magic, version, slots, value_bytes = _SUPERBLOCK.unpack(block)
        if magic != _MAGIC:
            raise ForeignStore(f"{self.path} is not a pool of pages")
        if version != _VERSION:
            raise ForeignStore(f"{self.path} has {version=}, this program's is {_VERSION}")
        if value_bytes != self.value_bytes:
            raise ForeignStore(
                f"{self.path} holds values of {value_bytes} bytes, not of {self.value_bytes}"
            )
        if not slots or os.fstat(self._file).st_size != self._size(slots):
            raise ForeignStore(f"{self.path} is damaged")
        return slots

    def _room(self, capacity: int) -> int:
        """Slots of a pool of so many bytes."""
        return max(capacity - 2 * _PAGE, 0) // (self._stride + ENTRY_BYTES)

    def _data_at(self, slots: int) -> int:
        return _up(_PAGE + slots * ENTRY_BYTES, _PAGE)

    def _size(self, slots: int) -> int:
        return self._data_at(slots) + slots * self._stride


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
