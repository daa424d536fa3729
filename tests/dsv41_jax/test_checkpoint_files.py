"""The safetensors reader: every claim of a header and of the index is checked."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dsv41_jax.checkpoint.safetensors_files import INDEX, SINGLE, ShardFile, TensorFiles
from dsv41_jax.errors import UserError


def write(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: str, shape: list, start: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def problems(path: Path) -> str:
    return "\n".join(ShardFile.open(path).problems)


def test_reads_what_the_library_writes(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.int8)}
    save_file(arrays, tmp_path / SINGLE)
    files = TensorFiles(tmp_path)
    assert files.problems == [] and set(files) == {"a", "b"}
    assert np.array_equal(files.view("a"), arrays["a"])
    assert isinstance(files.view("b"), np.memmap) and not files.view("b").flags.writeable
    assert files.view("b").dtype == np.uint8


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (entry("F32", [2], 4, 12), "b: byte range overlaps a"),
        (entry("F32", [2], 12, 20), "b: byte range leaves a gap after a"),
        (entry("F32", [2], 8, 24), "b: F32 [2] needs 8 bytes"),
        (entry("F32", [4], 8, 16), "b: F32 [4] needs 16 bytes"),
        (entry("F32", [100], 8, 408), "b: data_offsets = [8, 408]: file is truncated"),
        (entry("F32", [2**62, 4], 8, 16), "b: F32"),
        (entry("F32", [2**63], 8, 16), "b: shape"),
        (entry("U8", [2**32, 2**32], 8, 8), "b: U8"),
        (entry("F32", [-2], 8, 16), "b: shape"),
        (entry("F32", [True, 2], 8, 16), "b: shape"),
        (entry("F32", [1] * 1000, 8, 12), "b: shape"),
        (entry("F32", [2.0], 8, 16), "b: shape"),
        (entry("F32", [2], 16, 8), "b: data_offsets = [16, 8]: must not decrease"),
        (entry("F32", [2], -8, 0), "b: data_offsets"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8]}, "b: data_offsets"),
        (entry("F99", [2], 8, 16), "b: dtype = 'F99'"),
        ({"dtype": "F32", "shape": [2]}, "b: header entry"),
        (7, "b: header entry"),
    ],
)
def test_bad_entries_are_named(tmp_path, second, words):
    path = write(tmp_path / "x.safetensors", {"a": entry("F32", [2], 0, 8), "b": second}, bytes(24))
    assert words in problems(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"\x10\x00\x00", "truncated"),
        (struct.pack("<Q", 100) + b"{}", "header length 100"),
        (struct.pack("<Q", 2**63) + b"{}", "header length"),
        (struct.pack("<Q", 2) + b"[]", "must be a JSON object"),
        (struct.pack("<Q", 3) + b"{x}", "not JSON"),
        (struct.pack("<Q", 4) + b'{"\xff}', "not JSON in UTF-8"),
        (struct.pack("<Q", 15) + b'{"a": 1,"a": 2}', "stands twice"),
        (struct.pack("<Q", 2) + b"{}" + b"abc", "3 bytes after the last tensor"),
    ],
)
def test_bad_files_are_named(tmp_path, content, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    text = problems(path)
    assert "x.safetensors" in text and words in text


def test_several_faults_of_one_file_come_together(tmp_path):
    header = {"a": entry("F32", [2], 0, 4), "b": entry("Q", [2], 4, 8), "": entry("U8", [0], 8, 8)}
    shard = ShardFile.open(write(tmp_path / "x.safetensors", header, bytes(8)))
    assert len(shard.problems) == 3 and shard.faulty == {"a", "b", ""}


@pytest.fixture
def sharded(tmp_path) -> Path:
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, 20)
    return tmp_path


def index(directory: Path, weight_map, total=None) -> None:
    document = {"metadata": {} if total is None else {"total_size": total}}
    (directory / INDEX).write_text(json.dumps(document | {"weight_map": weight_map}))


def test_sound_shards_have_no_problems(sharded):
    assert TensorFiles(sharded).problems == []
    assert set(TensorFiles(sharded)) == {"a", "b"}


def test_missing_shard(sharded):
    (sharded / "two.safetensors").unlink()
    files = TensorFiles(sharded)
    assert files.problems == ["two.safetensors: shard is missing"] and files.damaged == {"b"}


def test_truncated_shard(sharded):
    path = sharded / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    files = TensorFiles(sharded)
    assert len(files.problems) == 1 and "b: data_offsets" in files.problems[0]
    assert "truncated" in files.problems[0] and files.damaged == {"b"}


def test_stray_shard(sharded):
    save_file({"c": np.zeros(1, np.float32)}, sharded / "three.safetensors")
    assert TensorFiles(sharded).problems == [f"three.safetensors: shard is not named by {INDEX}"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "two.safetensors", "b": "two.safetensors"}, "one.safetensors: shard is not named"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "b: "),
        (dict(a="one.safetensors", b="two.safetensors", c="two.safetensors"), "lacks it"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "it is in one.safetensors"),
    ],
)
def test_index_that_misassigns(sharded, weight_map, words):
    index(sharded, weight_map)
    assert words in "\n".join(TensorFiles(sharded).problems)


def test_tensor_the_index_does_not_know_and_tensor_in_two_shards(sharded):
    both = {"a": np.zeros(2, np.float32), "c": np.zeros(3, np.float32)}
    save_file(both, sharded / "two.safetensors")
    index(sharded, {"a": "one.safetensors", "b": "two.safetensors"})
    text = "\n".join(TensorFiles(sharded).problems)
    for words in ("a: is both in", "b: model.safetensors.index.json places", "c: is in two"):
        assert words in text


def test_total_size_is_checked(sharded):
    index(sharded, {"a": "one.safetensors", "b": "two.safetensors"}, 21)
    assert TensorFiles(sharded).problems == [f"{INDEX}: total_size = 21, the shards hold 20"]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "../one.safetensors"}}',
        b'{"weight_map": {"a": "one.bin"}}',
        b'{"weight_map": {"a": "one.safetensors"}, "metadata": {"total_size": "8"}}',
    ],
)
def test_bad_index_is_one_error(sharded, content):
    (sharded / INDEX).write_bytes(content)
    with pytest.raises(UserError, match=r"index\.json"):
        TensorFiles(sharded)


def test_nothing_to_read(tmp_path):
    with pytest.raises(UserError, match="holds neither"):
        TensorFiles(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        TensorFiles(tmp_path / "absent")


JUNK = st.one_of(
    st.none(), st.booleans(), st.text(max_size=4), st.floats(),
    st.integers(-(2**70), 2**70), st.lists(st.integers(-1, 2**64), max_size=3),
)  # fmt: skip
ENTRIES = st.one_of(
    JUNK,
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.one_of(JUNK, st.sampled_from(["F32", "U8", "BF16", "F8_E8M0"])),
            "shape": st.one_of(JUNK, st.lists(st.integers(0, 9), max_size=3)),
            "data_offsets": st.one_of(JUNK, st.lists(st.integers(0, 40), min_size=2, max_size=2)),
        },
    ),
)


@settings(max_examples=150, deadline=None)
@given(header=st.dictionaries(st.text(max_size=3), ENTRIES, max_size=4), size=st.integers(0, 64))
def test_fuzzed_headers_are_refused_or_sound(tmp_path_factory, header, size):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    check_sound(write(path, header, bytes(size)))


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_flipped_and_cut_files_are_refused_or_sound(tmp_path_factory, at, byte, cut):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": np.zeros(4, np.float32), "b": np.zeros((2, 3), np.uint8)}, path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data[: len(data) - cut])
    check_sound(path)


def check_sound(path: Path) -> None:
    """No exception; and without problems every view lies inside the file, apart from the others."""
    shard = ShardFile.open(path)
    size = path.stat().st_size
    ranges = sorted((e.start, e.end) for e in shard.entries.values())
    assert all(8 <= start <= end <= size for start, end in ranges)
    if not shard.problems:
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        known = {"F32", "U8", "BF16", "F8_E8M0"} & {e.dtype for e in shard.entries.values()}
        for name, found in shard.entries.items():
            if found.dtype in known - {"U8"}:
                assert shard.view(name).shape == found.shape
