"""The trained checkpoint that ships: complete, small, and as good as its card says."""

import json

from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.config import Config
from pallas_kernels.numerics import REFERENCE
from tests.conftest import ROOT

MINI = ROOT / "checkpoints" / "mini"


def test_it_loads_strictly():
    model = load_model(MINI, numerics=REFERENCE)
    assert model.cfg == Config.preset("mini") and model.draft is not None


def test_shards_are_small():
    shards = [path.stat().st_size for path in MINI.glob("*.safetensors")]
    assert max(shards) <= 12e6
    assert sum(path.stat().st_size for path in MINI.iterdir()) <= 24e6


def test_rounding_costs_little_and_a_5_gram_model_is_far_behind():
    record = json.loads((MINI / "record.json").read_text("utf-8"))
    held_out, card = record["held_out"], (MINI / "README.md").read_text("utf-8")
    assert held_out["rounded_perplexity"] <= 1.02 * held_out["plain_perplexity"]
    assert 2 * held_out["rounded_perplexity"] < held_out["ngram_perplexity"]
    for name in ("plain_perplexity", "rounded_perplexity", "ngram_perplexity"):
        assert f"{held_out[name]:.3f}" in card
