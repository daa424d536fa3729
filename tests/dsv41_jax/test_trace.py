"""``Tracer`` against the goldens: what it shows of each layer, and both sides of bounded replay."""

import numpy as np
import pytest

from dsv41_jax.errors import UserError
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.trace import Tracer
from tests.compare import assert_abs
from tests.tolerances import FP32_LOGITS_ABS, REPLAY_LOGITS_ABS

HIT = 32  # p37 of replay_fp32.npz


@pytest.fixture(scope="module")
def golden(goldens):
    return goldens("trace_fp32_p37.npz")


@pytest.fixture(scope="module")
def tracer(float32, goldens):
    ids = goldens("e2e_fp32.npz")["p37.input_ids"]
    return Tracer(float32.model, float32.ops, ids.tolist())


@pytest.fixture(scope="module")
def exact(tracer):
    encoder = tracer.encoder()
    decoder, logits = tracer.decoder()
    return [*encoder, *decoder], logits


def test_layers_show_what_the_reference_did(float32, golden, exact):
    for layer, trace in zip(layer_plan(float32.cfg), exact[0], strict=True):
        name = f"L{layer.index}"
        streams = trace.streams[golden["positions"]]
        assert_abs(streams, golden[f"{name}.h_out"], FP32_LOGITS_ABS, name)
        np.testing.assert_array_equal(trace.experts, golden[f"{name}.gate.indices"])
        assert_abs(trace.weights, golden[f"{name}.gate.weights"], FP32_LOGITS_ABS, name)
        assert (trace.selected is None) == (layer.kv_source is None)
        assert (trace.gate is None) == (not layer.engram)
        if layer.selects:
            np.testing.assert_array_equal(trace.selected, golden[f"{name}.indexer.idx"])
        if layer.engram:
            assert_abs(trace.gate, golden[f"{name}.engram.gate"], FP32_LOGITS_ABS, name)
        np.testing.assert_allclose(np.asarray(trace.mixing).sum(axis=-2), 1, atol=1e-5)


def test_logits_are_those_of_the_model(goldens, exact):
    assert_abs(exact[1], goldens("e2e_fp32.npz")["p37.prefill_logits"], FP32_LOGITS_ABS)


def test_candidates_hold_the_newest_block(float32, tracer, exact):
    newest = np.asarray(exact[0][0].position) // float32.cfg.candidate_block_size
    assert (np.asarray(tracer.candidates()) == newest[:, None]).any(axis=1).all()


@pytest.mark.slow
def test_replay_of_both_sides(goldens, tracer, exact, float32):
    """The last rows behind the cut, and the last window of a hit in front of it."""
    golden, window = goldens("replay_fp32.npz"), float32.cfg.sliding_window
    _, logits = tracer.decoder(window)
    assert_abs(logits[-1], golden["p37.decoder.logits"][0], REPLAY_LOGITS_ABS)
    layers = tracer.encoder(HIT - window)
    assert layers[0].position.tolist() == list(range(HIT - window, 37))
    _, logits = tracer.decoder(window)
    assert_abs(logits[-1], golden[f"p37.hit{HIT}.logits"][0], REPLAY_LOGITS_ABS)
    tracer.encoder()  # as the other tests know it


def test_bad_rows_are_refused(float32, tracer, exact):
    fresh = Tracer(float32.model, float32.ops, [0, 1, 2])
    for call in (fresh.decoder, fresh.candidates):
        with pytest.raises(ValueError, match=r"encoder\(\) must run"):
            call()
    with pytest.raises(ValueError, match="start=1 must be 0"):
        fresh.encoder(1)
    with pytest.raises(ValueError, match="start=37 must"):
        tracer.encoder(37)
    for rows in (0, 38):
        with pytest.raises(ValueError, match=f"rows={rows} must"):
            tracer.decoder(rows)
    with pytest.raises(UserError, match="token id 512"):
        Tracer(float32.model, float32.ops, [512])
