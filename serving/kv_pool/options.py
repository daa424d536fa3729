"""What an engine is told about its pool, and the option ``--kv-pool``."""

import argparse
import re
from dataclasses import dataclass

from dsv41_jax.errors import UserError

HELP = "cached pages shared beyond this engine: none, shm[:BYTES[:NAME]] or mooncake:HOST:PORT"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class PoolOptions:
    """backend: "shm" or "mooncake". model: fingerprint of the checkpoint; engines that differ in it
    never share a page. capacity: bytes of a pool that is made. name: of a shared-memory pool, by
    default one a model and layout. address: of Mooncake's master.

    lookup_s: how long a request waits for a lookup, load_s: for a load, and as long again as its
    bytes take at ``least_rate`` bytes a second; then it computes what has not come. lease_s: how
    long a page is kept after it was found. backlog: bytes that may wait to be stored; what comes
    beyond is not. batches: pages a dispatch, between device and host.
    """

    backend: str
    model: str
    capacity: int = 4 * 10**9
    name: str | None = None
    address: str = ""
    lookup_s: float = 1.0
    load_s: float = 1.0
    least_rate: float = 50e6
    lease_s: float = 10.0
    backlog: int = 256 * 2**20
    batches: tuple[int, ...] = (4, 64)

    def __post_init__(self) -> None:
        if self.backend not in ("shm", "mooncake"):
            raise ValueError(f"{self.backend=} must be shm or mooncake")
        if min(self.batches) < 1:
            raise ValueError(f"{self.batches=} must be positive")

    def batch(self, pages: int) -> int:
        return smallest_batch(self.batches, pages)


def smallest_batch(batches: tuple[int, ...], pages: int) -> int:
    """The smallest batch that holds so many pages, or the largest."""
    return min((n for n in batches if n >= pages), default=max(batches))


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-pool", default="none", metavar="POOL", help=HELP)


def parse_bytes(text: str) -> int:
    """Bytes of "500000000", "2GB", "512MiB", ...; ValueError for anything else."""
    match = re.fullmatch(r"(\d+)(?:([KMGT]i?)?B)?", text)
    if not match or not int(match[1]):
        raise ValueError(f"{text!r} must be bytes, as in 500000000, 2GB or 512MiB")
    return int(match[1]) * _UNITS[match[2] or ""]


def parse_pool(text: str, model: str) -> PoolOptions | None:
    """The pool that an option names, None for ``none``. UserError says what is wrong with it."""
    kind, _, rest = text.partition(":")
    if text == "none":
        return None
    if kind == "shm":
        size, _, name = rest.partition(":")
        if name and not re.fullmatch(r"[\w.-]{1,100}", name):
            raise UserError(f"--kv-pool {text}: the name must be letters, digits, dots and dashes")
        options = PoolOptions("shm", model, name=name or None)
        try:
            capacity = parse_bytes(size) if size else options.capacity
        except ValueError as error:
            raise UserError(f"--kv-pool {text}: {error}") from None
        return PoolOptions("shm", model, name=name or None, capacity=capacity)
    if kind == "mooncake":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--kv-pool {text}: must be mooncake:HOST:PORT, the master's address")
        return PoolOptions("mooncake", model, address=rest)
    raise UserError(f"--kv-pool {text}: must be none, shm[:BYTES[:NAME]] or mooncake:HOST:PORT")
