"""Shapes and inputs of the compiled programs."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
from jax import Array


@dataclass(frozen=True)
class Bucket:
    """The shapes of one executable: requests B of each data rank, rows T a request, pages P of a
    page table, steps a dispatch (decode).
    """

    requests: int
    rows: int
    pages: int
    steps: int = 1


def prefill_shape(
    shapes: Iterable[tuple[int, int]], requests: int, rows: int
) -> tuple[int, int] | None:
    """The smallest shape (requests, rows) that holds so many requests of so many rows."""
    fitting = [shape for shape in shapes if shape[0] >= requests and shape[1] >= rows]
    return min(fitting, key=lambda shape: shape[0] * shape[1], default=None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """B requests that decode: slot, position (of the token to feed), floor, decoder_floor int32
    [B], active bool [B], page_table int32 [B, P]; stop_ids int32 [B, M] (-1 = none) and
    last_position int32 [B] end a request on the device.
    """

    slot: Array
    position: Array
    active: Array
    page_table: Array
    floor: Array
    decoder_floor: Array
    stop_ids: Array
    last_position: Array
