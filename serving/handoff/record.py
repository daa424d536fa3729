"""The record of a hand-off, and the pool's values that hold it.

A pool has values of one size, those of pages. Value 0 of a hand-off is the page that the prompt
leaves incomplete, if it does; the record fills those after it, the last one padded with zeros.
"""

import hashlib
import json
import struct
from dataclasses import dataclass

import numpy as np

from serving.handoff.ticket import Ticket
from serving.kv_pool.values import HEADER_BYTES
from serving.request import TokenLogprobs

VERSION = 1
_MAGIC = b"DSV41HND"
_HEADER = struct.Struct("<8sIIQ32s")
# Of all but the state: the largest reports of logprobs need a tenth of it.
_META_BYTES = 2**16


class BadRecord(ValueError):
    """Not the record that was asked for; the message says why."""


@dataclass(frozen=True)
class Record:
    """What is left of a request after its prompt. form: of ``HandoffOptions``. prompt: digest of
    its ids. token: the first one sampled. state: uint8 [bytes] of ``take_windows``, or none.
    """

    form: str
    prompt: str
    token: TokenLogprobs
    state: np.ndarray

    def pack(self) -> np.ndarray:
        """uint8 [size]: header, checksum, all but the state as JSON, the state."""
        token = [self.token.token_id, self.token.logprob, self.token.top]
        fields = {"form": self.form, "prompt": self.prompt, "token": token}
        meta = json.dumps(fields).encode()
        digest = hashlib.sha256(meta + self.state.tobytes()).digest()
        header = _HEADER.pack(_MAGIC, VERSION, len(meta), self.state.size, digest)
        return np.concatenate([np.frombuffer(header + meta, np.uint8), self.state])

    @classmethod
    def unpack(cls, data: np.ndarray) -> "Record":
        """The record that uint8 ``data`` begins with; BadRecord if it is none of this version, or
        damaged.
        """
        if data.size < _HEADER.size:
            raise BadRecord("it is cut off")
        magic, version, meta_bytes, state_bytes, digest = _HEADER.unpack(data[: _HEADER.size])
        if magic != _MAGIC:
            raise BadRecord("it is no record")
        if version != VERSION:
            raise BadRecord(f"it has {version=}, this program's is {VERSION}")
        body = data[_HEADER.size : _HEADER.size + meta_bytes + state_bytes]
        if body.size < meta_bytes + state_bytes or hashlib.sha256(body).digest() != digest:
            raise BadRecord("it is damaged")
        fields = json.loads(body[:meta_bytes].tobytes())
        token_id, logprob, top = fields["token"]
        token = TokenLogprobs(token_id, logprob, tuple((i, value) for i, value in top))
        return cls(fields["form"], fields["prompt"], token, body[meta_bytes:])


def largest_record(state_bytes: int) -> int:
    """Bytes that a record with so much state may have."""
    return _HEADER.size + _META_BYTES + state_bytes


def prompt_digest(prompt: np.ndarray) -> str:
    """Of int32 ids."""
    return hashlib.sha256(np.ascontiguousarray(prompt, np.int32)).hexdigest()


def value_keys(root: bytes, ticket: Ticket, page_bytes: int, *, tail: bool) -> list[bytes]:
    """Keys of a hand-off's values below a namespace's ``root``, that of its ``tail`` page first."""
    count = 1 + -(-ticket.size // page_bytes)
    numbers = range(0 if tail else 1, count)
    return [hashlib.sha256(root + ticket.name + struct.pack("<I", i)).digest() for i in numbers]


def split(data: np.ndarray, page_bytes: int) -> np.ndarray:
    """uint8 data as values [k, HEADER_BYTES + page_bytes], headers to be filled."""
    count = -(-data.size // page_bytes)
    rows = np.zeros((count, HEADER_BYTES + page_bytes), np.uint8)
    padded = np.zeros(count * page_bytes, np.uint8)
    padded[: data.size] = data
    rows[:, HEADER_BYTES:] = padded.reshape(count, page_bytes)
    return rows


def joined(rows: np.ndarray) -> np.ndarray:
    """The inverse of ``split``, padding included."""
    return rows[:, HEADER_BYTES:].reshape(-1)
