"""Image spans: dead for Engram, cumulatively, and routed with ``bias_vl``."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.compare import assert_abs, cosines
from tests.dsv41_jax.support import rows_for
from tests.dsv41_jax.tracing import trace
from tests.tolerances import FP32_BLOCK_ABS, IMAGE_LOGITS_ABS, IMAGE_QUANT_COSINE

CASES = [("vl_mask_p37.npz", ""), ("extra_vectors.npz", "img1."), ("extra_vectors.npz", "img2.")]


def inputs(goldens, file, prefix):
    g = goldens(file)
    return g, g[f"{prefix}input_ids"], g[f"{prefix}token_types"] >= 0


@pytest.mark.parametrize(("file", "prefix"), CASES)
def test_float32_logits(float32, goldens, file, prefix):
    g, ids, image = inputs(goldens, file, prefix)
    got = float32.forward(rows_for(ids, image=image), float32.cache()).logits[0, : len(ids)]
    assert_abs(got[-8:], g[f"{prefix}fp32.last8_logits"], IMAGE_LOGITS_ABS)


@pytest.mark.parametrize(("file", "prefix"), CASES)
def test_hashes(reference, goldens, file, prefix):
    """An n-gram that reaches into a span is cut there, and stays cut behind it."""
    from dsv41_jax.engram import compressed_history

    g, ids, image = inputs(goldens, file, prefix)
    model = reference.model
    compressed = compressed_history(model.token_map[...], rows_for(ids, size=37, image=image))
    pad = model.token_map[...][reference.cfg.engram_pad_token_id]
    for column, layer in enumerate(reference.cfg.engram_layer_ids):
        rows = model.layers[layer].engram.row_ids(compressed, pad)[0]
        assert np.array_equal(rows, g[f"{prefix}engram_hash_ids"][:, column])


def test_a_span_decides_otherwise_than_text(float32, goldens):
    """The same ids without their token types give other logits."""
    g, ids, _ = inputs(goldens, *CASES[0])
    got = float32.forward(rows_for(ids), float32.cache()).logits[0, 29:37]
    assert np.abs(np.asarray(got) - g["fp32.last8_logits"]).max() > 0.1


def sorted_gate(values):
    return np.sort(np.asarray(values), -1)


def test_float32_gates(float32, goldens):
    g, ids, image = inputs(goldens, *CASES[0])
    got = trace(float32, ids, {}, image=image)
    for layer in (0, 7):
        key = f"L{layer}.gate.indices"
        assert np.array_equal(sorted_gate(got[key]), sorted_gate(g[f"fp32.{key}"]))
    for layer in (1, 2):
        key = f"L{layer}.engram.gate"
        assert_abs(got[key], g[f"fp32.{key}"], FP32_BLOCK_ABS)
        assert not got[key][image].any() and got[key][~image].all()


def test_reference(reference, goldens):
    """The first gate's inputs are exact; after it the README asks for no more than the cosine."""
    g, ids, image = inputs(goldens, *CASES[0])
    rows = rows_for(ids, image=image)
    ids_of = reference.module(
        lambda model, rows, cache: first_gate(model, reference.ops, rows, cache)
    )
    got = ids_of(rows, reference.cache())[0, : len(ids)]
    assert np.array_equal(sorted_gate(got), sorted_gate(g["quant.L0.gate.indices"]))
    logits = reference.forward(rows, reference.cache()).logits[0, 29:37]
    assert cosines(logits, g["quant.last8_logits"]).min() >= IMAGE_QUANT_COSINE


def first_gate(model, ops, rows, cache):
    block = model.layers[0]
    h, pre = model.embedded(ops, rows.tokens)
    pre_attn, post, comb = block.coefficients(ops, h, "attn")
    x = block.attn_norm(ops.mhc_collapse(h, pre))
    y, _, _ = block.attn(ops, x, rows, rows.floor, cache, None)
    h = ops.mhc_expand(h, y, post, comb)
    return block.ffn.route(ops, block.ffn_norm(ops.mhc_collapse(h, pre_attn)), rows.image)[0]


def test_image_bias_moves_image_rows_alone(float32):
    """Both biases are used, each by its own rows, in every backbone layer."""
    x = np.random.default_rng(0).standard_normal((1, 6, float32.cfg.hidden_size))
    x = jnp.asarray(x, jnp.float32)
    image = np.array([[False, True, True, False, True, False]])
    for block in float32.model.layers:
        gate = block.ffn.gate
        want = np.asarray(block.ffn.route(float32.ops, x, jnp.asarray(image))[0])
        for name, mask in (("bias_vl", image), ("bias", ~image)):
            bias = getattr(gate, name)
            old = bias.get_value()
            bias.set_value(old.at[int(want[0, 0, 0]) ^ 1].add(100))
            moved = np.asarray(block.ffn.route(float32.ops, x, jnp.asarray(image))[0])
            bias.set_value(old)
            assert np.array_equal((moved != want).any(-1) & ~mask, np.zeros_like(mask))
            assert (moved != want).any()
