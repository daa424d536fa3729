"""Training computes what the product computes: the same function of the same weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv41_jax import compiling
from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.checkpoint.load import load_model, model_parameters
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.ops import local_ops
from dsv41_jax.score import all_logits, negative_log_likelihood
from dsv41_jax.training.drafts import drafts
from dsv41_jax.training.export import export
from dsv41_jax.training.forward import backbone
from dsv41_jax.training.losses import Trainee
from dsv41_jax.training.ops import training_ops
from dsv41_jax.training.rounding import Rounding
from pallas_kernels.numerics import FLOAT32, REFERENCE
from tests.dsv41_jax.support import PAGES, rows_for
from tests.dsv41_jax.training.support import BACKEND, SMALL, TOKEN_MAP, new_run
from tests.tolerances import FP32_BLOCK_ABS, FP32_LOGITS_ABS

IDS = np.random.default_rng(1).integers(0, SMALL.vocab_size, 96).astype(np.int32)
PLAIN = Rounding()
OPS = training_ops(FLOAT32, PLAIN)


def run(function: Any, model: Model, *arguments: Any) -> Any:
    graph, state = nnx.split(model)
    program = compiling.jit(lambda state, *a: function(nnx.merge(graph, state), *a))
    return program(state, *arguments)


def fresh(cfg: Config, token_map: np.ndarray) -> Model:
    model = Model(cfg, numerics=FLOAT32, rngs=nnx.Rngs(0))
    model.set_token_map(token_map)
    return model


@pytest.mark.slow
def test_logits_of_every_layer_kind():
    """Full at both ratios, candidates, Reindex, Engram: whole sequences against chunks."""
    model = fresh(SMALL, TOKEN_MAP)
    want = all_logits(model, local_ops(FLOAT32), IDS.tolist(), chunk=48)
    got = run(lambda m, ids: backbone(m, OPS, PLAIN, ids).logits, model, IDS[None])[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=FP32_LOGITS_ABS)
    assert np.abs(want).max() > 1


def test_sequences_must_fill_the_window():
    model = nnx.eval_shape(lambda: Model(SMALL, numerics=FLOAT32, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="multiple of 16"):
        backbone(model, OPS, PLAIN, jnp.zeros((1, 40), jnp.int32))


def test_logits_of_the_golden_model(tiny_dir, goldens):
    """The official reference's own logits, computed by the training forward."""
    arrays = goldens("e2e_fp32.npz")
    ids, positions = arrays["p96.input_ids"], arrays["p96.prefill_positions"]
    model = load_model(tiny_dir, numerics=FLOAT32)
    got = run(lambda m, ids: backbone(m, OPS, PLAIN, ids).logits, model, ids[None])[0]
    want = arrays["p96.prefill_logits"]
    np.testing.assert_allclose(got[positions], want, rtol=0, atol=FP32_LOGITS_ABS)


@pytest.mark.slow
def test_drafts_are_the_products_drafts():
    """The product's greedy block, given to the training stages as the true tokens."""
    model, start = fresh(SMALL, TOKEN_MAP), 48
    ops, rows = local_ops(FLOAT32), rows_for(IDS[:start], size=start)
    rows = jax.tree.map(jnp.asarray, rows)
    rows = type(rows)(**{**vars(rows), "previous": rows.previous[:, -1:]})
    empty = new_cache(SMALL, FLOAT32, CacheShape(1, PAGES, 16), drafts=True)
    zero = jnp.zeros(1, jnp.int32)

    def product(model, token):
        handoff, cache = model.encoder(ops, rows, empty)
        _, cache = model.decoder(ops, rows, handoff, cache)
        return model.draft(ops, token, zero, zero + start, zero, cache)

    want = run(product, model, jnp.asarray(IDS[start : start + 1]))
    tokens = np.array(IDS[:65])
    tokens[start + 1 : start + 6] = want.ids[0]

    def trained(model, tokens):
        main = backbone(model, OPS, PLAIN, tokens[:, :-1])
        return drafts(model, OPS, PLAIN, tokens, main.taps, jnp.asarray([start]))

    got = run(trained, model, jnp.asarray(tokens)[None])
    np.testing.assert_allclose(got.logits[0, 0], want.logits[0], rtol=0, atol=FP32_LOGITS_ABS)
    np.testing.assert_allclose(
        got.confidence[0, 0], want.confidence[0], rtol=0, atol=FP32_BLOCK_ABS
    )


@pytest.mark.slow
def test_each_loss_moves_its_own_part():
    """The index learns from the index loss alone, the draft stages from theirs, nothing else from
    either.
    """
    trainee = Trainee(SMALL, TOKEN_MAP, FLOAT32, remat=True)
    values = model_parameters(fresh(SMALL, TOKEN_MAP))
    tokens, start = jnp.asarray(IDS[None, :65]), jnp.asarray([5, 40])

    def losses(values, weights):
        found, _ = trainee.losses(values, tokens, start, jnp.asarray(False), None)
        parts = found.token, found.index, found.draft + found.confidence
        return sum(w * part for w, part in zip(weights, parts, strict=True))

    grads = compiling.jit(jax.grad(losses))
    moved = [
        {path for path, g in grads(values, jnp.eye(3)[i]).items() if np.asarray(g).any()}
        for i in range(3)
    ]
    index = {path for path in values if ".indexer." in path}
    drafted = {path for path in values if path.startswith("mtp.")}
    biases = {path for path in values if ".gate.bias" in path}
    assert moved[1] == index and moved[2] == drafted - biases
    assert moved[0] == values.keys() - index - drafted - biases


@pytest.mark.slow
def test_rounded_training_sees_the_released_models_likelihood(tmp_path):
    run = new_run(tmp_path / "run", SMALL, rounded=0.5)
    assert run.train()
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    export(run.state.values, SMALL, tmp_path / "out", tmp_path / "tokenizer.json")
    model = load_model(tmp_path / "out", numerics=REFERENCE)
    ids = run.corpus.held_out[:97].astype(np.int32)
    ids[0] = SMALL.pad_token_id  # a BOS would not count
    logits = all_logits(model, local_ops(REFERENCE), ids[:96].tolist(), chunk=48)
    want = negative_log_likelihood(np.concatenate([logits, logits[-1:]]), ids).mean()
    got = float(run._nats(run.state.values, ids[None], jnp.asarray(True)))
    assert abs(got - want) < 0.05
