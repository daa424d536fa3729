"""Runs pytest in a network of its own with nothing but loopback; Mooncake's data ports listen on
every address: ``unshare --net python -m tests.serving.kv_pool.in_namespace ARGUMENTS``.
"""

import fcntl
import socket
import struct
import sys

import pytest

_SIOCSIFFLAGS, _UP_AND_RUNNING = 0x8914, 0x41


def loopback_up() -> None:
    with socket.socket() as sock:
        flags = struct.pack("16sh22x", b"lo", _UP_AND_RUNNING)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, flags)


if __name__ == "__main__":
    loopback_up()
    sys.exit(pytest.main(sys.argv[1:]))
