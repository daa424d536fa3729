"""Whether what an engine allocates fits what its devices have left."""

from collections.abc import Iterable
from typing import Any

import jax

from dsv41_jax.errors import UserError


def check_cache_fits(cache: Any, ranks: int, devices: Iterable[Any]) -> None:
    """UserError if a device has less memory left than a data rank's part of a cache takes, given as
    the shapes of all ranks. A device that does not tell its memory passes.
    """
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) // ranks
    for device in devices:
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", needed) - stats.get("bytes_in_use", 0)
        if "bytes_limit" in stats and needed > free:
            raise UserError(
                f"cache: slots and pages take {needed / 1e9:.2f} GB of every device, {device} has"
                f" {free / 1e9:.2f} GB left: fewer pages, slots or tokens are needed"
            )
