"""Writing: bytes survive the released format and Orbax; nothing is left half-written."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from dsv41_jax.checkpoint import new_directory as new_directory_module
from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.new_directory import new_directory
from dsv41_jax.checkpoint.orbax import (
    OrbaxCheckpoint,
    is_orbax,
    orbax_to_released,
    read_orbax,
    released_to_orbax,
)
from dsv41_jax.checkpoint.random_model import RandomModel
from dsv41_jax.checkpoint.read import read_parameters
from dsv41_jax.checkpoint.safetensors_files import INDEX, TensorFiles
from dsv41_jax.checkpoint.save import save_released
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32, REFERENCE
from pallas_kernels.quant import Packed

TINY = Config.preset("tiny")


@pytest.fixture(scope="module")
def golden() -> dict:
    directory = Path(__file__).parents[1] / "goldens" / "tiny_ckpt"
    return read_parameters(directory, TINY, REFERENCE)


@pytest.fixture(scope="module")
def orbax_dir(tmp_path_factory) -> Path:
    directory = Path(__file__).parents[1] / "goldens" / "tiny_ckpt"
    target = tmp_path_factory.mktemp("orbax") / "o"
    released_to_orbax(directory, target)
    return target


def assert_same_tensors(a: Path, b: Path) -> None:
    first, second = TensorFiles(a), TensorFiles(b)
    assert first.problems == second.problems == [] and set(first) == set(second)
    for name in first:
        left, right = first.entry(name), second.entry(name)
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert first.view(name).tobytes() == second.view(name).tobytes(), name


def assert_same_values(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for path in a:
        assert type(a[path]) is type(b[path])
        for left, right in zip(jax.tree.leaves(a[path]), jax.tree.leaves(b[path]), strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), path


@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 500_000, 1])
def test_released_round_trip_is_bit_exact(tmp_path, tiny_dir, golden, shard_bytes):
    target = tmp_path / "out"
    save_released(
        golden,
        TINY,
        target,
        tokenizer_file=tiny_dir / "tokenizer.json",
        shard_bytes=shard_bytes,
    )
    assert_same_tensors(tiny_dir, target)
    assert_same_values(golden, read_parameters(target, TINY, REFERENCE))
    assert Config.from_json(target / "config.json") == TINY
    assert (target / "tokenizer.json").read_bytes() == (tiny_dir / "tokenizer.json").read_bytes()
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == 8_374_072 and len(index["weight_map"]) == 826
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    assert len(sizes) == {5 * 10**9: 1, 500_000: len(sizes), 1: 826}[shard_bytes]
    assert all(size < max(shard_bytes, 600_000) + 100_000 for size in sizes)


def test_text_model_without_draft_is_written_and_read(tmp_path, golden):
    text = {path: v for path, v in golden.items() if not path.startswith("mtp.")}
    save_released(text, TINY, tmp_path / "out")
    assert_same_values(text, read_parameters(tmp_path / "out", TINY, REFERENCE))


def test_device_arrays_are_written_too(tmp_path, golden, tiny_dir):
    save_released(jax.tree.map(jax.numpy.asarray, golden), TINY, tmp_path / "out")
    assert_same_tensors(tiny_dir, tmp_path / "out")


def test_wrong_parameters_are_refused_and_nothing_is_written(tmp_path, golden, tiny_dir):
    fewer = {path: v for path, v in golden.items() if path != "layers.3.attn.wkv.weight"}
    with pytest.raises(ValueError, match=r"layers\.3\.attn\.wkv\.weight"):
        save_released(fewer, TINY, tmp_path / "out")
    plain = read_parameters(tiny_dir, TINY, FLOAT32)
    with pytest.raises(ValueError, match=r"released encoding\), is float32"):
        save_released(plain, TINY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_output_must_be_new_and_writable(tmp_path, golden):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name, words in (
        ("full", "not empty"),
        ("file", "is a file"),
        ("file/x", "cannot be written"),
        ("absent/x", "cannot be written"),
    ):
        with pytest.raises(UserError, match=words):
            save_released(golden, TINY, tmp_path / name)
    assert (tmp_path / "full" / "x").read_text() == (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    save_released(golden, TINY, tmp_path / "empty")
    assert (tmp_path / "empty" / INDEX).is_file()


def test_a_failure_midway_leaves_nothing(tmp_path, golden, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_directory_module.os, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        save_released(golden, TINY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "out") as work:
        (work / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_written_files_have_the_usual_modes(tmp_path, golden):
    mask = os.umask(0o022)
    try:
        save_released(golden, TINY, tmp_path / "out")
    finally:
        os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o644}


def test_orbax_round_trip_is_bit_exact(tmp_path, tiny_dir, golden, orbax_dir):
    assert is_orbax(orbax_dir) and not is_orbax(tiny_dir)
    assert_same_values(golden, read_orbax(orbax_dir))
    orbax_to_released(orbax_dir, tmp_path / "back")
    assert_same_tensors(tiny_dir, tmp_path / "back")
    for name in ("config.json", "tokenizer.json"):
        assert (orbax_dir / name).read_bytes() == (tiny_dir / name).read_bytes()
    assert Config.from_json(tmp_path / "back" / "config.json") == TINY
    assert (tmp_path / "back" / "tokenizer.json").is_file()


def test_orbax_streams_like_a_released_checkpoint(tiny_dir, orbax_dir):
    plain = read_parameters(tiny_dir, TINY, FLOAT32)
    checkpoint = OrbaxCheckpoint(orbax_dir, TINY, speculation=True)
    assert checkpoint.has_draft
    assert_same_values(plain, dict(checkpoint.stream(FLOAT32)))
    host = dict(OrbaxCheckpoint(orbax_dir, TINY).stream(FLOAT32, engram="host"))
    assert isinstance(host["layers.1.engram.embed.weight"], Packed)


def test_orbax_of_another_config_names_what_differs(tmp_path, orbax_dir):
    target = tmp_path / "o"
    target.mkdir()
    (target / "params").symlink_to(orbax_dir / "params")
    document = json.loads((orbax_dir / "config.json").read_text())
    document["text_config"]["vocab_size"] = 544
    document["text_config"]["index_source_layer_ids"] = [2, 4, 6, 7]
    (target / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError) as caught:
        read_orbax(target)
    found = caught.value.problems
    assert "embed.weight: holds bfloat16[512, 256], must be bfloat16[544, 256]" in found
    assert "layers.7.attn.indexer.wq_b.weight: is missing" in found


def test_damaged_orbax_is_a_user_error(tmp_path, orbax_dir):
    target = tmp_path / "o"
    (target / "params").mkdir(parents=True)
    (target / "params" / "_METADATA").write_text("{")
    (target / "config.json").write_bytes((orbax_dir / "config.json").read_bytes())
    assert is_orbax(target)
    with pytest.raises(UserError, match="params"):
        read_orbax(target)


def test_random_model_is_seeded_by_name_and_complete():
    first, again, other = (RandomModel(TINY, seed) for seed in (0, 0, 1))
    path = "layers.1.ffn.experts.w1.weight"
    assert first[path].codes.tobytes() == again[path].codes.tobytes()
    assert first[path].codes.tobytes() != other[path].codes.tobytes()
    assert first[path].codes[0].tobytes() != first[path].codes[1].tobytes()
    assert first["layers.0.attn.wkv.weight"].codes.tobytes() != (
        first["layers.1.attn.wkv.weight"].codes.tobytes()
    )
    assert len(first) == len({*first}) and len(first[path].scales.reshape(-1)) == 8 * 64 * 8
    assert np.unique(first[path].scales).size == 3


def test_random_model_has_plausible_scales():
    model = RandomModel(TINY, 3)
    deviations = {
        "layers.0.attn.wq_a.weight": 256**-0.5,
        "layers.2.ffn.experts.w2.weight": 0.25 * 64**-0.5,
        "layers.1.engram.embed.weight": 1.0,
        "mtp.0.main_proj.weight": 768**-0.5,
    }
    for path, deviation in deviations.items():
        assert 0.6 < float(np.asarray(model[path].dequantize()).std()) / deviation < 2.0, path
    norm = model["layers.0.attn_norm.weight"].astype(np.float32)
    assert abs(norm.mean() - 1) < 0.1 and 0.1 < norm.std() < 0.3


def test_random_checkpoint_loads_without_a_bad_value(tmp_path):
    save_released(RandomModel(TINY, 7), TINY, tmp_path / "r")
    values = read_parameters(tmp_path / "r", TINY, REFERENCE, speculation=True)
    assert sum(v.nbytes for v in values.values()) == sum(s.nbytes for s in inventory(TINY).values())
