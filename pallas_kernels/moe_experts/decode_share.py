"""Which tiles of a list each block of the persistent launch (``decode_kernel``) takes."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

Next = Callable[[Array], Array]


def share(block: Array, blocks: int, earlier: Array | int, rounds: int) -> tuple[Array, Next]:
    """The first tile of ``block``, int32 like all here, and the function from a tile to the one it
    takes next. Its tiles grow; the blocks together take every number from 0 on once.

    ``earlier`` tiles of another list were dealt in turn before, each as heavy as ``rounds`` of this
    one or by less than one lighter, which left some blocks a tile behind. Those take turns alone,
    ``rounds`` - 1 times, then all blocks do, they first. So the loads of two blocks differ at the
    end by at most a tile of this list, or by one of the earlier ones where this list ends while
    they take turns alone.
    """
    behind = blocks - earlier % blocks  # all blocks where none is: their turns are as any others
    alone = (rounds - 1) * behind
    place = (block + behind) % blocks
    first = jnp.where(place < behind, place, alone + place)
    return first, lambda tile: tile + jnp.where(tile < alone, behind, blocks)
