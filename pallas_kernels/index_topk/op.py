"""``index_topk`` and ``top_blocks``: selection of entries and of candidate blocks (ARCHITECTURE 6.5
and 6.7).
"""

from collections.abc import Callable

from jax import Array

from pallas_kernels.dispatch import choose
from pallas_kernels.index_topk import ref


def build(kernels: str) -> Callable:
    """index_topk(scores f32 [..., N], visible int32 [...], *, k) -> int32 [..., k].

    The k entries of highest score, ties to the lowest entry, ascending, picks >= visible replaced
    by -1 and put last. A visible entry of score -inf can be picked when fewer than k others are
    left. ``mosaic``: up to 2,097,152 entries or blocks and k < 4096; ``auto`` does not take it.
    """
    return choose("index_topk", _named(kernels), {"reference": ref.index_topk, "mosaic": _entries})


def build_blocks(kernels: str) -> Callable:
    """top_blocks(scores f32 [..., N], visible int32 [...], *, block_size, k) -> int32 [..., k].

    Block score = maximum over block_size entries; the block of the newest visible entry always wins
    a place; the k best blocks, ties to the lowest, ascending, blocks without a visible entry
    replaced by -1 and put last. ``mosaic``: as above, block_size 1, 2, 4, 8 or 16.
    """
    return choose("top_blocks", _named(kernels), {"reference": ref.top_blocks, "mosaic": _blocks})


def _named(kernels: str) -> str:
    return "reference" if kernels == "auto" else kernels  # until the kernel has run on a GPU


def _entries(scores: Array, visible: Array, *, k: int) -> Array:
    from pallas_kernels.index_topk import kernel_sm90

    return kernel_sm90.index_topk(scores, visible, k=k)


def _blocks(scores: Array, visible: Array, *, block_size: int, k: int) -> Array:
    from pallas_kernels.index_topk import kernel_sm90

    return kernel_sm90.top_blocks(scores, visible, block_size=block_size, k=k)
