"""Numerics ``reference`` end to end against the reference's quantised run.

Chaos after one flipped rounding is expected: cosines and agreement, not tokens.
"""

import numpy as np
import pytest

from tests.compare import cosines
from tests.dsv41_jax.decoding import kept, run
from tests.tolerances import E2E_ARGMAX, E2E_COSINE_MEAN, E2E_COSINE_MIN, E2E_DECODE_COSINE_MEAN

FILE = "e2e_quant.npz"
PROMPTS = ("p5", "p37", "p96")


def rows(goldens, prompt, numerics="reference"):
    g, got = goldens(FILE), run(numerics, FILE, prompt)
    return kept(g, prompt, got.prefill), g[f"{prompt}.prefill_logits"].astype(np.float32)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefill(goldens, prompt):
    got, want = rows(goldens, prompt)
    cosine = cosines(got, want)
    assert cosine.mean() >= E2E_COSINE_MEAN and cosine.min() >= E2E_COSINE_MIN
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= E2E_ARGMAX


@pytest.mark.parametrize("prompt", PROMPTS)
def test_teacher_forced_decode(goldens, prompt):
    g, got = goldens(FILE), run("reference", FILE, prompt)
    want = g[f"{prompt}.decode_logits"]
    assert cosines(got.decode, want).mean() >= E2E_DECODE_COSINE_MEAN
    assert (got.decode.argmax(-1) == want.argmax(-1)).mean() >= E2E_ARGMAX


def test_drafts_mostly_agree(goldens):
    """A draft follows 17 near-chaotic layers and its own picks: most first proposals, no more."""
    agree = []
    for prompt in PROMPTS:
        g, got = goldens(FILE), run("reference", FILE, prompt)
        agree.append(got.drafted[:, 0] == g[f"{prompt}.draft_ids"][:, 1])
        assert np.isfinite(got.confidence).all() and np.isfinite(got.draft_logits).all()
    assert np.mean(agree) >= E2E_ARGMAX
