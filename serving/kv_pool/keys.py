"""Names of pages in the pool: chain hashes of token ids below model, layout and format version."""

import hashlib
import json
import threading
import time
from dataclasses import asdict, dataclass

import numpy as np

# Part of every key and every header: another version's pages are neither found nor taken.
FORMAT_VERSION = 1
KEY_BYTES = 32
# Hashing holds the interpreter lock; a long prompt lets others in now and then.
_YIELD_EVERY = 64


@dataclass(frozen=True)
class Namespace:
    """What two engines must have in common to share pages.

    model: fingerprint of the checkpoint. numerics: name of the numerics that wrote the rows.
    planes: (path, dtype, shape) of a page's part of every plane, in the order of its bytes.
    page_size: tokens a page.
    """

    model: str
    numerics: str
    page_size: int
    planes: tuple[tuple[str, str, tuple[int, ...]], ...]
    version: int = FORMAT_VERSION

    @property
    def digest(self) -> bytes:
        """32 bytes; the root of every chain of keys."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all planes."""
        return sum(
            int(np.prod(shape)) * np.dtype(dtype).itemsize for _, dtype, shape in self.planes
        )


class Chain:
    """The keys of the pages of one growing token sequence; each depends on all tokens up to its
    end. Threads may share it.
    """

    def __init__(self, root: bytes, page_size: int):
        self._root, self._size = root, page_size
        self._keys: list[bytes] = []
        self._lock = threading.Lock()

    def keys(self, tokens: np.ndarray, count: int) -> list[bytes]:
        """Keys of the first ``count`` pages of int32 ``tokens``, which begin as in earlier
        calls.
        """
        if count * self._size > len(tokens):
            raise ValueError(f"{count=} pages must be filled by {len(tokens)} tokens")
        data = memoryview(np.ascontiguousarray(tokens, np.int32)).cast("B")
        step = 4 * self._size
        with self._lock:
            while len(self._keys) < count:
                index = len(self._keys)
                parent = self._keys[-1] if self._keys else self._root
                piece = data[index * step : (index + 1) * step]
                self._keys.append(hashlib.sha256(parent + piece).digest())
                if index % _YIELD_EVERY == _YIELD_EVERY - 1:
                    time.sleep(0)
            return self._keys[:count]
