"""Numerics ``float32`` against the reference's float32 run: prefill, decode and drafts of every
prompt, and the values between the layers.
"""

import numpy as np
import pytest

from tests.compare import assert_abs
from tests.dsv41_jax.decoding import STEPS, kept, run
from tests.dsv41_jax.tracing import trace
from tests.tolerances import FP32_BLOCK_ABS, FP32_LOGITS_ABS

FILE = "e2e_fp32.npz"
PROMPTS = pytest.mark.parametrize("prompt", ["p5", "p37", "p96"])
LAYERS = range(8)
SELECTING = (2, 4, 6)


@PROMPTS
def test_prefill(goldens, prompt):
    g, got = goldens(FILE), run("float32", FILE, prompt)
    assert_abs(kept(g, prompt, got.prefill), g[f"{prompt}.prefill_logits"], FP32_LOGITS_ABS)
    assert got.prefill[-1].argmax() == g[f"{prompt}.decode_tokens"][0]


@PROMPTS
def test_decode(goldens, prompt):
    g, got = goldens(FILE), run("float32", FILE, prompt)
    assert_abs(got.decode, g[f"{prompt}.decode_logits"], FP32_LOGITS_ABS)
    assert np.array_equal(got.decode.argmax(-1), g[f"{prompt}.decode_tokens"][1:])


@PROMPTS
def test_drafts(goldens, prompt):
    g, got = goldens(FILE), run("float32", FILE, prompt)
    drafts = g[f"{prompt}.draft_ids"]
    assert np.array_equal(drafts[:, 0], g[f"{prompt}.decode_tokens"][1:])
    assert np.array_equal(got.drafted, drafts[:, 1:])
    assert_abs(got.confidence, g[f"{prompt}.draft_conf"], FP32_LOGITS_ABS)
    assert_abs(got.draft_logits, g[f"{prompt}.draft_logits_first"][0], FP32_LOGITS_ABS)


@pytest.mark.parametrize("prompt", ["p37", "p96"])
def test_the_upstream_defect_is_not_copied(goldens, prompt):
    """ARCHITECTURE 6.6: scoring stale keys at even positions moves the logits by 2 and more."""
    g, got = goldens(FILE), run("float32", FILE, prompt)
    stale = np.abs(got.decode - g[f"{prompt}.decode_logits_upstream_stale"]).max(-1)
    assert stale.shape == (STEPS,) and stale.max() > 1


@pytest.fixture(scope="module")
def traced(float32, goldens):
    ids = goldens("e2e_fp32.npz")["p37.input_ids"]
    return trace(float32, ids, {}), goldens("trace_fp32_p37.npz")


def at(golden, values):
    return values[golden["positions"]]


@pytest.mark.parametrize("layer", LAYERS)
def test_blocks(traced, layer):
    got, g = traced
    for name in ("h_out", "attn.y", "moe.y"):
        assert_abs(at(g, got[f"L{layer}.{name}"]), g[f"L{layer}.{name}"], FP32_BLOCK_ABS, name)
    want = g[f"L{layer}.block.pre_mix_out"]
    assert_abs(got[f"L{layer}.pre_mix_out"], want, FP32_BLOCK_ABS)
    indices = g[f"L{layer}.gate.indices"]
    order = np.argsort(indices, -1), np.argsort(got[f"L{layer}.gate.indices"], -1)
    for name, exact in (("indices", True), ("weights", False)):
        want, mine = (
            np.take_along_axis(a[f"L{layer}.gate.{name}"], o, -1)
            for a, o in zip((g, got), order, strict=True)
        )
        assert np.array_equal(mine, want) if exact else np.abs(mine - want).max() < FP32_BLOCK_ABS


@pytest.mark.parametrize("layer", SELECTING)
def test_selections(traced, layer):
    got, g = traced
    want = g[f"L{layer}.indexer.score"]
    score = got[f"L{layer}.indexer.score"][:, : want.shape[1]]
    seen = np.isfinite(want)
    visible = np.isfinite(score)
    candidates = g["L4.indexer.candidates"] if layer == 6 else True
    assert np.array_equal(visible, seen & candidates)
    assert_abs(score[visible], want[visible], FP32_BLOCK_ABS)
    ids = got[f"L{layer}.indexer.idx"]
    assert [set(row) for row in ids] == [set(row) for row in g[f"L{layer}.indexer.idx"]]
    if layer in (2, 4):
        for mine, name in (("attn.ckv", "attn.ckv"), ("indexer.k", "indexer.k")):
            assert_abs(got[f"L{layer}.{mine}"], g[f"L{layer}.{name}"], FP32_BLOCK_ABS, name)


def test_candidates(traced):
    visible = np.tril(np.ones((37, 37), bool))
    mine, want = (a["L4.indexer.candidates"] & visible for a in traced)
    assert np.array_equal(mine, want)


@pytest.mark.parametrize("layer", [1, 2])
def test_engram(traced, layer):
    got, g = traced
    assert_abs(got[f"L{layer}.engram.gate"], g[f"L{layer}.engram.gate"], FP32_BLOCK_ABS)
    mine, want = at(g, got[f"L{layer}.engram.h_out"]), g[f"L{layer}.engram.h_out"]
    assert_abs(mine, want, FP32_BLOCK_ABS)


def test_final_norm(traced):
    got, g = traced
    assert_abs(at(g, got["final.normed"]), g["final.normed"], FP32_BLOCK_ABS)
