"""Top-k, top-p and min-p against the sorted form, which is their specification."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving import filters
from serving.batch import neutral_sampling
from serving.filters import kept_by_search
from serving.sampler import sample

VOCAB = 640


@jax.jit
def sorted_sample(logits, sampling, position):
    """Tokens as ``sample`` draws them, every row filtered by a sort."""

    def draw(logits, one, position):
        scaled = (logits - jnp.max(logits)) / jnp.where(one.temperature > 0, one.temperature, 1)
        order = jnp.argsort(-scaled, stable=True)
        rank = jnp.arange(scaled.shape[0])
        within_k = (one.top_k <= 0) | (rank < one.top_k)
        p = jax.nn.softmax(jnp.where(within_k, scaled[order], -jnp.inf))
        within_p = (jnp.cumsum(p) - p < one.top_p) | (rank == 0) | (one.top_p >= 1)
        within_min = scaled[order] >= scaled[order[0]] + jnp.log(one.min_p)
        inside = jnp.zeros(scaled.shape, bool).at[order].set(within_k & within_p & within_min)
        key = jax.random.fold_in(jax.random.key(one.seed), position)
        return jax.random.categorical(key, jnp.where(inside, scaled, -jnp.inf))

    drawn = jax.vmap(draw)(logits, sampling, position)
    return jnp.where(sampling.temperature > 0, drawn, jnp.argmax(logits, axis=-1))


@cache
def compiled(by: str):
    """``sample`` as a CPU runs it, or as a GPU does."""

    def run(*inputs):
        with pytest.MonkeyPatch.context() as patch:
            if by == "search":
                patch.setattr(filters, "kept_by_sort", filters.kept_by_search)
            return sample(*inputs, logprobs=0).token

    return jax.jit(run)


KINDS = ("spread", "flat", "peaked", "few values", "coarse", "masked")


def logits_of(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    x = rng.normal(size=shape).astype(np.float32)
    x = {
        "spread": 3 * x,
        "flat": 1e-3 * x,
        "peaked": 40 * x,
        "few values": np.round(x),
        "coarse": (8 * x).astype(jnp.bfloat16).astype(np.float32),
        "masked": np.where(x < 1, -np.inf, 3 * x).astype(np.float32),
    }[kind]
    x[:, 0] = np.where(np.isneginf(x).all(axis=1), 0, x[:, 0])
    return x


def options(rng: np.random.Generator, rows: int):
    """Every combination of the filters, some of them off."""
    sampling = neutral_sampling(rows, 0, None)
    sampling.temperature[:] = rng.choice([0, 0.3, 0.7, 1, 1.5], rows)
    sampling.top_k[:] = rng.choice([0, 0, 1, 2, 7, 50, VOCAB - 1, VOCAB, 2**31 - 1], rows)
    sampling.top_p[:] = rng.choice([1, 1, 0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.99], rows)
    sampling.min_p[:] = rng.choice([0, 0, 0, 0.02, 0.3], rows)
    sampling.seed[:] = rng.integers(0, 2**32, rows, np.uint32)
    return sampling


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", ["sort", "search"])
def test_tokens_are_those_of_a_sort_of_every_row(kind, by):
    rng = np.random.default_rng(KINDS.index(kind))
    rows = 512
    logits, position = logits_of(kind, rng, (rows, VOCAB)), rng.integers(0, 1 << 20, rows)
    inputs = logits, options(rng, rows), position.astype(np.int32)
    np.testing.assert_array_equal(compiled(by)(*inputs), sorted_sample(*inputs))


FILTERS = {
    "none": {},
    "greedy": {"temperature": 0},
    "top-k": {"top_k": 9},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 30, "top_p": 0.8, "min_p": 0.01},
}


@pytest.mark.parametrize("kind", ["coarse", "few values"])
def test_a_row_keeps_what_it_keeps_beside_neighbours_with_top_k(kind):
    rows = 256
    logits = logits_of(kind, np.random.default_rng(6), (rows, VOCAB))
    scaled = logits - logits.max(axis=1, keepdims=True)
    top_k, top_p = np.zeros(rows, np.int32), np.linspace(0.05, 0.95, rows, dtype=np.float32)
    search = jax.jit(kept_by_search)
    alone = np.asarray(search(scaled, top_k, top_p))
    top_k[::2] = 9
    np.testing.assert_array_equal(np.asarray(search(scaled, top_k, top_p))[1::2], alone[1::2])


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("by", ["sort", "search"])
def test_what_neighbours_ask_for_changes_nothing(name, by):
    """The branches that a batch needs depend on all of its rows, a row's token does not."""
    rng = np.random.default_rng(5)
    logits, position = logits_of("spread", rng, (64, VOCAB)), np.arange(64, dtype=np.int32)
    sampling = neutral_sampling(64, 0, None)
    sampling.temperature[:], sampling.seed[:] = 1, np.arange(64)
    for field, value in FILTERS[name].items():
        getattr(sampling, field)[:] = value
    alone = np.asarray(compiled(by)(logits, sampling, position))
    np.testing.assert_array_equal(alone, sorted_sample(logits, sampling, position))
    mixed = jax.tree.map(np.copy, sampling)
    for field in ("temperature", "top_k", "top_p", "min_p"):
        getattr(mixed, field)[::2] = getattr(options(rng, 64), field)[::2]
    among = np.asarray(compiled(by)(logits, mixed, position))
    np.testing.assert_array_equal(among[1::2], alone[1::2])


@cache
def kept(by: str):
    return jax.jit(getattr(filters, f"kept_by_{by}"))


@pytest.mark.parametrize("kind", KINDS)
def test_kept_ids_are_those_of_the_sort(kind):
    """Where no sum of probabilities is so near top_p that its rounding decides."""
    rng = np.random.default_rng(7)
    logits = logits_of(kind, rng, (1024, VOCAB))
    scaled = logits - logits.max(axis=1, keepdims=True)
    drawn = options(rng, 1024)
    top_k, top_p = drawn.top_k, drawn.top_p
    order = np.argsort(-scaled, axis=1, kind="stable")
    inside = (top_k <= 0)[:, None] | (np.arange(VOCAB) < top_k[:, None])
    p = np.exp(np.take_along_axis(scaled, order, 1).astype(np.float64)) * inside
    before = np.cumsum(p, axis=1) - p
    near = np.abs(before / p.sum(axis=1, keepdims=True) - top_p[:, None]) < 1e-6
    clear = ~(near & (before > 0)).any(axis=1) | (top_p == 1)
    assert clear.mean() > 0.9
    got, want = (np.asarray(kept(by)(scaled, top_k, top_p)) for by in ("search", "sort"))
    np.testing.assert_array_equal(got[clear], want[clear])
    assert 0 < want.mean() < 1


def test_a_row_without_reports_reports_nothing():
    sampling = neutral_sampling(4, 0, None)
    sampling.reports[1] = False
    logits = np.random.default_rng(1).normal(size=(4, VOCAB)).astype(np.float32)
    run = jax.jit(lambda *inputs: sample(*inputs, logprobs=3))
    found = run(logits, sampling, np.zeros(4, np.int32))
    assert found.top_ids[1].tolist() == [0, 1, 2]
    assert np.isneginf(found.top_logprobs[1]).all()
    order = np.argsort(-logits, axis=1)[:, :3]
    np.testing.assert_array_equal(found.top_ids[::2], order[::2])
    silent = run(logits, replace(sampling, reports=np.zeros(4, bool)), np.zeros(4, np.int32))
    assert silent.top_ids.tolist() == [[0, 1, 2]] * 4
    assert np.isneginf(silent.top_logprobs).all()
    np.testing.assert_array_equal(silent.logprob, found.logprob)


@pytest.mark.parametrize(("vocabulary", "count"), [(5000, 20), (4096, 20), (2048, 7), (4500, 4500)])
def test_highest_is_top_k(vocabulary, count):
    """Ties to the lowest id, across parts too; rows of nothing but -inf name real ids."""
    rng = np.random.default_rng(vocabulary)
    values = np.round(2 * rng.normal(size=(2, 3, vocabulary))).astype(np.float32)
    values[0, 1], values[1, 2, 5:] = 1, -np.inf
    values[1, 1] = -np.inf
    got, want = filters.highest(values, count), jax.lax.top_k(values, count)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
