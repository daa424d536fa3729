"""Rows that a launch leaves as sums that the next one has still to add."""

from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Addends:
    """float32 [P, ..., D]: P parts of each row, added in their order."""

    parts: Array

    def total(self, dtype: jnp.dtype) -> Array:
        """The rows [..., D], rounded once."""
        return reduce(jnp.add, list(self.parts)).astype(dtype)


def whole(rows: Array | Addends, like: Array) -> Array:
    """Rows [..., D], in the dtype of ``like`` if they came in parts."""
    return rows.total(like.dtype) if isinstance(rows, Addends) else rows
