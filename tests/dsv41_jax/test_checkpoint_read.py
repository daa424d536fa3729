"""Reading parameters: values as the encodings say, and every kind of bad checkpoint refused."""

import json
import logging
import os
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsv41_jax.checkpoint.inventory import inventory, vision_inventory
from dsv41_jax.checkpoint.parameters import DTYPES
from dsv41_jax.checkpoint.read import ReleasedCheckpoint, read_parameters
from dsv41_jax.checkpoint.safetensors_files import INDEX, TensorFiles
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32, REFERENCE
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, Fp8Rows, Packed

TINY = Config.preset("tiny")
Tensors = dict[str, tuple[str, list[int], bytes]]


@pytest.fixture
def copy(tmp_path, tiny_dir) -> Path:
    """The golden checkpoint as links; `edit` replaces the shards it changes."""
    target = tmp_path / "ckpt"
    target.mkdir()
    for path in tiny_dir.iterdir():
        (target / path.name).symlink_to(path)
    return target


def edit(directory: Path, shard: int, change: Callable[[Tensors], None]) -> None:
    """Rewrite one shard and the index after `change` of its name -> (dtype, shape, bytes)."""
    path = directory / f"model-{shard:05d}-of-00003.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    tensors = {
        name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
        for name, e in header.items()
    }
    before = set(tensors)
    change(tensors)
    header, body = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += content
    packed = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + body)
    index = json.loads((directory / INDEX).read_text())
    for name in before - set(tensors):
        del index["weight_map"][name]
    index["weight_map"] |= {name: path.name for name in set(tensors) - before}
    index["metadata"].pop("total_size", None)
    (directory / INDEX).unlink()
    (directory / INDEX).write_text(json.dumps(index))


def shard_of(name: str, directory: Path) -> int:
    index = json.loads((directory / INDEX).read_text())
    return int(index["weight_map"][name].split("-")[1])


def drop(directory: Path, *names: str) -> None:
    for name in names:
        edit(directory, shard_of(name, directory), lambda tensors, n=name: tensors.pop(n))


def replace(directory: Path, name: str, change: Callable) -> None:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(*tensors[name])

    edit(directory, shard_of(name, directory), apply)


def poison(directory: Path, name: str, offset: int, content: bytes) -> None:
    replace(
        directory,
        name,
        lambda dtype, shape, old: (
            dtype,
            shape,
            old[:offset] + content + old[offset + len(content) :],
        ),
    )


def problems(directory: Path, numerics=REFERENCE, **options) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        read_parameters(directory, TINY, numerics, **options)
    return caught.value.problems


def test_packed_parameters_hold_the_stored_bytes(tiny_dir):
    values = read_parameters(tiny_dir, TINY, REFERENCE)
    files = TensorFiles(tiny_dir)
    kinds = {type(v) for v in values.values()}
    assert kinds == {np.ndarray, Fp8Blocks, Fp8Rows, Fp4Rows}
    experts = values["layers.3.ffn.experts.w2.weight"]
    assert experts.shape == (8, 256, 64) and experts.codes.shape == (8, 256, 32)
    for e in range(8):
        name = f"layers.3.ffn.experts.{e}.w2"
        assert np.array_equal(experts.codes[e], files.view(f"{name}.weight"))
        assert np.array_equal(experts.scales[e], files.view(f"{name}.scale"))
    dense = values["layers.0.attn.wq_a.weight"]
    assert dense.codes.tobytes() == files.view("layers.0.attn.wq_a.weight").tobytes()
    assert values["head.weight"].dtype == DTYPES["BF16"]
    assert values["layers.0.hc_attn_fn"].dtype == np.float32


def test_float32_is_the_dequantised_packed_value(tiny_dir):
    packed = read_parameters(tiny_dir, TINY, REFERENCE)
    plain = read_parameters(tiny_dir, TINY, FLOAT32)
    assert packed.keys() == plain.keys()
    for path, value in packed.items():
        assert plain[path].dtype == np.float32
        wanted = value.dequantize() if isinstance(value, Packed) else value.astype(np.float32)
        assert np.array_equal(plain[path], np.asarray(wanted)), path


def test_every_tensor_is_fetched_exactly_once(tiny_dir, monkeypatch):
    fetched = []
    view = TensorFiles.view
    monkeypatch.setattr(TensorFiles, "view", lambda self, n: (fetched.append(n), view(self, n))[1])
    read_parameters(tiny_dir, TINY, REFERENCE)
    assert sorted(fetched) == sorted(inventory(TINY))


def test_progress_counts_every_byte(tiny_dir):
    calls = []
    read_parameters(tiny_dir, TINY, REFERENCE, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and calls[-1][0] == calls[-1][1] == 8_374_072


def test_host_engram_tables_stay_mapped_and_packed(tiny_dir):
    values = read_parameters(tiny_dir, TINY, FLOAT32, engram="host")
    table = values["layers.1.engram.embed.weight"]
    assert isinstance(table, Fp8Rows) and isinstance(table.codes.base, np.memmap)
    assert not table.codes.flags.owndata and not table.codes.flags.writeable
    assert values["layers.1.engram.wkv.weight"].dtype == np.float32
    with pytest.raises(ValueError, match="engram="):
        read_parameters(tiny_dir, TINY, FLOAT32, engram="disk")


def test_at_most_about_one_parameter_is_in_memory(tiny_dir):
    """A consumer that forgets each parameter never sees much more than the largest one held."""
    checkpoint = ReleasedCheckpoint(tiny_dir, TINY)
    largest = max(p.nbytes for p in checkpoint.parameters.values())
    assert sum(p.nbytes for p in checkpoint.parameters.values()) > 8 * largest
    tracemalloc.start()
    try:
        for _, value in checkpoint.stream(REFERENCE):
            del value
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * largest


def test_truncated_and_missing_shards(copy):
    path = copy / "model-00001-of-00003.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1000])
    os.unlink(copy / "model-00002-of-00003.safetensors")
    found = problems(copy)
    assert "model-00002-of-00003.safetensors: shard is missing" in found
    assert any("truncated" in p and "model-00001" in p for p in found)
    assert not any(p.endswith("is missing") and p.startswith("layers.") for p in found)


def test_wrong_shape_wrong_dtype_unknown_and_missing_come_together(copy):
    replace(copy, "layers.0.attn.wq_a.weight", lambda d, s, b: (d, s[::-1], b))
    replace(copy, "layers.0.ffn.gate.bias", lambda d, s, b: ("I32", s, b))
    drop(copy, "layers.4.attn.wkv.scale", "layers.2.engram.embed.weight", "norm.weight")
    edit(copy, 1, lambda t: t.update({"layers.0.hc_head_fn": ("F32", [1], bytes(4))}))
    assert set(problems(copy)) == {
        "layers.0.attn.wq_a.weight: shape [256, 64] must be [64, 256]",
        "layers.0.ffn.gate.bias: dtype I32 must be F32",
        "layers.4.attn.wkv.scale: is missing",
        "layers.2.engram.embed.weight: is missing",
        "norm.weight: is missing",
        "layers.0.hc_head_fn: unknown tensor",
    }


def test_experts_of_another_variant_are_refused_by_stored_dtype(copy):
    name = "layers.0.ffn.experts.3.w1.weight"
    replace(copy, name, lambda d, s, b: ("F8_E4M3", [64, 256], b * 2))
    found = problems(copy)
    assert f"{name}: dtype F8_E4M3 must be I8" in found and len(found) == 2


def test_absent_engram_table(copy):
    names = [f"layers.1.engram.embed.{kind}" for kind in ("weight", "scale")]
    drop(copy, *names)
    assert set(problems(copy)) == {f"{name}: is missing" for name in names}


@pytest.mark.parametrize("numerics", [REFERENCE, FLOAT32])
def test_bad_values_are_all_named(copy, numerics):
    poison(copy, "layers.0.attn.wq_a.scale", 9, b"\xff")
    poison(copy, "layers.0.ffn.experts.5.w2.scale", 0, b"\xff")
    poison(copy, "layers.1.attn.wq_b.weight", 64, b"\x7f")
    poison(copy, "layers.1.engram.embed.weight", 3, b"\xff")
    poison(copy, "head.weight", 0, b"\xc0\x7f")
    poison(copy, "layers.0.attn.attn_sink", 4, struct.pack("<f", float("inf")))
    assert set(problems(copy, numerics)) == {
        "layers.0.attn.wq_a.scale: holds UE8M0 byte 255 (NaN) at [1, 1]",
        "layers.0.ffn.experts.5.w2.scale: holds UE8M0 byte 255 (NaN) at [0, 0]",
        "layers.1.attn.wq_b.weight: holds a NaN code at [1, 0]",
        "layers.1.engram.embed.weight: holds a NaN code at [0, 3]",
        "head.weight: holds a value that is not finite at [0, 0]",
        "layers.0.attn.attn_sink: holds a value that is not finite at [1]",
    }


def test_vision_tensors_are_checked_and_skipped_with_one_line(copy, caplog):
    specs = vision_inventory(TINY)

    def add(tensors: Tensors) -> None:
        for name, spec in specs.items():
            tensors[name] = (spec.dtype, list(spec.shape), bytes(spec.nbytes))

    edit(copy, 1, add)
    with caplog.at_level(logging.INFO, "dsv41_jax.checkpoint"):
        values = read_parameters(copy, TINY, REFERENCE)
    assert len(caplog.messages) == 1 and f"skipped {len(specs)} vision" in caplog.messages[0]
    assert not any(path.startswith(("vision", "aligner", "image")) for path in values)
    replace(copy, "aligner.w2.bias", lambda d, s, b: (d, [s[0] // 2], b[: len(b) // 2]))
    replace(copy, "image_start", lambda d, s, b: ("F16", s, b))
    edit(copy, 1, lambda t: t.update({"vision.extra": ("BF16", [1], bytes(2))}))
    assert set(problems(copy)) == {
        "aligner.w2.bias: shape [128] must be [256]",
        "image_start: dtype F16 must be BF16",
        "vision.extra: unknown tensor",
    }


def test_incomplete_draft_is_one_line_or_an_error(copy, caplog):
    drop(copy, "mtp.1.ffn.shared_experts.w2.weight", "mtp.0.main_norm.weight")
    with caplog.at_level(logging.INFO, "dsv41_jax.checkpoint"):
        values = read_parameters(copy, TINY, REFERENCE)
    assert not any(path.startswith("mtp.") for path in values) and "norm.weight" in values
    assert len(caplog.messages) == 1 and "2 mtp tensors absent" in caplog.messages[0]
    assert set(problems(copy, speculation=True)) == {
        "mtp.1.ffn.shared_experts.w2.weight: is missing",
        "mtp.0.main_norm.weight: is missing",
    }


def test_absent_draft_is_one_line_or_an_error(copy, caplog):
    mtp = [name for name in inventory(TINY) if name.startswith("mtp.")]
    for shard in (1, 2, 3):
        edit(copy, shard, lambda t: [t.pop(name) for name in list(t) if name in mtp])
    with caplog.at_level(logging.INFO, "dsv41_jax.checkpoint"):
        read_parameters(copy, TINY, REFERENCE)
    assert caplog.messages == [f"no draft model: all {len(mtp)} mtp tensors absent"]
    assert set(problems(copy, speculation=True)) == {f"{name}: is missing" for name in mtp}


def test_wrong_shape_of_a_draft_tensor_is_always_an_error(copy):
    replace(copy, "mtp.0.main_norm.weight", lambda d, s, b: (d, [s[0] // 2], b[: len(b) // 2]))
    assert problems(copy) == ("mtp.0.main_norm.weight: shape [128] must be [256]",)


def test_a_checkpoint_of_another_config_names_what_differs(tmp_path, tiny_dir):
    shutil.copytree(tiny_dir, tmp_path / "c", symlinks=True)
    with pytest.raises(UserError, match="problems") as caught:
        read_parameters(tmp_path / "c", Config.preset("flash"), REFERENCE)
    assert "embed.weight: shape [512, 256] must be [129280, 5120]" in caught.value.problems
