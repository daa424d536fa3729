"""Gradients flow through the float32 references to every parameter that a loss can move."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv41_jax import compiling
from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.ops import local_ops
from pallas_kernels.numerics import FLOAT32
from tests.dsv41_jax.support import PAGES, rows_for

TINY = Config.preset("tiny")
# One layer of each kind and one draft stage: enough paths, a quarter of the compile time.
SMALL = replace(
    TINY,
    num_hidden_layers=5,
    compress_ratios=(0, 0, 2, 1, 1, 0),
    kv_source_layer_ids=(2, 3),
    index_source_layer_ids=(2, 3, 4),
    candidate_source_layer_id=3,
    engram_layer_ids=TINY.engram_layer_ids[:1],
    engram_num_embeddings=TINY.engram_num_embeddings[:1],
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(4,),
    hc_sinkhorn_iters=3,
    # Every entry is selected: a small step must not flip a choice.
    index_topk=32,
    candidate_topk_blocks=16,
    swiglu_limit=20.0,
)
T = 20  # more than the window, an even number of groups
IDS = np.random.default_rng(3).integers(0, TINY.vocab_size, T)
# They decide which entries, experts or blocks count, and nothing else.
DISCRETE = re.compile(r"indexer\.|gate\.bias")


def drawn_by_numpy() -> Model:
    """A random model; JAX would compile a program for every shape that it draws."""
    rng = np.random.default_rng(0)

    def normal(_key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "normal", normal)
        return Model(SMALL, numerics=FLOAT32, rngs=nnx.Rngs(0))


class Problem:
    """A random linear function of backbone and draft outputs, and its gradient by name."""

    def __init__(self) -> None:
        model = drawn_by_numpy()
        model.set_token_map(np.arange(TINY.vocab_size))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        paths = [path for path, _ in nnx.to_flat_state(params)]
        self.names = [".".join(map(str, path)) for path in paths]
        leaves, tree = jax.tree.flatten(params)
        self.values = dict(zip(self.names, map(np.asarray, leaves), strict=True))
        for name, value in self.values.items():
            if name.endswith("gate.bias"):  # for the same reason
                self.values[name] = np.arange(value.size, dtype=np.float32)
        rng = np.random.default_rng(0)
        shapes = ((1, T, SMALL.vocab_size), (1, 5, SMALL.vocab_size), (1, 5))
        mix = [jnp.asarray(rng.standard_normal(shape) / 50, jnp.float32) for shape in shapes]
        ops, rows = local_ops(FLOAT32), rows_for(IDS, size=T)
        cache = new_cache(SMALL, FLOAT32, CacheShape(1, PAGES, 16), drafts=True)
        zero = jnp.zeros(1, jnp.int32)

        def loss(values: dict[str, jax.Array]) -> jax.Array:
            model = nnx.merge(
                graph, jax.tree.unflatten(tree, [values[n] for n in self.names]), rest
            )
            handoff, new = model.encoder(ops, rows, cache)
            features, new = model.decoder(ops, rows, handoff, new)
            draft = model.draft(ops, zero + 3, zero, zero + T, zero, new)
            outputs = model.logits(ops, features.h, features.pre), draft.logits, draft.confidence
            return sum(jnp.sum(a * b) for a, b in zip(mix, outputs, strict=True))

        self.run = compiling.jit(jax.value_and_grad(loss))
        self.grads = {name: np.asarray(g) for name, g in self.run(self.values)[1].items()}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


def test_every_gradient_is_finite(problem):
    assert all(np.isfinite(g).all() for g in problem.grads.values())


def test_every_parameter_is_reached(problem):
    still = {name for name, g in problem.grads.items() if not g.any()}
    assert still == {name for name in problem.grads if DISCRETE.search(name)}
    assert len(problem.grads) > 150


def test_tables_get_gradients_in_the_rows_looked_up(problem):
    embed = set(np.flatnonzero(np.abs(problem.grads["embed.weight"]).sum(-1)).tolist())
    assert embed == {*IDS.tolist(), 3, SMALL.dspark_noise_token_id}
    table = np.abs(problem.grads["layers.1.engram.embed.weight"]).sum(-1)
    assert 0 < (table > 0).sum() <= 6 * T


@pytest.mark.parametrize("seed", [1, 2])
def test_finite_differences(problem, seed):
    """Along a random direction over all parameters, each in proportion to its own size."""
    rng = np.random.default_rng(seed)
    direction = {
        name: rng.standard_normal(v.shape).astype(np.float32) * (float(v.std()) + 0.01)
        for name, v in problem.values.items()
        if not DISCRETE.search(name)
    }
    want = sum((problem.grads[n].astype(np.float64) * d).sum() for n, d in direction.items())

    def moved(step: float) -> float:
        near = {name: problem.values[name] + step * d for name, d in direction.items()}
        return float(problem.run(problem.values | near)[0])

    step = 2e-4
    got = (moved(step) - moved(-step)) / (2 * step)
    assert got == pytest.approx(want, rel=0.02, abs=0.02)
