"""The format of events, byte by byte where others read it, and what is refused."""

import msgspec
import numpy as np
import pytest

from serving.kv_events.hashes import page_hash, page_hashes
from serving.kv_events.wire import (
    END,
    Batch,
    Cleared,
    EventError,
    Removed,
    Stored,
    decode,
    encode,
    sequence_bytes,
    sequence_number,
)

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"}
CLEARED = {"type": "AllBlocksCleared"}


def packed(*events, at=1.5, rank=1) -> bytes:
    return msgspec.msgpack.encode([at, list(events), rank])


def test_a_batch_is_what_others_read():
    batch = Batch(1.5, [Stored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU")], 1)
    batch.events.extend([Removed([2], "CPU"), Cleared()])
    assert encode(batch) == packed(STORED, REMOVED, CLEARED)
    assert decode(encode(batch), rank=1, page_size=2) == batch
    assert decode(packed(rank=None), rank=1) == Batch(1.5, [], None)


def test_fields_that_later_versions_add_are_ignored():
    [event] = decode(packed(STORED | {"group_idx": 0, "extra_keys": [None, None]})).events
    assert event == Stored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU")


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "not a batch"),
        (b"\xc1garbage", "not a batch"),
        (packed()[:-1], "not a batch"),
        (packed() + b"\0", "not a batch"),
        (b"\x91" * 100_000, "not a batch"),
        (b"\x93\xcb\0\0\0\0\0\0\0\0\x91\x91\xa1\xff\xc0", "not a batch"),
        (msgspec.msgpack.encode({"at": 1.0}), "not a batch"),
        (packed(at="now"), "not a batch"),
        (packed(at=float("nan")), "the time is nan"),
        (packed(rank="0"), "not a batch"),
        (packed(rank=0), "data rank 0 where 1 publishes"),
        (packed({"type": "BlockStolen", "block_hashes": [1]}), "not a batch"),
        (packed(["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU"]), "not a batch"),
        (packed({k: v for k, v in STORED.items() if k != "token_ids"}), "not a batch"),
        (packed(STORED | {"block_hashes": [2**63, 1]}), "not a batch"),
        (packed(STORED | {"block_hashes": [-1, 1]}), "not a batch"),
        (packed(STORED | {"block_hashes": [b"12345678", 1]}), "not a batch"),
        (packed(STORED | {"token_ids": [5, 6, 7, -8]}), "not a batch"),
        (packed(STORED | {"token_ids": [5, 6, 7, 2**31]}), "not a batch"),
        (packed(STORED | {"token_ids": [5, 6, 7]}), "3 tokens for 2 pages of 2"),
        (packed(STORED | {"block_size": 4}), "pages of 4 tokens where 2 are expected"),
        (packed(STORED | {"block_size": 0}), "not a batch"),
        (packed(STORED | {"medium": "TAPE"}), "not a batch"),
        (packed(STORED, REMOVED | {"block_hashes": [1.5]}), "not a batch"),
    ],
)
def test_anything_else_is_refused_as_a_whole(payload, complaint):
    with pytest.raises(EventError, match=complaint):
        decode(payload, rank=1, page_size=2)


def test_sequence_numbers():
    assert sequence_bytes(258) == b"\0\0\0\0\0\0\1\2" and sequence_bytes(END) == b"\xff" * 8
    assert [sequence_number(sequence_bytes(n)) for n in (END, 0, 2**62)] == [END, 0, 2**62]
    for wrong in (b"", b"\0" * 7, b"\0" * 9, b"\xff" * 7 + b"\xfe"):
        with pytest.raises(EventError, match="sequence number"):
            sequence_number(wrong)


def test_a_hash_depends_on_every_token_up_to_the_end_of_its_page():
    tokens = list(range(10, 20))
    hashes = page_hashes(tokens, 3)
    assert len(hashes) == 3 and all(0 <= name < 2**63 for name in hashes)
    for position in range(9):
        changed = [*tokens[:position], 99, *tokens[position + 1 :]]
        same = [a == b for a, b in zip(hashes, page_hashes(changed, 3), strict=True)]
        assert same == [page < position // 3 for page in range(3)]
    assert page_hashes(np.array(tokens, np.int32), 3) == hashes
    assert page_hashes(tokens[3:], 3, parent=hashes[0]) == hashes[1:]
    assert page_hashes(tokens[:2], 3) == page_hashes([], 3) == []
    assert page_hashes(tokens[3:6], 3) != hashes[1:2], "a page is not its tokens alone"
    with pytest.raises(ValueError, match="page_size"):
        page_hashes(tokens, 0)


def test_hashes_are_the_same_in_every_process_and_version():
    assert page_hashes([1, 2, 3, 4], 2) == [9194871332124908116, 1468222474362719536]
    assert page_hash(None, bytes([1, 0, 0, 0, 2, 0, 0, 0])) == page_hashes([1, 2], 2)[0]
