"""The gate kernel on the host: its PTX runs as written in ``emulate``, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.moe_gate import cases, emulate, kernel_sm90, op, ref, select_ptx
from pallas_kernels.moe_gate.kernel_sm90 import Shape, Tuning
from tests.tolerances import F32_REL

F32 = np.float32


def plan(rows, tile, splits, *, experts=384, top_k=6, bias_rows=False, flags=False):
    shape = Shape(rows, 256, experts, top_k, 1.5, bias_rows, Tuning(tile, splits), flags)
    return shape.select


def oracle(logits, bias, k):
    """float64 scores; ids by falling float32 key, ties to the lowest."""
    s = np.sqrt(np.logaddexp(0, np.asarray(logits, np.float64)))
    ids = np.argsort(-(s.astype(F32) + bias), axis=-1, kind="stable")[:, :k]
    picked = np.take_along_axis(s, ids, -1)
    return ids, 1.5 * picked / (picked.sum(-1, keepdims=True) + 1e-20)


def selected(c, logits, bias, **kwargs):
    """ids, weights, candidates of logits [rows, E] given as one block's sums."""
    out = emulate.Result.unwritten(c)
    tile = np.zeros((c.tile, c.experts), F32)
    tile[: c.rows] = logits
    emulate.select_block(c, emulate.banked(tile), bias, out, **kwargs)
    return out.ids.reshape(c.rows, -1), out.weights.reshape(c.rows, -1), out.passed


@pytest.mark.parametrize("experts", [128, 384])
@pytest.mark.parametrize("tile", [8, 32])
def test_accumulators_land_where_rows_are_read(experts, tile, rng):
    accumulators = rng.standard_normal((experts, tile)).astype(F32)
    assert np.array_equal(emulate.published(accumulators), emulate.banked(accumulators.T))


@pytest.mark.parametrize(
    ("rows", "tile", "splits", "experts", "top_k", "bias_rows"),
    [
        (1, 8, 8, 384, 6, False),
        (11, 8, 16, 384, 6, True),
        (18, 16, 2, 384, 6, True),
        (9, 8, 1, 384, 6, False),
        (64, 64, 4, 128, 3, False),
        (5, 8, 4, 128, 3, True),
        (3, 8, 1, 256, 8, False),
    ],
)
def test_whole_launch_equals_the_reference(rows, tile, splits, experts, top_k, bias_rows, rng):
    c = plan(rows, tile, splits, experts=experts, top_k=top_k, bias_rows=bias_rows)
    x = rng.standard_normal((rows, 256)).astype(jnp.bfloat16).astype(F32)
    weight = (rng.standard_normal((experts, 256)) / 16).astype(jnp.bfloat16).astype(F32)
    bias = (rng.standard_normal((rows, experts) if bias_rows else experts) * 0.1).astype(F32)
    out = emulate.moe_gate(c, x, weight, bias)
    want_ids, want = ref.moe_gate(*map(jnp.asarray, (x, weight, bias)), top_k=top_k, scale=1.5)
    assert np.array_equal(out.ids.reshape(rows, -1), want_ids)
    assert np.allclose(out.weights.reshape(rows, -1), want, rtol=10 * F32_REL, atol=0)
    assert (out.passed >= top_k).all()


def test_scores_are_exact_to_the_last_bits(rng):
    c = plan(8, 8, 1)
    logits = np.concatenate([rng.standard_normal((4, 384)) * 3, rng.uniform(-60, 90, (4, 384))])
    logits[7, :2] = 20, -20
    logits = logits.astype(F32)
    ids, weights, _ = selected(c, logits, np.zeros(384, F32))
    want_ids, want = oracle(logits, 0, 6)
    assert np.array_equal(ids, want_ids)
    assert np.allclose(weights, want, rtol=4 * F32_REL, atol=0)


def test_approximate_scores_stay_within_the_margin(rng):
    """Over all of a score's range, with the errors that the instructions may have."""
    logits = np.concatenate([np.linspace(-40, 40, 4096), np.geomspace(1e-6, 1e30, 512)])
    logits = np.concatenate([logits, -logits])[:, None].repeat(32, 1).astype(F32)
    exact = np.sqrt(np.logaddexp(0, logits[:, 0].astype(np.float64)))
    signs = rng.choice([-1, 1], 32) * 2.0**-22

    def noise(x):
        return x * (1 + signs) + signs * (np.abs(x) < 1)

    lines = select_ptx._approximate("s", "logit")
    for row, s in zip(logits, exact, strict=True):
        w = emulate.Warp(np.zeros(1, np.uint32), [], {"logit": row.view(np.uint32)}, noise)
        emulate.run([w], lines)
        assert np.abs(w.value("s", F32) - s).max() < select_ptx.MARGIN / 2 * (1 + s), row[0]


def test_few_experts_are_scored_exactly_and_none_that_matters_is_left_out(rng):
    c = plan(64, 64, 1)
    logits = rng.standard_normal((64, 384)).astype(F32)
    bias = (0.1 * rng.standard_normal(384)).astype(F32)
    logits[32:, 1::2] = logits[32:, ::2]  # neighbours tie but for their bias
    bias[192:] = bias[192]
    signs = rng.choice([-1, 1], 32) * 2.0**-23
    ids, _, passed = selected(c, logits, bias, noise=lambda x: x * (1 + signs))
    assert np.array_equal(ids, oracle(logits, bias, 6)[0])
    assert 6 <= passed[:32].mean() < 8 and passed.max() < 32


@pytest.mark.parametrize("level", [0.0, -30.0, -90.0, -200.0, 1e4])
def test_all_tie_then_the_lowest_ids_win(level):
    c = plan(1, 8, 1)
    ids, weights, passed = selected(c, np.full((1, 384), level, F32), np.zeros(384, F32))
    s = np.exp(min(level, 0) / 2)
    assert np.array_equal(ids, [range(6)]) and passed == 384
    assert np.allclose(weights, 1.5 * s / (6 * s + 1e-20), rtol=0.05 if level == -200 else 1e-5)


@pytest.mark.parametrize("tied", [7, 32, 33, 100])
def test_ties_across_lanes_and_beyond_a_warp(tied, rng):
    """Up to 32 candidates take one path, more another."""
    c = plan(1, 8, 1)
    logits = rng.uniform(-2, 0, (1, 384)).astype(F32)
    best = np.sort(rng.permutation(384)[:tied])
    logits[0, best] = 3
    ids, weights, passed = selected(c, logits, np.zeros(384, F32))
    assert np.array_equal(ids[0], best[:6]) and passed == tied
    assert np.allclose(weights, 0.25, rtol=4 * F32_REL)


def test_bias_selects_and_does_not_weigh(rng):
    c = plan(4, 8, 1, bias_rows=True)
    logits = rng.standard_normal((4, 384)).astype(F32)
    bias = (rng.standard_normal((4, 384)) * 3).astype(F32)
    ids, weights, _ = selected(c, logits, bias)
    want_ids, want = oracle(logits, bias, 6)
    assert np.array_equal(ids, want_ids)
    assert np.allclose(weights, want, rtol=4 * F32_REL, atol=0)


@pytest.mark.parametrize("tile", [16, 64])
def test_images_take_the_other_bias_and_rows_that_do_not_live_no_expert(tile, rng):
    c = plan(13, tile, 1, flags=True)
    logits = rng.standard_normal((13, 384)).astype(F32)
    bias, other = rng.standard_normal((2, 384)).astype(F32)
    image, live = rng.random(13) < 0.5, rng.random(13) < 0.7
    flags = (image + 2 * live).astype(np.int32)
    ids, weights, _ = selected(c, logits, bias, flagged=(other, flags))
    want_ids, want = oracle(logits, np.where(image[:, None], other, bias), 6)
    assert np.array_equal(ids, np.where(live[:, None], want_ids, -1))
    assert np.allclose(weights, want, rtol=4 * F32_REL, atol=0)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_nan_and_neighbours_change_no_other_row(splits, rng):
    rows = 13
    c = plan(rows, 8, splits)
    x = rng.standard_normal((rows, 256)).astype(F32)
    weight = rng.standard_normal((384, 256)).astype(F32) / 16
    bias = np.zeros(384, F32)
    clean, poisoned = emulate.moe_gate(c, x, weight, bias), x.copy()
    poisoned[2::3] = (np.nan,)
    poisoned[12] = 1e30
    out = emulate.moe_gate(c, poisoned, weight, bias)
    kept = np.setdiff1d(np.arange(rows), [*range(2, rows, 3), 12])
    for name in ("ids", "weights"):
        a, b = (getattr(r, name).reshape(rows, -1)[kept] for r in (clean, out))
        assert np.array_equal(a, b)
    assert ((out.ids >= 0) & (out.ids < 384)).all()


def test_no_rows():
    ids, weights = kernel_sm90.moe_gate(
        jnp.zeros((0, 2, 256), jnp.bfloat16),
        jnp.zeros((128, 256), jnp.bfloat16),
        jnp.zeros(128),
        top_k=3,
        scale=1.5,
    )
    assert ids.shape == weights.shape == (0, 2, 3) and ids.dtype == jnp.int32


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": jnp.float32}, "must be bfloat16"),
        ({"experts": 96}, "experts=96 must be 128, 256 or 384"),
        ({"experts": 512}, "experts=512 must be 128, 256 or 384"),
        ({"hidden": 96}, "hidden size 96 must be a multiple of 64"),
        ({"top_k": 9}, "top_k=9 must be 1 to 8"),
        ({"bias": (2, 128)}, r"bias.shape=\(2, 128\)"),
        ({"tuning": Tuning(8, 16)}, "tuning.splits=16 must divide 4 steps"),
    ],
)
def test_what_the_kernel_refuses(change, match):
    case = {"experts": 128, "hidden": 256, "top_k": 3, "dtype": jnp.bfloat16, "tuning": None}
    case |= {"bias": (case["experts"] if "experts" not in change else change["experts"],)} | change
    with pytest.raises(ValueError, match=match):
        kernel_sm90.moe_gate(
            jnp.zeros((4, case["hidden"]), case["dtype"]),
            jnp.zeros((case["experts"], case["hidden"]), case["dtype"]),
            jnp.zeros(case["bias"]),
            top_k=case["top_k"],
            scale=1.5,
            tuning=case["tuning"],
        )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ((12,), "must be 8, 16, 32, 64 or 128"),
        ((8, 3), "must be 1, 2, 4, 8 or 16"),
        ((8, 32), "16"),
    ],
)
def test_tunings_that_cannot_run(settings, match):
    with pytest.raises(ValueError, match=match):
        Tuning(*settings)


def test_every_case_has_a_tuning_that_fits():
    for case in cases.CASES:
        tuning = kernel_sm90.tuned(case.rows, case.experts, case.hidden)
        s = Shape(case.rows, case.hidden, case.experts, case.top_k, 1.5, False, tuning)
        held = 2 * kernel_sm90.BK * s.stages * s.stage_rows
        assert 4 * tuning.tile * case.experts <= held <= kernel_sm90.SMEM_BYTES
        assert s.steps * tuning.splits * kernel_sm90.BK == case.hidden
    assert kernel_sm90.tuned(9, 384, 5120).splits > kernel_sm90.tuned(9, 384, 256).splits == 4
    assert kernel_sm90.tuned(8, 384, 5120).spread and not kernel_sm90.tuned(9, 384, 5120).spread


def test_the_kernel_by_name_or_where_it_fits(monkeypatch, rng):
    with pytest.raises(ValueError, match="needs an sm_90 GPU"):
        op.build("mosaic")
    assert op.build("auto") is ref.moe_gate
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    x, w = (jnp.asarray(rng.standard_normal((n, 64)), jnp.float32) for n in (3, 8))
    args = {"top_k": 2, "scale": 1.5}
    want = ref.moe_gate(x, w, jnp.zeros(8), **args)
    got = op.build("auto")(x, w, jnp.zeros(8), **args)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="must be bfloat16"):
        op.build("mosaic")(x, w, jnp.zeros(8), **args)


def test_the_xla_path_of_the_benchmark_equals_the_reference():
    case = cases.Case(9, experts=128, top_k=3, hidden=256)
    x, w, bias = cases.inputs(case, 0)
    got = cases.xla_path(x, w, bias, top_k=3, scale=1.5)
    want = ref.moe_gate(x, w, bias, top_k=3, scale=1.5)
    assert np.array_equal(got[0], want[0])
    assert np.allclose(got[1], want[1], rtol=1e-5)
