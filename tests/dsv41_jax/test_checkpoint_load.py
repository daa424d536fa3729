"""Checkpoint -> Model: every parameter set, in every numerics, and one error for all faults."""

import jax
import numpy as np
import pytest
from flax import nnx

from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.load import fill_model, load_model, model_parameters
from dsv41_jax.checkpoint.orbax import released_to_orbax
from dsv41_jax.checkpoint.parameters import DTYPES, parameters
from dsv41_jax.checkpoint.read import read_parameters
from dsv41_jax.checkpoint.save import save_released
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.model import Model
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING, Numerics
from pallas_kernels.quant import Fp8Rows, Packed

TINY = Config.preset("tiny")


def assert_holds(parameters: dict, values: dict) -> None:
    assert parameters.keys() == values.keys()
    for path, value in values.items():
        left, right = parameters[path], value
        if isinstance(right, Packed):
            assert np.array_equal(np.asarray(left.scales), right.scales), path
            left, right = left.codes, right.codes
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), path


@pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE, SERVING], ids=lambda n: n.name)
def test_model_holds_what_the_checkpoint_holds(tiny_dir, numerics: Numerics):
    calls: list[tuple[int, int, str]] = []
    model = load_model(
        tiny_dir,
        numerics=numerics,
        speculation=True,
        progress=lambda done, total, path: calls.append((done, total, path)),
    )
    assert_holds(model_parameters(model), read_parameters(tiny_dir, TINY, numerics))
    assert len(model.mtp) == 3 and calls[-1][:2] == (8_374_072, 8_374_072)


def test_token_map_comes_from_the_tokenizer(tiny_dir, tmp_path):
    model = load_model(tiny_dir, numerics=REFERENCE)
    assert int(np.asarray(model.token_map[...]).max()) == 285
    for path in tiny_dir.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(UserError, match=r"tokenizer\.json: is missing"):
        load_model(tmp_path, numerics=REFERENCE)


def test_faults_of_tensors_and_tokenizer_come_together(tiny_dir, tmp_path):
    for path in tiny_dir.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        load_model(tmp_path, numerics=REFERENCE)
    assert len(caught.value.problems) == 2
    assert "tokenizer.json" in str(caught.value) and "model-00003" in str(caught.value)


@pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE], ids=lambda n: n.name)
def test_engram_tables_on_the_host_stay_mapped(tiny_dir, numerics):
    model = load_model(tiny_dir, numerics=numerics, engram="host")
    table = model_parameters(model)["layers.2.engram.embed.weight"]
    assert isinstance(table, Fp8Rows) and isinstance(table.codes.base, np.memmap)


def test_place_sees_every_parameter_but_host_tables(tiny_dir):
    placed = []

    def place(path, value):
        placed.append(path)
        return value

    model = load_model(tiny_dir, numerics=REFERENCE, engram="host", place=place)
    tables = {f"layers.{i}.engram.embed.weight" for i in (1, 2)}
    assert set(placed) == model_parameters(model).keys() - tables


def test_without_draft_tensors_there_is_no_draft(tiny_dir, tmp_path):
    values = read_parameters(tiny_dir, TINY, REFERENCE)
    text = {path: v for path, v in values.items() if not path.startswith("mtp.")}
    save_released(text, TINY, tmp_path / "c", tokenizer_file=tiny_dir / "tokenizer.json")
    model = load_model(tmp_path / "c", numerics=REFERENCE)
    assert not model.mtp and model_parameters(model).keys() == text.keys()
    with pytest.raises(UserError, match=r"mtp\.0\.attn\.wq_a\.scale: is missing"):
        load_model(tmp_path / "c", numerics=REFERENCE, speculation=True)


def test_orbax_and_saved_models_load_alike(tiny_dir, tmp_path):
    released_to_orbax(tiny_dir, tmp_path / "o")
    model = load_model(tmp_path / "o", numerics=REFERENCE, speculation=True)
    values = read_parameters(tiny_dir, TINY, REFERENCE)
    assert_holds(model_parameters(model), values)
    save_released(model_parameters(model), TINY, tmp_path / "r")
    assert_holds(read_parameters(tmp_path / "r", TINY, REFERENCE), values)


def test_a_model_with_other_parameters_is_refused(tiny_dir):
    values = read_parameters(tiny_dir, TINY, REFERENCE)
    del values["norm.weight"]
    values["extra.weight"] = values["head.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight: the model's") as caught:
        fill_model(values.items(), TINY, numerics=REFERENCE, mtp=True)
    assert "extra.weight: the model has no such parameter" in str(caught.value)


@pytest.mark.parametrize("preset", ["flash", "tiny"])
@pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE], ids=lambda n: n.name)
def test_the_model_has_exactly_the_parameters_of_the_inventory(preset, numerics):
    """At full size too, abstractly: paths, encodings, shapes and dtypes."""
    cfg = Config.preset(preset)
    abstract = nnx.eval_shape(lambda: Model(cfg, numerics=numerics, rngs=nnx.Rngs(0)))
    plan = parameters(inventory(cfg))
    state = model_parameters(abstract)
    assert state.keys() == plan.keys()
    for path, parameter in plan.items():
        value, stack = state[path], (len(parameter.weights),) if parameter.stacked else ()
        if numerics is FLOAT32:
            width = 2 if parameter.stacked else 1
            *rows, columns = parameter.spec.shape
            wanted = {((*stack, *rows, columns * width), np.dtype(np.float32))}
        else:
            assert isinstance(value, parameter.encoding or jax.ShapeDtypeStruct), path
            specs = [s for s in (parameter.spec, parameter.scale) if s]
            wanted = {((*stack, *s.shape), DTYPES[s.dtype]) for s in specs}
        assert {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)} == wanted, path
