"""The record survives its way through values of a pool's size, and nothing else passes for it."""

import struct

import numpy as np
import pytest

from serving.handoff.record import (
    BadRecord,
    Record,
    joined,
    largest_record,
    prompt_digest,
    split,
    value_keys,
)
from serving.handoff.ticket import Ticket
from serving.kv_pool.values import HEADER_BYTES
from serving.request import TokenLogprobs

PAGE_BYTES = 96


def record(state_bytes: int = 300) -> Record:
    state = np.random.default_rng(1).integers(0, 256, state_bytes, np.uint8)
    top = ((7, float(np.float32(-0.1))), (0, float("-inf")))
    prompt = prompt_digest(np.arange(9, dtype=np.int32))
    return Record("windows", prompt, TokenLogprobs(7, top[0][1], top), state)


@pytest.mark.parametrize("state_bytes", [0, 1, 300, 3 * PAGE_BYTES])
def test_it_comes_back_as_it_was(state_bytes):
    made = record(state_bytes)
    data = made.pack()
    rows = split(data, PAGE_BYTES)
    assert rows.shape == (-(-data.size // PAGE_BYTES), HEADER_BYTES + PAGE_BYTES)
    assert not rows[:, :HEADER_BYTES].any()
    back = Record.unpack(joined(rows))
    assert (back.form, back.prompt, back.token) == (made.form, made.prompt, made.token)
    np.testing.assert_array_equal(back.state, made.state)
    assert data.size <= largest_record(state_bytes)


@pytest.mark.parametrize("at", [16, 24, 56, 90, -1])
def test_a_changed_byte_is_seen(at):
    data = record().pack()
    data[at] ^= 1
    with pytest.raises(BadRecord, match="damaged"):
        Record.unpack(data)


def test_what_is_no_record_of_this_version():
    data = record().pack()
    for size in (0, 20, 100, data.size - 1):
        with pytest.raises(BadRecord, match=r"cut off|damaged"):
            Record.unpack(data[:size])
    with pytest.raises(BadRecord, match="no record"):
        Record.unpack(np.zeros(500, np.uint8))
    data[8:12] = np.frombuffer(struct.pack("<I", 99), np.uint8)
    with pytest.raises(BadRecord, match="version=99"):
        Record.unpack(data)


def test_every_value_has_a_key_of_its_own():
    def keys(root: bytes = b"r", name: bytes = b"n" * 16, *, tail: bool = True) -> list[bytes]:
        return value_keys(root, Ticket(name, 200, 0), PAGE_BYTES, tail=tail)

    assert len(keys()) == 4 and keys(tail=False) == keys()[1:]
    assert len({*keys(), *keys(b"s"), *keys(name=b"m" * 16)}) == 12


def test_a_prompt_is_told_by_its_ids():
    ids = np.array([1, 2, 3], np.int32)
    assert prompt_digest(ids) == prompt_digest(ids[::-1][::-1])
    assert len({prompt_digest(ids[:n]) for n in range(4)}) == 4
