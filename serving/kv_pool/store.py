"""What a backend of the pool offers: blocking calls over batches of keys."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class StoreError(Exception):
    """The backend did not do what it was asked for; the message says why."""


class ForeignStore(StoreError):
    """What is there was made by another version of this program or for other values."""


class PageStore(Protocol):
    """Values of one size under keys of 32 bytes, kept until their room is needed.

    Every method takes a batch, may be called by several threads at once, may block, and raises
    StoreError when the backend fails. Nothing is promised of a value but its size: callers check
    what they get. A found key is leased: it is not evicted for some seconds.
    """

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there; leases them."""
        ...

    def get(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        """Fill uint8 ``rows`` [len(keys), value_bytes]; False, and any bytes, where a value is
        gone.
        """
        ...

    def put(self, keys: Sequence[bytes], rows: np.ndarray) -> list[bool]:
        """Store rows, evicting what was used longest ago; False where there was no room. What is
        there already stays.
        """
        ...

    def lease(self, keys: Sequence[bytes]) -> list[bool]:
        """Keep keys for some seconds more; False where a key is not there."""
        ...

    def remove(self, keys: Sequence[bytes], *, leased: bool = False) -> list[bool]:
        """Forget keys, those with a lease only if told; False where one stays or was not there."""
        ...

    def close(self) -> None:
        """Let go of what this process holds; the values stay."""
        ...
