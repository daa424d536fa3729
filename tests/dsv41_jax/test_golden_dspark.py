"""One draft block against the reference's, from its own features (ARCHITECTURE section 10)."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.dspark import propose
from tests.compare import assert_abs, assert_traced, cosines
from tests.dsv41_jax.support import Tiny, rows_for, tiny
from tests.tolerances import E2E_COSINE_MIN, FP32_LOGITS_ABS

FILES = {"float32": "dspark_fp32_p37.npz", "reference": "dspark_quant_p37.npz"}
STEP = 37  # start_pos; the block opens one position later


def committed(model, ops, cache, taps, rows):
    """The draft rings after the features ``taps`` [T, 3 D] of ``rows``."""
    main_x = model.mtp[0].main_x(ops, taps[None].astype(ops.numerics.dtype))
    drafts = tuple(
        stage.commit(ops, ops.linear(main_x, stage.attn.wkv()), rows, ring)
        for stage, ring in zip(model.mtp, cache.drafts, strict=True)
    )
    return replace(cache, drafts=drafts), main_x


def forward(model, ops, golden, cache):
    """Stage by stage, as ``Model.draft`` runs them, and what lies between."""
    zero, start = jnp.zeros(1, jnp.int32), jnp.full(1, STEP + 1, jnp.int32)
    cache, _ = committed(
        model, ops, cache, golden["main_hidden_prefill_last16"], rows_for([0] * 16, 21, size=16)
    )
    cache, main_x = committed(model, ops, cache, golden["main_hidden_step"], rows_for([0], STEP))
    noise = jnp.full((1, 4), model.cfg.dspark_noise_token_id, jnp.int32)
    h, pre = model.embedded(ops, jnp.concatenate([golden["input_token"][None], noise], axis=1))
    out = {"main_x": main_x[0]}
    for index, (stage, ring) in enumerate(zip(model.mtp, cache.drafts, strict=True)):
        h, pre = stage(ops, h, pre, zero, start, zero, ring)
        out[f"mtp{index}.block.h_out"], out[f"mtp{index}.block.pre_mix_out"] = h[0], pre[0]
        out[f"ring{index}"] = ring.rows.decode(jnp.float32)[0]
    x = out["head_x"] = ops.mhc_collapse(h, pre)[0]
    base = ops.linear(model.mtp[-1].norm(x), model.head(), out_dtype=jnp.float32)
    draft = propose(ops, model.mtp[-1], x[None], base[None], golden["input_token"])
    whole = model.draft(ops, golden["input_token"], zero, start, zero, cache)
    return out | {"base_logits": base, "draft": draft, "whole": whole}


def drafted(model: Tiny, golden: dict[str, np.ndarray]) -> dict:
    names = ("main_hidden_prefill_last16", "main_hidden_step", "input_token")
    inputs = {name: jnp.asarray(golden[name]) for name in names}
    return model.module(lambda m, g, c: forward(m, model.ops, g, c))(inputs, model.cache())


@pytest.fixture(scope="module", params=FILES)
def pair(request, goldens):
    golden = goldens(FILES[request.param])
    return request.param, drafted(tiny(request.param), golden), golden


def test_context_rows(pair):
    """Every stage keeps its own rows of the same features, at position mod ring."""
    numerics, got, golden = pair
    for index in range(3):
        # The golden ring has 16 slots, this one more; position 21 has left its window.
        want = {p: golden[f"mtp{index}.attn.kv_all"][p % 16] for p in range(22, 38)}
        ring = np.asarray(got[f"ring{index}"])
        mine = np.stack([ring[p % len(ring)] for p in want])
        if numerics == "float32":
            assert_abs(mine, np.stack(list(want.values())), 5e-5)
        else:
            assert_traced(mine, np.stack(list(want.values())), f"ring {index}", tight=True)


def test_stages(pair):
    numerics, got, golden = pair
    assert_features = {
        "float32": lambda a, b, name: assert_abs(a, b, 5e-5, name),
        "reference": lambda a, b, name: assert_traced(a, b, name, tight=name == "main_x"),
    }[numerics]
    assert_features(np.asarray(got["main_x"], np.float32), golden["main_x"], "main_x")
    stages = (
        range(3) if numerics == "float32" else range(1)
    )  # later ones follow from stage 0's roundings
    for index in stages:
        for name in ("block.h_out", "block.pre_mix_out"):
            key = f"mtp{index}.{name}"
            if numerics == "float32" or name == "block.h_out":
                assert_features(np.asarray(got[key], np.float32), golden[key], key)
    if numerics == "float32":
        assert_features(np.asarray(got["head_x"]), golden["head_x"], "head_x")


def test_proposals(pair):
    numerics, got, golden = pair
    draft, whole = got["draft"], got["whole"]
    for part in ("ids", "logits", "confidence"):
        assert np.array_equal(getattr(draft, part), getattr(whole, part))
    assert np.array_equal(golden["input_token"], golden["draft_ids"][:1])
    if numerics == "float32":
        assert np.array_equal(draft.ids[0], golden["draft_ids"][1:])
        assert_abs(np.asarray(got["base_logits"]), golden["base_logits"], FP32_LOGITS_ABS)
        assert_abs(np.asarray(draft.logits[0]), golden["draft_logits"], FP32_LOGITS_ABS)
        assert_abs(np.asarray(draft.confidence[0]), golden["confidence"], FP32_LOGITS_ABS)
    else:
        assert cosines(got["base_logits"], golden["base_logits"]).min() > E2E_COSINE_MIN
        assert np.array_equal(draft.ids[0, :1], golden["draft_ids"][1:2])


@pytest.fixture(scope="module")
def context(float32, goldens):
    ids = goldens("e2e_fp32.npz")["p37.input_ids"]
    return float32.forward(rows_for(ids), float32.cache()).cache


def test_the_block_is_not_causal(float32, context):
    """The first proposal depends on the last slot of the block: another noise token changes it."""
    model = float32.model

    def logits(model, noise, cache):
        zero, start = jnp.zeros(1, jnp.int32), jnp.full(1, 37, jnp.int32)
        tokens = jnp.concatenate([jnp.asarray([[3]]), noise], axis=1)
        h, pre = model.embedded(float32.ops, tokens)
        for stage, ring in zip(model.mtp, cache.drafts, strict=True):
            h, pre = stage(float32.ops, h, pre, zero, start, zero, ring)
        return model.logits(float32.ops, h, pre)[0]

    run = float32.module(logits)
    noise = np.full((1, 4), model.cfg.dspark_noise_token_id)
    changed = noise.copy()
    changed[0, -1] = 7
    a, b = (np.asarray(run(jnp.asarray(n, jnp.int32), context)) for n in (noise, changed))
    assert (np.abs(a - b).max(-1) > 1e-3).all()


def test_context_is_the_window_before_the_block(float32, context):
    """Rows older than the window do not count, the oldest one inside it does."""
    want = float32.draft(3, 37, context)
    for position, counts in ((20, False), (21, True), (36, True), (37, False)):
        drafts = tuple(
            replace(
                ring, rows=replace(ring.rows, values=ring.rows.values.at[0, position % 32].add(1))
            )
            for ring in context.drafts
        )
        got = float32.draft(3, 37, replace(context, drafts=drafts))
        assert np.array_equal(got.logits, want.logits) is not counts, position


def test_drafts_of_a_floor_see_nothing_below_it(float32, context):
    """The cut of a replayed prompt holds in the draft stages, too."""
    zero = jnp.zeros(1, jnp.int32)
    token, start = jnp.full(1, 3, jnp.int32), jnp.full(1, 37, jnp.int32)
    at = [
        float32._draft(float32.state, token, zero, start, zero + floor, context).logits
        for floor in (0, 21, 30)
    ]
    assert np.array_equal(at[0], at[1]) and not np.array_equal(at[0], at[2])
