"""Rows of a table that does not lie on the device, fetched for one forward."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from pallas_kernels.quant import Fp8Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StagedRows:
    """Stands for a table in ``engram_rows``. rows [U, N]: those that the forward asks for, and
    others; places int32 [..., C]: which of them is the row of each id.
    """

    rows: Fp8Rows
    places: Array


def placed(table: Any, ids: Array) -> tuple[Any, Array]:
    """The table to look into and the ids to look up there; ValueError if rows were staged for ids
    of another shape.
    """
    if not isinstance(table, StagedRows):
        return table, ids
    if table.places.shape != ids.shape:
        raise ValueError(f"{table.places.shape=} must be {ids.shape=}")
    return table.rows, table.places
