"""Ports that nobody else gets, and the addresses that processes name."""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(port: int = 0) -> Iterator[int]:
    """A port of 127.0.0.1 that meanwhile only those get who ask for it by its number and with
    SO_REUSEADDR, again and again; OSError if it cannot be had.
    """
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        # Behind the bind: nobody else may hold it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield holder.getsockname()[1]


def named_url(process: subprocess.Popen, within_s: float = 600.0) -> str:
    """The address that a process names on the stream of it that is a pipe; AssertionError with what
    it said if it ends instead, or is killed after so long.
    """
    stream = process.stdout or process.stderr
    said: list[str] = []
    assert stream is not None
    late = threading.Timer(within_s, process.kill)
    late.start()
    try:
        for line in stream:
            said.append(line)
            _, scheme, rest = line.partition("http://127.0.0.1:")
            if scheme:
                return scheme + rest.split()[0]
    finally:
        late.cancel()
    raise AssertionError(f"{process.args} named no address in {within_s} s: {''.join(said)}")
