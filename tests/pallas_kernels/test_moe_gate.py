"""Router: scores, ties, bias and renormalisation."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_gate.cases import CORNERS
from pallas_kernels.moe_gate.op import build
from pallas_kernels.moe_gate.ref import sqrt_softplus
from tests.tolerances import F32_REL

moe_gate = build("reference")


def oracle(logits, bias, k, scale):
    """float64; ids by falling selection score, ties to the lowest."""
    s = np.sqrt(np.logaddexp(0, np.asarray(logits, np.float64)))
    ids = np.argsort(-(s + bias), axis=-1, kind="stable")[..., :k]
    picked = np.take_along_axis(s, ids, -1)
    return ids, picked / (picked.sum(-1, keepdims=True) + 1e-20) * scale


def gate_of_logits(logits, bias=None, *, top_k=2, scale=1.5):
    """The gate where x W^T is exactly ``logits`` [R, E]."""
    logits = jnp.asarray(logits, jnp.float32)
    experts = logits.shape[-1]
    bias = jnp.zeros(experts) if bias is None else jnp.asarray(bias, jnp.float32)
    return moe_gate(logits, jnp.eye(experts), bias, top_k=top_k, scale=scale)


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_the_oracle(case, dtype, rng):
    x = jnp.asarray(rng.standard_normal((case.rows, case.hidden)), dtype)
    w = jnp.asarray(rng.standard_normal((case.experts, case.hidden)) / 4, dtype)
    bias = jnp.asarray(rng.standard_normal(case.experts) * 0.1, jnp.float32)
    ids, weights = moe_gate(x, w, bias, top_k=case.top_k, scale=case.scale)
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    want_ids, want = oracle(logits, np.asarray(bias, np.float64), case.top_k, case.scale)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    assert np.array_equal(ids, want_ids)
    assert np.abs(np.asarray(weights) - want).max(initial=0) < 10 * F32_REL


def test_ten_thousand_rows_select_as_the_oracle(rng):
    logits = rng.standard_normal((10_000, 16)).astype(np.float32)
    bias = rng.standard_normal(16).astype(np.float32)
    ids, _ = gate_of_logits(logits, bias, top_k=4)
    want, _ = oracle(logits, bias.astype(np.float64), 4, 1.5)
    differing = (np.asarray(ids) != want).any(-1)
    score = np.sqrt(np.logaddexp(0, logits.astype(np.float64))) + bias
    ordered = np.sort(score, -1)[:, ::-1][:, :5]
    assert (np.diff(ordered[differing]).max(-1) > -1e-6).all()  # only where scores all but tie


def test_ties_go_to_the_lowest_id():
    ids, weights = gate_of_logits(np.zeros((1, 8)), top_k=3)
    assert np.array_equal(ids, [[0, 1, 2]])
    assert np.allclose(weights, 0.5)
    ids, _ = gate_of_logits([[0, 1, 5, 1, 5, 1]], top_k=3)
    assert np.array_equal(ids, [[2, 4, 1]])
    ids, _ = gate_of_logits([[0, 1, 1, 1]], [2, 0, 0, 0], top_k=3)
    assert np.array_equal(ids, [[0, 1, 2]])


def test_softplus_is_linear_above_20():
    """Beyond 20 softplus is its argument in float32; from 89 on its exp would be infinite."""
    logits = np.float32([5, 8, 10.5, 20, np.nextafter(np.float32(20), 21), 30, 88, 100, 1e4, 3e38])
    got = np.asarray(sqrt_softplus(jnp.asarray(logits)), np.float64)
    assert np.isfinite(got).all()
    assert np.allclose(got, np.sqrt(np.logaddexp(0, logits.astype(np.float64))), rtol=3e-7)
    assert np.array_equal(got[4:], np.sqrt(logits[4:]))


@pytest.mark.parametrize("level", [-30.0, -90.0, -200.0])
def test_very_negative_logits_stay_normalised(level):
    ids, weights = gate_of_logits(np.full((2, 8), level), top_k=3)
    assert np.array_equal(ids, [[0, 1, 2]] * 2)
    weights = np.asarray(weights)
    assert np.isfinite(weights).all() and (weights >= 0).all()
    total = 3 * np.exp(level / 2)
    assert np.allclose(weights.sum(-1), 1.5 * total / (total + 1e-20), rtol=1e-4, atol=1e-20)


def test_mixed_extremes_stay_finite():
    logits = [[-200, -90, -30, 0], [-200, -200, -200, 50], [3e38, -3e38, 0, 1]]
    _, weights = gate_of_logits(logits, top_k=3)
    assert np.isfinite(np.asarray(weights)).all()
    assert np.allclose(np.asarray(weights).sum(-1), 1.5, rtol=1e-5)


def test_renormalisation_eps_is_negligible_until_scores_are_1e20():
    """Scores are 1e-13 at -60, where a larger eps would show, and 2e-20 at -91, where this does."""
    for level in (-60.0, -91.0):
        _, weights = gate_of_logits(np.full((1, 4), level))
        s = np.exp(level / 2)
        assert np.allclose(weights, 1.5 * s / (2 * s + 1e-20), rtol=1e-5)
    assert abs(np.asarray(weights).sum() - 1.5) > 0.1


def test_bias_selects_and_does_not_weigh():
    logits = np.array([[1.0, 2.0, 3.0, 4.0]])
    ids, weights = gate_of_logits(logits, [10, 5, 0, 0])
    assert np.array_equal(ids, [[0, 1]])
    s = np.sqrt(np.logaddexp(0, logits[0, :2]))
    assert np.allclose(weights, 1.5 * s / s.sum(), rtol=1e-6)


def test_each_row_takes_its_own_bias():
    """Text and image rows of one batch: the image bias changes image rows alone."""
    logits = np.tile([[1.0, 2.0, 3.0, 4.0]], (4, 1))
    image = np.array([False, True, False, True])
    text_bias, image_bias = np.zeros(4), np.array([9.0, 0, 0, 0])
    bias = np.where(image[:, None], image_bias, text_bias)
    ids, weights = gate_of_logits(logits, bias, top_k=1)
    assert np.array_equal(ids[:, 0], [3, 0, 3, 0])
    plain_ids, plain = gate_of_logits(logits, text_bias, top_k=1)
    assert np.array_equal(ids[~image], plain_ids[~image])
    assert np.array_equal(weights[~image], plain[~image])


def test_images_take_the_other_bias_and_rows_that_do_not_live_no_expert():
    logits, bias, other = np.zeros((3, 4)), np.float32([1, 0, 0, 0]), np.float32([0, 0, 2, 1])
    image, live = jnp.asarray([False, True, True]), jnp.asarray([True, True, False])
    operands = jnp.asarray(logits, jnp.float32), jnp.eye(4), bias, other, image, live
    ids, weights = moe_gate(*operands, top_k=2, scale=1.0)
    assert np.array_equal(ids, [[0, 1], [2, 3], [-1, -1]])
    assert np.allclose(weights[:2], 0.5)
