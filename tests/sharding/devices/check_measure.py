"""`python -m sharding.sweep --measure`: step times and collectives on the devices at hand."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from dsv41_jax.checkpoint.load import model_parameters
from dsv41_jax.config import Config
from pallas_kernels.numerics import SERVING
from sharding.build import build_ops
from sharding.measure import PlacedStep
from sharding.place import place
from sharding.probe import this_machine
from sharding.random_weights import random_model
from sharding.roofline import Step
from sharding.sweep import main
from tests.conftest import GOLDENS

TINY = GOLDENS / "tiny_ckpt"
STEP = ["--context", "32", "--batch", "3"]


def test_measured_columns(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    ours = ["--layouts", "tp2xdep2", "--hardware", "this", "--measure", "--json", str(path)]
    assert main(["--checkpoint", str(TINY), *STEP, *ours]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["step_us_measured"] > 100
    error = row["step_us_estimated"] / row["step_us_measured"] - 1
    assert row["estimate_error"] == pytest.approx(error)
    found = row["collectives"]
    assert set(found) == {"all-reduce", "all-gather", "reduce-scatter"}
    # Eight layers: attention and experts are reduced over tensor ranks, experts scattered back over
    # data ranks; rows, and ids with weights, are gathered.
    assert found["all-reduce"]["count"] >= 16
    assert found["reduce-scatter"]["count"] >= 8
    assert found["all-gather"]["count"] >= 16
    assert all(traffic["nbytes"] > 0 for traffic in found.values())
    shown = capsys.readouterr().out
    assert "nothing was measured" not in shown
    assert f"{row['estimate_error']:+.0%}" in shown


def test_layouts_without_devices(tmp_path, capsys):
    ours = ["--layouts", "dep16", "--devices", "16", "--set", "network_gbps=50", "--measure"]
    assert main(["--checkpoint", str(TINY), *STEP, *ours]) == 2
    error = capsys.readouterr().err
    assert error == "error: layout dep16: needs 16 devices, 8 cpu are here\n"


def test_this_machine_knows_what_it_needs():
    machine = this_machine()
    assert machine.title == "8 x cpu"
    assert machine["gpus_per_domain"] == 8
    for name in ("memory_gb", "memory_tbps", "bf16_tflops", "launch_us", "collective_us"):
        assert machine[name] > 0
    assert machine["link_gbps"] > 0
    assert machine.known("watts") is None


@pytest.mark.slow
def test_random_weights_run(tmp_path):
    """Finite, different from expert to expert, the same on ranks that hold copies."""
    cfg = Config.preset("tiny")
    placement = place("tp2xdep2", cfg)
    model = random_model(cfg, placement, numerics=SERVING)
    for path, value in model_parameters(model).items():
        for array in jax.tree.leaves(value):
            assert np.isfinite(np.asarray(array, np.float32)).all(), path
            parts = {}
            for shard in array.addressable_shards:
                bits = np.asarray(shard.data).tobytes()
                assert parts.setdefault(str(shard.index), bits) == bits, path
    experts = np.asarray(model.layers[0].ffn.experts.w1().codes)
    assert len({expert.tobytes() for expert in experts}) == cfg.n_routed_experts
    ops = build_ops(placement.division, SERVING, "reference")
    step = PlacedStep(model, ops, placement, Step("prefill", 2, 32))
    _, tokens = step.compiled()(nnx.split(model)[1], step.cache(), step.rows())
    assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < cfg.vocab_size)).all()
