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
    left. ``mosaic`` reads the visible entries alone and takes float32 scores, up to 2,097,152
    entries or blocks and k < 4096, else ``ValueError``; ``auto`` takes the reference for others.
    """
    kinds = {
        "reference": ref.index_topk,
        "mosaic": _entries_where_fit if kernels == "auto" else _entries,
    }
    return choose("index_topk", kernels, kinds)


def build_blocks(kernels: str) -> Callable:
    """top_blocks(scores f32 [..., N], visible int32 [...], *, block_size, k) -> int32 [..., k].

    Block score = maximum over block_size entries; the block of the newest visible entry always wins
    a place; the k best blocks, ties to the lowest, ascending, blocks without a visible entry
    replaced by -1 and put last. ``mosaic``: as above, block_size 1, 2, 4, 8 or 16.
    """
    kinds = {
        "reference": ref.top_blocks,
        "mosaic": _blocks_where_fit if kernels == "auto" else _blocks,
    }
    return choose("top_blocks", kernels, kinds)


def _entries(scores: Array, visible: Array, *, k: int) -> Array:
    from pallas_kernels.index_topk import kernel_sm90

    return kernel_sm90.index_topk(scores, visible, k=k)


def _entries_where_fit(scores: Array, visible: Array, *, k: int) -> Array:
    from pallas_kernels.index_topk.kernel_sm90 import index_topk, unfit

    run = ref.index_topk if unfit(scores, k, 1) else index_topk
    return run(scores, visible, k=k)


def _blocks(scores: Array, visible: Array, *, block_size: int, k: int) -> Array:
    from pallas_kernels.index_topk import kernel_sm90

    return kernel_sm90.top_blocks(scores, visible, block_size=block_size, k=k)


def _blocks_where_fit(scores: Array, visible: Array, *, block_size: int, k: int) -> Array:
    from pallas_kernels.index_topk.kernel_sm90 import top_blocks, unfit

    run = ref.top_blocks if unfit(scores, k, block_size) else top_blocks
    return run(scores, visible, block_size=block_size, k=k)
