"""Strict reading of sharded safetensors: every claim of a header is checked, data stay on disk.

The `safetensors` library writes our files but cannot read them here: its NumPy side knows neither
BF16 nor F8_E8M0, it copies instead of mapping, and it stops at the first fault without naming the
tensor. This reader maps each shard read-only and collects every fault.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from dsv41_jax.checkpoint.parameters import DTYPES
from dsv41_jax.errors import UserError, raise_problems, shorten

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HEADER_LIMIT = 100_000_000
_RANK_LIMIT = 8
_NAME_LIMIT = 256
_DIM_LIMIT = 2**63 - 1
# Item sizes of every dtype of the format: an unexpected dtype is then reported as that, no more.
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard; `start` and `end` are byte offsets into the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class ShardFile:
    """One safetensors file.

    `entries` holds what its header soundly says, `faulty` the names of unsound entries, `problems`
    what is wrong; `readable` is false when there is no header to speak of.
    """

    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    readable: bool = True

    @classmethod
    def open(cls, path: Path) -> "ShardFile":
        shard = cls(path)
        try:
            _read_header(shard)
        except OSError as error:
            shard._refuse(f"cannot be read: {error.strerror}")
        except UserError as error:
            shard._refuse(str(error))
        return shard

    def _refuse(self, reason: str) -> None:
        self.readable = False
        self.problems.append(f"{self.path.name}: {reason}")

    @cached_property
    def _bytes(self) -> np.memmap:
        return np.memmap(self.path, np.uint8, "r")

    def view(self, name: str) -> np.ndarray:
        """Read-only mapped view in the dtype of DTYPES (I8 and F8_E8M0 as uint8)."""
        entry = self.entries[name]
        return self._bytes[entry.start : entry.end].view(DTYPES[entry.dtype]).reshape(entry.shape)


class TensorFiles:
    """The tensors of a checkpoint directory: an index file and its shards, or one file.

    `problems` holds every fault of the files themselves; `damaged` the names of tensors that exist
    but cannot be read, so that nobody reports them as absent too. Raises UserError only if there
    is nothing to read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []
        self.damaged: set[str] = set()
        self._home: dict[str, ShardFile] = {}
        if not directory.is_dir():
            raise UserError(f"{directory}: is not a directory")
        if (directory / INDEX).exists():
            self._open_sharded()
        elif (directory / SINGLE).exists():
            self._add(ShardFile.open(directory / SINGLE))
        else:
            raise UserError(f"{directory}: holds neither {INDEX} nor {SINGLE}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def entry(self, name: str) -> Entry:
        return self._home[name].entries[name]

    def view(self, name: str) -> np.ndarray:
        return self._home[name].view(name)

    def _open_sharded(self) -> None:
        weight_map, total = _read_index(self.directory / INDEX)
        names = sorted(set(weight_map.values()))
        shards = {}
        for name in names:
            if (self.directory / name).is_file():
                shards[name] = ShardFile.open(self.directory / name)
                self._add(shards[name])
            else:
                self.problems.append(f"{name}: shard is missing")
        for path in sorted(self.directory.glob("*.safetensors")):
            if path.name not in shards:
                self.problems.append(f"{path.name}: shard is not named by {INDEX}")
        self.damaged |= {
            name for name, home in weight_map.items()
            if home not in shards or not shards[home].readable
        }  # fmt: skip
        self._check_assignment(weight_map)
        held = sum(e.end - e.start for s in shards.values() for e in s.entries.values())
        if total is not None and total != held and not self.problems:
            self.problems.append(f"{INDEX}: total_size = {total}, the shards hold {held}")

    def _check_assignment(self, weight_map: dict[str, str]) -> None:
        for name, home in weight_map.items():
            if name in self.damaged:
                continue
            if name not in self._home:
                self.problems.append(f"{name}: {INDEX} places it in {home}, which lacks it")
            elif (found := self._home[name].path.name) != home:
                self.problems.append(f"{name}: {INDEX} places it in {home}, it is in {found}")
        for name in self._home:
            if name not in weight_map:
                self.problems.append(f"{name}: is in {self._home[name].path.name}, not in {INDEX}")

    def _add(self, shard: ShardFile) -> None:
        self.problems += shard.problems
        self.damaged |= shard.faulty
        for name in shard.entries:
            if name in self._home:
                first = self._home[name].path.name
                self.problems.append(f"{name}: is both in {first} and in {shard.path.name}")
            self._home[name] = shard


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    try:
        document = _parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path}: weight_map must be an object of tensor name -> file name")
    wrong = [
        f"weight_map[{shorten(name)}] = {shorten(home)}: must be a file name ending in .safetensors"
        for name, home in weight_map.items()
        if not _is_shard_name(home)
    ]
    metadata = document.get("metadata", {})
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not (total is None or _is_count(total)):
        wrong.append(f"metadata = {shorten(metadata)}: total_size must be an integer")
    if wrong:
        raise_problems(str(path), wrong)
    return weight_map, total


def _is_shard_name(home: Any) -> bool:
    return isinstance(home, str) and home.endswith(".safetensors") and Path(home).name == home


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _DIM_LIMIT


def _parse_object(data: bytes, subject: str) -> dict[str, Any]:
    """A JSON object without repeated keys; UserError otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"key {shorten(twice)} stands twice")
        return found

    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{subject} is not JSON in UTF-8: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{subject} must be a JSON object")
    return document


def _read_header(shard: ShardFile) -> None:
    size = shard.path.stat().st_size
    with shard.path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise UserError(f"truncated: {size} bytes, shorter than the header length field")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_HEADER_LIMIT, size - 8):
            raise UserError(
                f"truncated or damaged: header length {length} must be at most "
                f"{min(_HEADER_LIMIT, size - 8)}"
            )
        header = _parse_object(file.read(length), "header")
    header.pop("__metadata__", None)
    base = 8 + length
    for name, raw in header.items():
        fault = _name_fault(name) or _entry_fault(raw, size - base)
        if fault:
            shard.faulty.add(name)
            shard.problems.append(f"{name[:_NAME_LIMIT]}: {fault} (in {shard.path.name})")
        else:
            start, end = (base + offset for offset in raw["data_offsets"])
            shard.entries[name] = Entry(raw["dtype"], tuple(raw["shape"]), start, end)
    if not shard.faulty:
        _check_layout(shard, base, size)


def _name_fault(name: str) -> str | None:
    fine = 0 < len(name) <= _NAME_LIMIT and name.isprintable()
    return None if fine else f"tensor name must be 1 to {_NAME_LIMIT} printable characters"


def _entry_fault(raw: Any, data_bytes: int) -> str | None:
    """Why a header entry cannot be trusted, or None."""
    if not isinstance(raw, dict) or not raw.keys() >= {"dtype", "shape", "data_offsets"}:
        return "header entry must hold dtype, shape and data_offsets"
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        return f"dtype = {shorten(dtype)}: must be a safetensors dtype"
    if not isinstance(shape, list) or len(shape) > _RANK_LIMIT or not all(map(_is_count, shape)):
        return f"shape = {shorten(shape)}: must be at most {_RANK_LIMIT} sizes below 2^63"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        return f"data_offsets = {shorten(offsets)}: must be two offsets below 2^63"
    start, end = offsets
    if start > end:
        return f"data_offsets = {offsets}: must not decrease"
    if end > data_bytes:
        return f"data_offsets = {offsets}: file is truncated, its data end at {data_bytes}"
    needed = prod(shape) * _ITEM_BYTES[dtype]
    if end - start != needed:
        return f"{dtype} {shape} needs {needed} bytes, data_offsets = {offsets} give {end - start}"
    return None


def _check_layout(shard: ShardFile, base: int, size: int) -> None:
    """Ranges must follow one another without overlap or gap up to the end of the file."""
    position, before = base, "the header"
    for name, entry in sorted(shard.entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            kind = "overlaps" if entry.start < position else "leaves a gap after"
            shard.problems.append(f"{name}: byte range {kind} {before} (in {shard.path.name})")
        position, before = max(position, entry.end), name
    if position != size:
        shard.problems.append(f"{shard.path.name}: {size - position} bytes after the last tensor")
