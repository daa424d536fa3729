"""Parameters on a mesh: each device holds its part of the stored bytes, and read no others."""

import shutil
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dsv41_jax.cache import new_cache
from dsv41_jax.checkpoint.load import load_model, model_parameters
from dsv41_jax.checkpoint.orbax import released_to_orbax
from dsv41_jax.checkpoint.safetensors_files import ShardFile, TensorFiles
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32, REFERENCE
from sharding import parts
from sharding.estimate import ShardedModel
from sharding.layouts import layout
from sharding.place import load_placed, place
from tests.conftest import GOLDENS
from tests.sharding.devices.support import SHAPE

TINY = GOLDENS / "tiny_ckpt"
CFG = Config.from_json(TINY / "config.json")
NIGHTLY = "tp2", "dep8", "tp4xdp2"
LAYOUTS = (
    "tp8",
    "tp2xdep4",
    *(pytest.param(name, marks=pytest.mark.slow) for name in NIGHTLY),
)


def cases(*default):
    """Numerics and layouts; all but the default ones are slow."""
    every = [(n, name) for n in (REFERENCE, FLOAT32) for name in ("tp8", "tp2xdep4", *NIGHTLY)]
    marks = {True: (), False: pytest.mark.slow}
    made = [
        pytest.param(*case, marks=marks[case in default], id=f"{case[0].name}-{case[1]}")
        for case in every
    ]
    return pytest.mark.parametrize(("numerics", "name"), made)


@cache
def whole(numerics):
    return model_parameters(load_model(TINY, numerics=numerics))


@cache
def placed(numerics, name):
    return load_placed(TINY, place(name, CFG), numerics=numerics)


@pytest.fixture(scope="module")
def orbax_dir(tmp_path_factory):
    target = tmp_path_factory.mktemp("orbax") / "tiny"
    released_to_orbax(TINY, target)
    return target


def assert_equal_parts(got, want, placement):
    """The bits of every parameter, zeros in the padding, and each array where it belongs."""
    assert got.keys() == want.keys()
    for path, value in want.items():
        for mine, theirs in zip(jax.tree.leaves(got[path]), jax.tree.leaves(value), strict=True):
            assert mine.sharding.is_equivalent_to(placement.sharding(path), mine.ndim), path
            bits, stored = np.asarray(mine).view(np.uint8), np.asarray(theirs).view(np.uint8)
            inside = tuple(slice(0, n) for n in stored.shape)
            np.testing.assert_array_equal(bits[inside], stored, err_msg=path)
            bits = bits.copy()
            bits[inside] = 0
            assert not bits.any(), path


@cases((REFERENCE, "tp8"), (REFERENCE, "tp2xdep4"), (FLOAT32, "tp2xdep4"))
def test_released_checkpoint(numerics, name):
    model = placed(numerics, name)
    assert_equal_parts(model_parameters(model), whole(numerics), place(name, CFG))
    assert model.token_map.get_value().sharding.is_fully_replicated


@cases((REFERENCE, "tp2xdep4"))
def test_orbax_checkpoint(orbax_dir, numerics, name):
    placement = place(name, CFG)
    model = load_placed(orbax_dir, placement, numerics=numerics)
    assert_equal_parts(model_parameters(model), whole(numerics), placement)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_every_device_are_those_of_the_estimate(name):
    held = dict.fromkeys(place(name, CFG).mesh.devices.flat, 0)
    for array in jax.tree.leaves(list(model_parameters(placed(REFERENCE, name)).values())):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    want = ShardedModel(CFG, layout(name)).bytes_by_kind.loaded
    assert set(held.values()) == {want}


def test_a_part_is_read_once(monkeypatch):
    """Split tensors are read once in all, whatever the number of devices."""
    viewed: dict[str, int] = {}

    class Counted(np.ndarray):
        def __getitem__(self, index):
            part = super().__getitem__(index)
            if isinstance(index, tuple):
                viewed[self.name] = viewed.get(self.name, 0) + part.nbytes
            return part.view(np.ndarray)

    view = ShardFile.view

    def counted(self, name):
        array = view(self, name).view(Counted)
        array.name = name
        return array

    monkeypatch.setattr(ShardFile, "view", counted)
    load_placed(TINY, place("tp2xdep4", CFG), numerics=REFERENCE)
    files = TensorFiles(TINY)
    sizes = {name: view(files._home[name], name) for name in files}
    assert viewed.keys() == sizes.keys()
    assert {name for name, n in viewed.items() if n != sizes[name].nbytes} == set()


def test_a_process_reads_its_own_parts_alone(monkeypatch):
    """A device of tp8 takes an eighth of the heads: nothing else of the tensor is touched."""
    placement = place("tp8", CFG)
    read = []
    copy = parts.StoredParameter._copy

    def noted(self, weight, plane, ranges, part):
        read.append((weight, plane, ranges))
        copy(self, weight, plane, ranges, part)

    monkeypatch.setattr(parts.StoredParameter, "_copy", noted)
    load_placed(TINY, placement, numerics=REFERENCE)
    name = "layers.0.attn.wq_b.weight"
    mine = [ranges[0] for weight, plane, ranges in read if weight == name and not plane]
    assert sorted((r.start, r.stop) for r in mine) == [(64 * i, 64 * i + 64) for i in range(8)]


def test_orbax_checkpoint_of_another_layout(tmp_path):
    """Saved from the devices of tp2, restored into data ranks with padded tables."""
    saved = model_parameters(load_placed(TINY, place("tp2", CFG), numerics=REFERENCE))
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(tmp_path / "params", saved)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(TINY / name, tmp_path / name)
    placement = place("tp2xdep4", CFG)
    got = model_parameters(load_placed(tmp_path, placement, numerics=REFERENCE))
    assert_equal_parts(got, saved, placement)


def test_the_placement_of_another_model_is_refused():
    other = place("tp2", replace(CFG, moe_intermediate_size=128, index_topk=16))
    with pytest.raises(UserError) as caught:
        load_placed(TINY, other, numerics=REFERENCE)
    assert "moe_intermediate_size = 64: layout tp2 was made for 128" in str(caught.value)
    assert "index_topk = 8: layout tp2 was made for 16" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tp3", "layout 'tp3': must be one of"),
        ("dep16", "layout dep16: needs 16 devices, 8 cpu are here"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_at_once(name, says):
    with pytest.raises(UserError, match=says):
        place(name, CFG)


def test_a_damaged_checkpoint_is_named_with_the_place(tmp_path):
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "layers.0.attn.wq_b.weight"
    home = TensorFiles(tmp_path)._home[name]
    start = home.entries[name].start
    data = bytearray(home.path.read_bytes())
    data[start + 65 * 64 + 3] = 0x7F  # row 65, column 3: a NaN code
    home.path.write_bytes(bytes(data))
    with pytest.raises(UserError, match=r"wq_b\.weight: holds a NaN code at \[65, 3\]"):
        load_placed(tmp_path, place("tp8", CFG), numerics=REFERENCE)


def test_cache_leaves_are_led_by_slots_or_pages():
    """What ``BY_RANK`` relies on."""
    cache = jax.eval_shape(lambda: new_cache(CFG, REFERENCE, SHAPE, drafts=True, counts=True))
    pools = jax.tree.leaves(cache.pools)
    assert {leaf.shape[0] for leaf in pools} == {SHAPE.pages}
    others = [leaf for leaf in jax.tree.leaves(cache) if not any(leaf is pool for pool in pools)]
    assert {leaf.shape[0] for leaf in others} == {SHAPE.slots}
