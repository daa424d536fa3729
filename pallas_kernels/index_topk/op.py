"""``index_topk`` and ``top_blocks``: selection of entries and of candidate blocks (ARCHITECTURE 6.5
and 6.7).
"""

from collections.abc import Callable

from pallas_kernels.dispatch import choose
from pallas_kernels.index_topk import ref


def build(kernels: str) -> Callable:
    """index_topk(scores f32 [..., N], visible int32 [...], *, k) -> int32 [..., k].

    The k entries of highest score, ties to the lowest entry, ascending, picks >= visible replaced
    by -1 and put last. A visible entry of score -inf can be picked when fewer than k others are
    left.
    """
    return choose("index_topk", kernels, {"reference": ref.index_topk})


def build_blocks(kernels: str) -> Callable:
    """top_blocks(scores f32 [..., N], visible int32 [...], *, block_size, k) -> int32 [..., k].

    Block score = maximum over block_size entries; the block of the newest visible entry always wins
    a place; the k best blocks, ties to the lowest, ascending, blocks without a visible entry
    replaced by -1 and put last.
    """
    return choose("top_blocks", kernels, {"reference": ref.top_blocks})
