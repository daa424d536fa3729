"""The pool in Mooncake Store: pages in the memory of owner processes, on this host or others.

Needs the extra ``[pool]`` and libibverbs.
"""

import importlib
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from dsv41_jax.errors import UserError
from serving.kv_pool.store import StoreError

MISSING_EXTRA = "mooncake: the extra [pool] is not installed, or libibverbs.so.1 is missing"
# Any other negative answer is about one key: not there, leased, no room, its owner gone.
_NO_MASTER = (-900, -901)
_STAGED = 64
_BUFFERS = 4
_REACH_S = 3.0


def mooncake_class() -> Any:
    """Mooncake's client class; UserError if it cannot be imported."""
    # It logs every call that fails, also those that are answers here.
    os.environ.setdefault("GLOG_minloglevel", "3")
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except ImportError as error:
        raise UserError(f"{MISSING_EXTRA} ({error})") from None


class MooncakeStore:
    """``PageStore`` over a client of a Mooncake master. The master decides how long a lease is."""

    def __init__(self, address: str, value_bytes: int):
        """address: HOST:PORT of the master. UserError if it cannot be reached."""
        self.value_bytes = value_bytes
        self._client = mooncake_class()()
        host = _own_address(address)
        # Without a segment of its own this process keeps nothing for others, and may die.
        status = self._client.setup(host, "P2PHANDSHAKE", 0, 0, "tcp", "", address)
        if status:
            raise UserError(f"--kv-pool mooncake:{address}: setup failed with {status}")
        self._buffers: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            buffer = np.zeros((_STAGED, value_bytes), np.uint8)
            if self._client.register_buffer(buffer.ctypes.data, buffer.nbytes):
                raise UserError(f"--kv-pool mooncake:{address}: no memory could be registered")
            self._buffers.put(buffer)

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        if not keys:
            return []
        return [_checked(code) == 1 for code in self._client.batch_is_exist(_names(keys))]

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        return self.lookup(keys)

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        def receive(names: list[str], buffer: np.ndarray, part: np.ndarray) -> list[bool]:
            codes = self._client.batch_get_into(names, *_places(buffer, len(names)))
            whole = [_checked(code) == self.value_bytes for code in codes]
            part[whole] = buffer[: len(names)][whole]
            return whole

        return self._batches(keys, rows, receive)

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        def send(names: list[str], buffer: np.ndarray, part: np.ndarray) -> list[bool]:
            buffer[: len(names)] = part
            codes = self._client.batch_put_from(names, *_places(buffer, len(names)))
            return [_checked(code) == 0 for code in codes]

        return self._batches(keys, rows, send)

    def remove(self, keys: Sequence[bytes], *, leased: bool = False) -> list[bool]:
        return [_checked(self._client.remove(name, leased)) == 0 for name in _names(keys)]

    def close(self) -> None:
        self._client.close()

    def _batches(
        self,
        keys: Sequence[bytes],
        rows: np.ndarray,
        call: Callable[[list[str], np.ndarray, np.ndarray], list[bool]],
    ) -> list[bool]:
        """A call over as many keys at a time as a buffer holds."""
        names, done = _names(keys), []
        for first in range(0, len(names), _STAGED):
            with self._buffer() as buffer:
                stop = first + _STAGED
                done += call(names[first:stop], buffer, rows[first:stop])
        return done

    @contextmanager
    def _buffer(self) -> Iterator[np.ndarray]:
        """Registered memory that no other thread uses."""
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)


def reachable(address: str, timeout_s: float) -> bool:
    """Whether somebody listens at HOST:PORT, tried for so long."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def check_master(address: str) -> None:
    """UserError if there is no client here, or nobody listens at HOST:PORT."""
    mooncake_class()
    if not reachable(address, _REACH_S):
        raise UserError(f"--kv-pool mooncake:{address}: nobody answers there")


def _own_address(master: str) -> str:
    """The address of this host as the master's host sees it."""
    check_master(master)
    host, _, port = master.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_REACH_S) as connection:
        return connection.getsockname()[0]


def _names(keys: Sequence[bytes]) -> list[str]:
    return [f"dsv41-{key.hex()}" for key in keys]


def _places(buffer: np.ndarray, count: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of the first rows."""
    first, size = buffer.ctypes.data, buffer.shape[1]
    return [first + row * size for row in range(count)], [size] * count


def _checked(code: int) -> int:
    """An answer about one key; StoreError if the master gave none."""
    if code in _NO_MASTER or code == -1:
        raise StoreError(f"Mooncake's master does not answer (error {code})")
    return code
