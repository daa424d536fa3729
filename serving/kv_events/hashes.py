"""Names of pages in events: chain hashes of token ids, the same in workers and routers.

They have 63 bits: some of those who read events take signed numbers of 64 bits, others unsigned.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

# What stands before the first page; no page is named by it in an event, its parent is then None.
_ROOT = bytes(8)


def page_hash(parent: int | None, tokens: bytes) -> int:
    """Hash, below 2**63, of the page with these little-endian int32 ids behind the page ``parent``,
    None for the first of a prompt. It depends on all tokens up to the page's end.
    """
    before = _ROOT if parent is None else parent.to_bytes(8, "little")
    digest = hashlib.blake2b(before + tokens, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def page_hashes(
    tokens: Sequence[int] | np.ndarray, page_size: int, parent: int | None = None
) -> list[int]:
    """Hashes of the whole pages of ``tokens`` (int32 ids), in order; those of a prompt's first
    pages, or of pages behind ``parent``. ``ValueError`` if page_size is below 1.
    """
    if page_size < 1:
        raise ValueError(f"{page_size=} must be at least 1")
    data, step = np.asarray(tokens, "<i4").tobytes(), 4 * page_size
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        parent = page_hash(parent, data[start : start + step])
        hashes.append(parent)
    return hashes
