"""ZMQ sockets of this process; pyzmq is there for who publishes or follows events."""

import importlib
import re
from dataclasses import dataclass
from typing import Any

from dsv41_jax.errors import UserError
from serving.kv_events.wire import MAX_MESSAGE_BYTES

HELP = (
    "tcp://HOST:PORT: tell routers which pages are cached, data rank r on PORT + 2 r, and again "
    "what they missed on the port after it; port 0 takes free ones"
)
MISSING_EXTRA = "kv events: the extra [route] is not installed"
_MOST_PORT = 65535
# Messages that wait for a slow peer; what comes beyond is lost, and asked for again. Of an answer
# nothing may be lost: its numbers do not tell.
_HIGH_WATER = {"PUB": 100_000, "SUB": 100_000, "ROUTER": 0, "DEALER": 0}


def zmq_module() -> Any:
    """pyzmq; UserError if it cannot be imported."""
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise UserError(f"{MISSING_EXTRA} ({error})") from None


def new_socket(kind: str, address: str) -> Any:
    """A socket of the kind ("PUB", ...) for an address, neither bound nor connected."""
    zmq = zmq_module()
    sock = zmq.Context.instance().socket(getattr(zmq, kind))
    sock.linger = 0
    sock.sndhwm = sock.rcvhwm = _HIGH_WATER[kind]
    sock.maxmsgsize = 2 * MAX_MESSAGE_BYTES
    sock.ipv6 = "[" in address
    return sock


@dataclass(frozen=True)
class Endpoint:
    """``tcp://host:port``; a port 0 is a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "--kv-events") -> "Endpoint":
        """UserError, which says what it is about, for anything else."""
        match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[\w.*-]+):(\d{1,5})", text)
        if not match or int(match[2]) > _MOST_PORT:
            raise UserError(f"{what} {text!r}: must be tcp://HOST:PORT, port 0 to {_MOST_PORT}")
        return cls(match[1], int(match[2]))

    def bind(self, kind: str, offset: int) -> Any:
        """A socket on ``port + offset``, or on a free port; UserError if it cannot be had."""
        port = self.port + offset if self.port else 0
        address = f"tcp://{self.host}:{port or '*'}"
        sock = new_socket(kind, address)
        try:
            if port > _MOST_PORT:
                raise OSError(f"there are ports up to {_MOST_PORT} only")
            sock.bind(address)
        except (OSError, zmq_module().ZMQError) as error:
            sock.close()
            raise UserError(f"--kv-events {address}: {error}") from None
        return sock
