"""Events as vLLM writes them, in msgpack, checked as a whole before they have any effect.

A message is [topic, sequence number (8 bytes, big-endian), payload]. A payload is the array
``[time, [event, ...], data rank]``; an event is a map, whose ``type`` is one of ``BlockStored``,
``BlockRemoved`` and ``AllBlocksCleared``.
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

# Pages on the device, and pages that were put into the pool behind it.
DEVICE, POOL = "GPU", "CPU"
# The number of a replay's last message, which has no payload.
END = -1
SEQUENCE_BYTES = 8
MAX_MESSAGE_BYTES = 64 * 2**20

Hash = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PageSize = Annotated[int, Meta(ge=1)]
Medium = Literal["GPU", "CPU"]


class EventError(Exception):
    """A message is not what a worker of this kind sends; the text says what is wrong with it."""


_NAMES = {
    "hashes": "block_hashes",
    "parent": "parent_block_hash",
    "tokens": "token_ids",
    "page_size": "block_size",
    "lora": "lora_id",
}


class Stored(Struct, frozen=True, tag="BlockStored", rename=_NAMES):
    """Pages that follow each other behind ``parent``, None for a prompt's first."""

    hashes: list[Hash]
    parent: Hash | None
    tokens: list[Token]
    page_size: PageSize
    lora: int | None
    medium: Medium
    lora_name: str | None = None


class Removed(Struct, frozen=True, tag="BlockRemoved", rename=_NAMES):
    """Pages that are gone from a medium."""

    hashes: list[Hash]
    medium: Medium


class Cleared(Struct, frozen=True, tag="AllBlocksCleared"):
    """Nothing is held any more, on any medium."""


Event = Stored | Removed | Cleared


class Batch(Struct, frozen=True, array_like=True):
    """The content of a message. at: seconds since the epoch."""

    at: float
    events: list[Event]
    rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode(batch: Batch) -> bytes:
    """The payload of a message."""
    return _encoder.encode(batch)


def decode(payload: bytes, *, rank: int | None = None, page_size: int | None = None) -> Batch:
    """The batch of a payload. EventError if any part of it is malformed, or of another data rank or
    page size than those that are given.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EventError(f"not a batch of events: {error}") from None
    if not math.isfinite(batch.at):
        raise EventError(f"the time is {batch.at}")
    if rank is not None and batch.rank not in (None, rank):
        raise EventError(f"data rank {batch.rank} where {rank} publishes")
    for event in batch.events:
        if isinstance(event, Stored):
            _check_stored(event, page_size)
    return batch


def _check_stored(event: Stored, page_size: int | None) -> None:
    if page_size is not None and event.page_size != page_size:
        raise EventError(f"pages of {event.page_size} tokens where {page_size} are expected")
    if len(event.tokens) != len(event.hashes) * event.page_size:
        pages = f"{len(event.hashes)} pages of {event.page_size}"
        raise EventError(f"{len(event.tokens)} tokens for {pages}")


def sequence_bytes(number: int) -> bytes:
    """A sequence number, or ``END``, as it is sent."""
    return number.to_bytes(SEQUENCE_BYTES, "big", signed=True)


def sequence_number(data: bytes) -> int:
    """The number that was sent; EventError if it is none."""
    number = int.from_bytes(data, "big", signed=True)
    if len(data) != SEQUENCE_BYTES or number < END:
        raise EventError(f"a sequence number of {len(data)} bytes: {data[:16].hex()}")
    return number
