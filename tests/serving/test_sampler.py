"""Sampling on logits alone: greedy, distributions, filters, seeds, log probabilities."""

from functools import cache

import jax
import numpy as np
import pytest
from scipy import stats

from serving.programs import Bucket
from serving.request import Request
from serving.sampler import Sampled, sample
from tests.serving.support import build_sampling, log_softmax

ROWS, VOCAB = 4096, 8
LOGITS = np.log(np.array([0.30, 0.02, 0.20, 0.08, 0.15, 0.05, 0.16, 0.04], np.float32))
ONE = (1,)


@cache
def _compiled(logprobs: int):
    return jax.jit(lambda *args: sample(*args, logprobs=logprobs))


def draw(logits, requests, positions=None, logprobs: int = 0) -> Sampled:
    """``sample`` of one row of logits a request."""
    logits = np.asarray(logits, np.float32)
    positions = np.arange(len(logits)) if positions is None else np.asarray(positions)
    sampling = build_sampling(requests, Bucket(len(logits), 1, 1))
    return _compiled(logprobs)(logits, sampling, positions.astype(np.int32))


def counts(seeds=None, positions=None, **options) -> np.ndarray:
    """How often each id is drawn in 4096 rows of the same logits."""
    seeds = range(ROWS) if seeds is None else seeds
    requests = [Request(ONE, 1, seed=seed, **options) for seed in seeds]
    out = draw(np.tile(LOGITS, (ROWS, 1)), requests, positions)
    return np.bincount(np.asarray(out.token), minlength=VOCAB)


def expected(temperature: float = 1.0, kept: tuple = tuple(range(VOCAB))) -> np.ndarray:
    p = np.zeros(VOCAB)
    p[list(kept)] = np.exp(LOGITS[list(kept)].astype(np.float64) / temperature)
    return p / p.sum()


def assert_distribution(observed: np.ndarray, p: np.ndarray) -> None:
    assert observed[p == 0].sum() == 0
    seen = p > 0
    if seen.sum() > 1:
        assert stats.chisquare(observed[seen], p[seen] * observed.sum()).pvalue > 1e-3


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [-9, -8, -7, -7], [0.0, -0.0, -1, -2]])
    assert draw(logits, [Request(ONE, 1)] * 4).token.tolist() == [1, 0, 2, 0]


def test_greedy_ignores_seed_and_filters():
    logits = np.random.default_rng(0).normal(size=(16, 64))
    requests = [Request(ONE, 1, seed=i, top_k=3, top_p=0.5) for i in range(16)]
    np.testing.assert_array_equal(draw(logits, requests).token, logits.argmax(axis=1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_temperature(temperature):
    assert_distribution(counts(temperature=temperature), expected(temperature))


def test_the_draws_of_one_seed_at_all_positions():
    observed = counts(seeds=[7] * ROWS, positions=np.arange(ROWS), temperature=1.0)
    assert_distribution(observed, expected())


def test_neighbouring_positions_are_independent():
    requests = [Request(ONE, 1, temperature=1.0, seed=5)] * ROWS
    token = np.asarray(draw(np.tile(LOGITS, (ROWS, 1)), requests).token)
    pairs = np.zeros((VOCAB, VOCAB))
    np.add.at(pairs, (token[:-1:2], token[1::2]), 1)
    common = [0, 2, 4, 6]  # ids drawn often enough for the test
    assert stats.chi2_contingency(pairs[np.ix_(common, common)]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, (0,)),
        ({"top_k": 3}, (0, 2, 6)),
        ({"top_k": VOCAB}, range(VOCAB)),
        ({"top_k": 2**31 - 1}, range(VOCAB)),
        ({"top_p": 1e-9}, (0,)),
        ({"top_p": 0.29}, (0,)),
        ({"top_p": 0.31}, (0, 2)),
        ({"top_p": 0.70}, (0, 2, 6, 4)),
        ({"top_p": 1.0}, range(VOCAB)),
        # Probabilities are renormalised after top-k: 0.30 / 0.66 is more than 0.45.
        ({"top_k": 3, "top_p": 0.45}, (0,)),
        ({"top_k": 3, "top_p": 0.46}, (0, 2)),
        ({"top_k": 2, "top_p": 0.99}, (0, 2)),
    ],
    ids=str,
)
def test_filters_keep_and_renormalise(options, kept):
    """The id that crosses top_p stays."""
    assert_distribution(counts(temperature=1.0, **options), expected(kept=tuple(kept)))


def test_top_p_is_taken_after_the_temperature():
    """At temperature 2 the best id holds less than at 1."""
    p = expected(2.0)
    assert p[0] < 0.25 < expected()[0]
    assert_distribution(
        counts(temperature=2.0, top_p=0.25), expected(2.0, tuple(np.argsort(-p)[:2]))
    )


def test_equal_logits_at_the_edge_of_a_filter_keep_the_lowest_ids():
    requests = [Request(ONE, 1, temperature=1.0, seed=i, top_k=2) for i in range(256)]
    assert set(draw(np.zeros((256, 8)), requests).token.tolist()) == {0, 1}
    requests = [Request(ONE, 1, temperature=1.0, seed=i, top_p=0.3) for i in range(256)]
    assert set(draw(np.zeros((256, 8)), requests).token.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 2e-38, 1e-40])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = np.random.default_rng(1).normal(size=(64, 128)) * 30
    requests = [Request(ONE, 1, temperature=temperature, seed=i) for i in range(64)]
    np.testing.assert_array_equal(draw(logits, requests).token, logits.argmax(axis=1))


def test_draws_depend_on_logits_seed_and_position_alone():
    """Not on place or neighbours, not even on one whose logits are NaN."""
    rng = np.random.default_rng(2)
    logits, positions = rng.normal(size=(32, 64)), rng.integers(0, 100_000, 32)
    requests = [Request(ONE, 1, temperature=0.5 + i / 16, seed=i, top_p=0.9) for i in range(32)]
    want = np.asarray(draw(logits, requests, positions).token)
    order = rng.permutation(32)
    moved = draw(logits[order], [requests[i] for i in order], positions[order])
    np.testing.assert_array_equal(moved.token, want[order])
    logits[::2] = np.nan
    np.testing.assert_array_equal(draw(logits, requests, positions).token[1::2], want[1::2])


@pytest.mark.parametrize("other", ["seed", "position"])
def test_another_seed_or_position_is_another_draw(other):
    logits = np.zeros((64, 512))
    seeds = np.arange(64) if other == "seed" else np.full(64, 3)
    positions = np.arange(64) if other == "position" else np.full(64, 3)
    requests = [Request(ONE, 1, temperature=1.0, seed=int(seed)) for seed in seeds]
    assert len(set(draw(logits, requests, positions).token.tolist())) > 50


def test_the_largest_seed():
    requests = [Request(ONE, 1, temperature=1.0, seed=s) for s in (0, 2**31, 2**32 - 1)]
    tokens = draw(np.zeros((3, 512)), requests, [1, 1, 1]).token.tolist()
    assert len(set(tokens)) == 3


def test_logprobs_are_those_of_the_unfiltered_logits():
    """Best first, the lowest id among equals; temperature and filters do not change them."""
    logits = np.random.default_rng(3).normal(size=(16, 64)).astype(np.float32)
    logits[:, 40] = logits[:, 20]
    requests = [Request(ONE, 1, temperature=2.0, seed=i, top_k=5) for i in range(16)]
    out = draw(logits, requests, logprobs=64)
    want = log_softmax(logits)
    order = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top_logprobs, np.take_along_axis(want, order, 1), atol=1e-5)
    picked = np.take_along_axis(want, np.asarray(out.token)[:, None], 1)[:, 0]
    np.testing.assert_allclose(out.logprob, picked, atol=1e-5)


def test_no_alternatives():
    out = draw(np.zeros((3, 8)), [Request(ONE, 1)] * 3)
    assert out.top_ids.shape == out.top_logprobs.shape == (3, 0)
    np.testing.assert_allclose(out.logprob, -np.log(8), atol=1e-6)
