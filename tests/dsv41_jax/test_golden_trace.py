"""Numerics ``reference`` module by module, from the trace of the reference's quantised prefill.

Where nothing but the order of a sum can differ the bound is the README's measured sensitivity to
it; what follows from a recomputed intermediate has the README's tolerance. Selections, gates and
hashes are equal.
"""

import numpy as np
import pytest

from tests.compare import assert_abs, assert_traced
from tests.dsv41_jax.tracing import trace
from tests.tolerances import TRACE_F32_ABS, TRACE_F32_RECOMPUTED_ABS, TRACE_MAX_ABS

LAYERS = range(8)
TIGHT = (
    "hc_attn.collapsed", "attn.x", "attn.qr", "attn.q", "attn.window_kv", "attn.ckv", "attn.y",
    "h_mid", "moe.x", "moe.y", "indexer.k", "indexer.q", "indexer.weights", "engram.rows",
    "engram.h_out",
)  # fmt: skip


@pytest.fixture(scope="module")
def golden(goldens):
    return goldens("trace_quant_p37.npz")


@pytest.fixture(scope="module")
def traced(reference, golden):
    forced = {name: value for name, value in golden.items() if value.dtype == np.float32}
    return trace(reference, golden["input_ids"], forced)


@pytest.mark.parametrize("layer", LAYERS)
def test_activations(traced, golden, layer):
    """Everything in bfloat16 whose inputs the trace holds."""
    names = [n for n in TIGHT if f"L{layer}.{n}" in golden]
    assert {"attn.y"} <= set(names)
    for name in names:
        key = f"L{layer}.{name}"
        recomputed = name in ("moe.x",) and f"L{layer}.h_mid" not in golden
        assert_traced(traced[key], golden[key], key, tight=not recomputed)


@pytest.mark.parametrize("layer", LAYERS)
def test_block_outputs(traced, golden, layer):
    key = f"L{layer}.h_out"
    assert_traced(traced[key], golden[key], key, tight=False)


@pytest.mark.parametrize("layer", LAYERS)
def test_coefficients(traced, golden, layer):
    """Always float32; those of the experts and the handed-on pre need h_mid from the trace."""
    names = [
        f"L{layer}.hc_{site}.{part}" for site in ("attn", "ffn") for part in ("pre", "post", "comb")
    ]
    for key in [*names, f"L{layer}.pre_mix_out"]:
        if key in golden:
            exact = "hc_attn" in key or f"L{layer}.h_mid" in golden
            bound = TRACE_F32_ABS if exact else TRACE_F32_RECOMPUTED_ABS
            assert_abs(traced[key], golden[key], bound, key)


@pytest.mark.parametrize("layer", LAYERS)
def test_gates(traced, golden, layer):
    mine, want = (a[f"L{layer}.gate.indices"] for a in (traced, golden))
    order = np.argsort(mine, -1), np.argsort(want, -1)
    assert np.array_equal(np.sort(mine, -1), np.sort(want, -1))
    mine, want = (
        np.take_along_axis(a[f"L{layer}.gate.weights"], o, -1)
        for a, o in zip((traced, golden), order, strict=True)
    )
    # Layers whose moe.x the trace holds have the gate's own inputs.
    bound = TRACE_F32_ABS if f"L{layer}.moe.x" in golden else TRACE_MAX_ABS
    assert_abs(mine, want, bound)


@pytest.mark.parametrize("layer", [2, 4, 6])
def test_selections(traced, golden, layer):
    want = golden[f"L{layer}.indexer.score"]
    score = traced[f"L{layer}.indexer.score"][:, : want.shape[1]]
    seen = np.isfinite(want)
    if layer == 6:
        seen &= golden["L4.indexer.candidates"]
    assert np.array_equal(np.isfinite(score), seen)
    assert_traced(score[seen], want[seen], f"L{layer}.score", tight=True)
    picked = traced[f"L{layer}.indexer.idx"]
    assert [set(row) for row in picked] == [set(row) for row in golden[f"L{layer}.indexer.idx"]]


@pytest.mark.parametrize("layer", range(2, 8))
def test_lists(traced, golden, layer):
    """What attention reads: a reused selection is the one its source made."""
    source = max(s for s in (2, 4, 6) if s <= layer)
    listed = golden[f"L{layer}.attn.topk_idxs"][:, 16:]
    want = [{int(e) - 37 for e in row if e >= 0} for row in listed]
    assert [set(row[row >= 0].tolist()) for row in traced[f"L{source}.indexer.idx"]] == want


def test_candidates(traced, golden):
    visible = np.tril(np.ones((37, 37), bool))
    mine, want = (a["L4.indexer.candidates"] & visible for a in (traced, golden))
    assert np.array_equal(mine, want)
    want = golden["L4.indexer.cand_block_scores"]
    best = traced["L4.indexer.cand_block_scores"][:, : want.shape[1]]
    assert np.array_equal(np.isposinf(best), np.isposinf(want))
    assert np.array_equal(np.isneginf(best), np.isneginf(want))
    finite = np.isfinite(want)
    assert_traced(best[finite], want[finite], "block scores", tight=True)


@pytest.mark.parametrize("layer", [1, 2])
def test_engram(traced, golden, layer):
    column = layer - 1
    hashes = traced[f"L{layer}.engram.hash_ids"]
    assert np.array_equal(hashes, golden["engram_hash_ids"][:, column])
    assert_abs(traced[f"L{layer}.engram.gate"], golden[f"L{layer}.engram.gate"], TRACE_F32_ABS)
    key = f"L{layer}.engram.kv"
    assert_traced(traced[key][-8:], golden[f"{key}_last8"], key, tight=True)


def test_final_norm(traced, golden):
    for key in ("final.collapsed", "final.normed"):
        assert_traced(traced[key], golden[key], key, tight=True)
