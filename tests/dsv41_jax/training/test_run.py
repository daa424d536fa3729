"""A small model learns a toy text, resumes exactly, and leaves as a released checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from dsv41_jax.checkpoint.load import load_model, model_parameters
from dsv41_jax.checkpoint.parameters import dequantise
from dsv41_jax.errors import UserError
from dsv41_jax.training.export import export
from dsv41_jax.training.rounding import rounded_weights
from dsv41_jax.training.run import Run
from pallas_kernels.numerics import REFERENCE
from tests.dsv41_jax.training.support import BACKEND, ONE, new_run


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    run = new_run(tmp_path_factory.mktemp("whole"))
    assert run.train()
    return run


def sharing(run: Run, trained: Run) -> Run:
    """A run of the same config needs no program of its own."""
    run._step = trained._step
    return run


def test_every_loss_falls(trained):
    log = trained.record["log"]
    assert [line["step"] for line in log] == [1, 20, 30]
    assert log[-1]["token"] < 0.4 * log[0]["token"]
    assert log[-1]["draft"] < 0.8 * log[0]["draft"]
    assert log[-1]["index"] < log[0]["index"]
    assert log[-1]["confidence"] < log[0]["confidence"]


def test_a_killed_run_resumes_bit_for_bit(trained, tmp_path):
    """Killed two steps behind a checkpoint; a new process has the directory and nothing else."""

    def kill(step: int) -> bool:
        if step == 14:
            raise Killed
        return False

    first = sharing(new_run(tmp_path), trained)
    with pytest.raises(Killed):
        first.train(stop=kill)
    first.close()
    second = sharing(new_run(tmp_path), trained)
    second.resume()
    assert int(second.state.step) == 12
    assert second.train()
    for path, leaf in jax.tree.leaves_with_path(trained.state):
        got = dict(jax.tree.leaves_with_path(second.state))[path]
        assert np.asarray(got).tobytes() == np.asarray(leaf).tobytes(), jax.tree_util.keystr(path)
    assert second.record["log"] == trained.record["log"]


def test_a_run_of_another_seed_is_not_resumed(trained):
    other = new_run(trained.out, seed=1)
    with pytest.raises(UserError, match="seed: the run has 0, not 1"):
        other.resume()


def test_an_empty_directory_holds_nothing_to_resume(tmp_path):
    with pytest.raises(UserError, match="holds no state"):
        new_run(tmp_path).resume()


def test_the_export_loads_strictly(trained, tmp_path):
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    export(trained.state.values, ONE, tmp_path / "out", tmp_path / "tokenizer.json")
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert shards and all(shard.stat().st_size <= 12_000_000 for shard in shards)
    model = load_model(tmp_path / "out", numerics=REFERENCE, speculation=True)
    loaded = model_parameters(model)
    assert loaded.keys() == trained.state.values.keys()
    kinds = (
        "layers.0.attn.wq_a.weight", "layers.0.ffn.experts.w1.weight",
        "layers.0.engram.embed.weight", "layers.0.ffn.gate.weight", "mtp.0.hc_attn_fn",
    )  # fmt: skip
    some = {path: trained.state.values[path] for path in kinds}
    stored = compiling.jit(lambda some: rounded_weights(ONE, some, jnp.asarray(True)))(some)
    for path in kinds:
        want = np.asarray(getattr(stored[path], "values", stored[path]))
        np.testing.assert_array_equal(dequantise(loaded[path]), want, err_msg=path)


def test_parameters_are_those_of_the_config(trained, tmp_path):
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    values = {**trained.state.values}
    del values["norm.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight"):
        export(values, ONE, tmp_path / "out", tmp_path / "tokenizer.json")
    values["norm.weight"] = jnp.ones(ONE.hidden_size)
    with pytest.raises(ValueError, match="unknown"):
        export({**values, "unknown": jnp.ones(1)}, ONE, tmp_path / "o", tmp_path / "tokenizer.json")
