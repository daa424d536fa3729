"""Shapes and inputs of the compiled programs."""

from dataclasses import dataclass

import jax
from jax import Array


@dataclass(frozen=True)
class Bucket:
    """The shapes of one executable: requests B, rows T a request, pages P of a page table, steps a
    dispatch (decode).
    """

    requests: int
    rows: int
    pages: int
    steps: int = 1


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
