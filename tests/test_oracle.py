"""The float64 oracle against the goldens of the official reference and of bounded replay."""

import numpy as np
import pytest

from tests.compare import assert_abs
from tests.oracle import Oracle
from tests.tolerances import FP32_LOGITS_ABS, REPLAY_LOGITS_ABS


@pytest.fixture(scope="module")
def oracle(tiny_dir) -> Oracle:
    return Oracle(tiny_dir)


@pytest.mark.parametrize("prompt", ["p5", "p37", "p96"])
def test_full_prefill_and_decode(oracle, goldens, prompt):
    golden = goldens("e2e_fp32.npz")
    ids, fed = golden[f"{prompt}.input_ids"], golden[f"{prompt}.decode_tokens"]
    got = oracle.logits([*ids, *fed[:-1]], 1, replay=False)
    kept = golden.get(f"{prompt}.prefill_positions", np.arange(len(ids)))
    assert_abs(got[kept], golden[f"{prompt}.prefill_logits"], FP32_LOGITS_ABS)
    assert_abs(got[len(ids) :], golden[f"{prompt}.decode_logits"], FP32_LOGITS_ABS)
    np.testing.assert_array_equal(got[len(ids) - 1 :].argmax(-1), fed)


@pytest.mark.parametrize(
    ("prompt", "hits"),
    [("p5", ()), ("p37", ()), ("p37", (32,)), ("p96", ()), ("p96", (32,)), ("p96", (80,))],
)
def test_bounded_replay(oracle, goldens, prompt, hits):
    golden = goldens("replay_fp32.npz")
    case = f"{prompt}.hit{hits[0]}" if hits else f"{prompt}.decoder"
    tokens, logits = oracle.greedy(golden[f"{prompt}.input_ids"], 9, hits=hits)
    np.testing.assert_array_equal(tokens, golden[f"{case}.tokens"])
    assert_abs(logits, golden[f"{case}.logits"], REPLAY_LOGITS_ABS)


def test_engram_rows(oracle, goldens):
    """Hashes with constants derived here, not read."""
    trace = goldens("trace_quant_p37.npz")
    ids, want = goldens("e2e_fp32.npz")["p37.input_ids"], trace["engram_hash_ids"]
    got = [oracle.engram_rows(layer, ids) for layer in oracle.cfg.engram_layer_ids]
    np.testing.assert_array_equal(np.stack(got, axis=1), want)


def test_replay_is_exact_within_a_window(oracle, goldens):
    ids = goldens("e2e_fp32.npz")["p5.input_ids"]
    full, trimmed = (oracle.logits([*ids, 7, 9], len(ids), replay=on) for on in (False, True))
    assert_abs(trimmed, full, 1e-12)
