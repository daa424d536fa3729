"""A page in the pool: a header that says what it is, then its bytes."""

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum

import numpy as np

from serving.kv_pool.keys import FORMAT_VERSION

HEADER_BYTES = 128
_MAGIC = b"DSV41PAG"
_HEADER = struct.Struct("<8sII32s32s32s16x")
assert _HEADER.size == HEADER_BYTES


class Verdict(Enum):
    """GOOD: the page that was asked for, whole. FOREIGN: of another format, model or layout.
    CORRUPT: its bytes are not those that were put. LOST: no longer there.
    """

    GOOD = "good"
    FOREIGN = "foreign"
    CORRUPT = "corrupt"
    LOST = "lost"


@dataclass(frozen=True)
class Codec:
    """Values of one namespace: uint8 [value_bytes], header first. root: the namespace's digest."""

    root: bytes
    page_bytes: int

    @property
    def value_bytes(self) -> int:
        return HEADER_BYTES + self.page_bytes

    def seal(self, key: bytes, row: np.ndarray) -> None:
        """Write the header of ``key`` before the page that stands in ``row`` behind it."""
        checksum = hashlib.sha256(memoryview(row[HEADER_BYTES:])).digest()
        fields = _MAGIC, FORMAT_VERSION, self.page_bytes, self.root, key, checksum
        row[:HEADER_BYTES] = np.frombuffer(_HEADER.pack(*fields), np.uint8)

    def verdict(self, key: bytes, row: np.ndarray) -> Verdict:
        """What ``row``, found under ``key``, is."""
        magic, version, size, root, name, checksum = _HEADER.unpack(row[:HEADER_BYTES].tobytes())
        if magic != _MAGIC:
            return Verdict.CORRUPT
        if version != FORMAT_VERSION or root != self.root or size != self.page_bytes:
            return Verdict.FOREIGN
        if name != key or hashlib.sha256(memoryview(row[HEADER_BYTES:])).digest() != checksum:
            return Verdict.CORRUPT
        return Verdict.GOOD
