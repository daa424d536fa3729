"""Acceptance on logits alone: greedy prefixes, the distribution of sampled blocks, rules."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from serving.acceptance import accept, simulated_acceptance
from serving.batch import neutral_sampling
from serving.logit_rules import GENERATED
from serving.sampler import Sampled, sample

VOCAB = 8
# Row i: the logits behind token i. Drafts are the best tokens of another table.
CHAIN = np.random.default_rng(5).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
GUESS = (CHAIN + np.random.default_rng(6).normal(size=CHAIN.shape)).argmax(axis=1)


@cache
def compiled(logprobs: int = 0):
    return jax.jit(lambda *args: accept(*args[:5], logprobs=logprobs, counts=lambda: args[5]))


def sampling_of(count: int, **values):
    """Sampling parameters with rules; ``values`` are single numbers or one a request."""
    sampling = neutral_sampling(count, 1, 2)
    for name, value in values.items():
        owner = sampling if hasattr(sampling, name) else sampling.rules
        getattr(owner, name)[:] = value
    return sampling


def block(first: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of rows that feed ``first`` and the drafts."""
    return CHAIN[np.concatenate([first[:, None], drafts], axis=1)]


def run(logits, sampling, drafts, *, live=None, position=None, counts=None, logprobs=0):
    count, n = drafts.shape
    live = np.full(count, n) if live is None else np.asarray(live)
    position = np.zeros(count, int) if position is None else np.asarray(position)
    counts = np.zeros((count, logits.shape[2]), np.int32) if counts is None else counts
    ints = [a.astype(np.int32) for a in (position, drafts, live)]
    return compiled(logprobs)(logits, sampling, *ints, counts)


def guesses(first: np.ndarray, n: int) -> np.ndarray:
    columns = [first]
    for _ in range(n):
        columns.append(GUESS[columns[-1]])
    return np.stack(columns[1:], axis=1)


def test_greedy_accepts_up_to_the_first_difference():
    """Every pattern of right and wrong drafts of a block of five."""
    right = [0]
    for _ in range(6):
        right.append(int(CHAIN[right[-1]].argmax()))
    patterns = list(product([True, False], repeat=5))
    drafts = np.array(
        [
            [t if ok else (t + 1) % VOCAB for t, ok in zip(right[1:6], p, strict=True)]
            for p in patterns
        ]
    )
    first = np.zeros(len(patterns), int)
    sampled, accepted = run(block(first, drafts), sampling_of(len(patterns)), drafts)
    for pattern, tokens, count in zip(patterns, np.asarray(sampled.token), accepted, strict=True):
        assert count == (pattern.index(False) if False in pattern else 5)
        assert tokens[: count + 1].tolist() == right[1 : count + 2]


def test_drafts_that_do_not_count_are_not_accepted():
    first = np.arange(VOCAB)
    drafts = np.stack([CHAIN[first].argmax(1)], 1)
    drafts = np.concatenate([drafts, CHAIN[drafts[:, 0]].argmax(1)[:, None]], 1)
    for live in range(3):
        _, accepted = run(block(first, drafts), sampling_of(VOCAB), drafts, live=[live] * VOCAB)
        assert accepted.tolist() == [live] * VOCAB


def test_a_block_without_drafts_is_one_token():
    sampled, accepted = run(
        block(np.arange(VOCAB), np.zeros((VOCAB, 0), int)),
        sampling_of(VOCAB),
        np.zeros((VOCAB, 0), int),
    )
    assert accepted.tolist() == [0] * VOCAB
    np.testing.assert_array_equal(sampled.token[:, 0], CHAIN.argmax(1))


ROWS, ALPHA, SHIFT = 32768, 1e-3, 0.08
OPTIONS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "top-p": {"temperature": 1.2, "top_p": 0.85},
    "top-k and min-p": {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "repetition": 1.4, "frequency": 0.7, "presence": 0.3},
    "bias": {"temperature": 1.0, "bias_ids": [1, 6], "bias": [1.5, -1.0]},
}


def exact(logits: np.ndarray, seen: list[int], options: dict) -> np.ndarray:
    """The distribution of the next token, in float64 and step by step."""
    z = logits.astype(np.float64).copy()
    occurred = np.bincount(seen, minlength=VOCAB)
    repetition = options.get("repetition", 1.0)
    z = np.where(occurred > 0, np.where(z > 0, z / repetition, z * repetition), z)
    z -= options.get("frequency", 0) * occurred + options.get("presence", 0) * (occurred > 0)
    for token, bias in zip(options.get("bias_ids", ()), options.get("bias", ()), strict=True):
        z[token] += bias
    z /= options["temperature"]
    order = np.argsort(-z, kind="stable")
    p = np.exp(z[order] - z[order[0]])
    keep = np.arange(VOCAB) < (options.get("top_k") or VOCAB)
    p = np.where(keep, p, 0)
    p /= p.sum()
    keep &= (np.cumsum(p) - p < options.get("top_p", 1.0)) & (
        z[order] >= z[order[0]] + np.log(options.get("min_p", 1e-30))
    )
    out = np.zeros(VOCAB)
    out[order] = np.where(keep, p, 0)
    return out / out.sum()


def triples(options: dict) -> np.ndarray:
    """How often each three tokens came out of speculative decoding with blocks of two drafts, from
    token 0 on, one seed a row.
    """
    seeds = np.arange(ROWS, dtype=np.uint32)
    out = np.zeros((ROWS, 4), int)
    length = np.zeros(ROWS, int)
    counts = np.zeros((ROWS, VOCAB), np.int32)
    rows, sampling = np.arange(ROWS), sampling_of(ROWS, seed=seeds, **options)
    while (length < 3).any():
        first = out[rows, length]
        drafts = guesses(first, 2)
        live = np.minimum(2, np.maximum(2 - length, 0))
        sampled, accepted = run(
            block(first, drafts), sampling, drafts, live=live, position=length, counts=counts
        )
        tokens = np.asarray(sampled.token)
        for i in range(3):
            new = (length < 3) & (i <= np.asarray(accepted))
            out[rows[new], length[new] + 1] = tokens[new, i]
            np.add.at(counts, (rows[new], tokens[new, i]), GENERATED)
            length = length + new
    return np.bincount(out[:, 1:] @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)


def expected(options: dict) -> np.ndarray:
    p = np.zeros((VOCAB,) * 3)
    for a, b in product(range(VOCAB), repeat=2):
        pa = exact(CHAIN[0], [], options)[a]
        p[a, b] = pa * exact(CHAIN[a], [a], options)[b] * exact(CHAIN[b], [a, b], options)
    return p.reshape(-1)


def p_value(observed: np.ndarray, p: np.ndarray) -> float:
    """Chi-square over triples; rare ones are one bin."""
    rare = p * ROWS < 10
    assert observed[p == 0].sum() == 0
    bins = [
        *zip(observed[~rare], p[~rare] * ROWS, strict=True),
        (observed[rare].sum(), p[rare].sum() * ROWS),
    ]
    seen = np.array([bin for bin in bins if bin[1] > 0])
    return stats.chisquare(seen[:, 0], seen[:, 1] * seen[:, 0].sum() / seen[:, 1].sum()).pvalue


@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_have_the_distribution_of_plain_sampling(name):
    """Triples of 32768 seeds. Power: a shift of Cohen's w = 0.08 is found with over 95 %."""
    p = expected(OPTIONS[name])
    freedom = (p * ROWS >= 10).sum()
    power = stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, ROWS * SHIFT**2)
    assert power > 0.95
    assert p_value(triples(OPTIONS[name]), p) > ALPHA


def test_the_chi_square_finds_a_token_that_is_not_drawn_from_what_is_left():
    """The usual mistake: after a rejection the token comes from p with the draft still in it."""
    p, draft, rng = exact(CHAIN[0], [], OPTIONS["plain"]), GUESS[0], np.random.default_rng(0)
    left = np.where(np.arange(VOCAB) == draft, 0, p)
    accepted = rng.random(ROWS) < p[draft]
    for rest, good in ((left / left.sum(), True), (p, False)):
        drawn = np.where(accepted, draft, rng.choice(VOCAB, ROWS, p=rest))
        observed = np.bincount(drawn, minlength=VOCAB)
        assert (stats.chisquare(observed, p * ROWS).pvalue > ALPHA) == good


def test_draws_are_those_of_the_plain_sampler():
    """Seeds, positions, penalties: a block gives the tokens that single steps would."""
    count, options = 64, {"temperature": 1.0, "frequency": 0.8, "repetition": 1.2}
    sampling = sampling_of(count, seed=np.arange(count), **options)
    first = np.arange(count) % VOCAB
    counts = np.zeros((count, VOCAB), np.int32)
    want, token = [], first
    for step in range(4):
        position = (first * 3 + step).astype(np.int32)
        token = np.asarray(
            sample(CHAIN[token], sampling, position, logprobs=0, counts=lambda: counts).token
        )
        counts[np.arange(count), token] += GENERATED
        want.append(token)
    want = np.stack(want, 1)
    for right in range(4):
        drafts = want[:, :3].copy()
        drafts[:, right:] = (drafts[:, right:] + 1) % VOCAB
        out, accepted = run(block(first, drafts), sampling, drafts, position=first * 3)
        assert accepted.tolist() == [right] * count
        np.testing.assert_array_equal(np.asarray(out.token)[:, : right + 1], want[:, : right + 1])


def test_log_probabilities_are_those_of_each_row():
    first, drafts = np.arange(VOCAB), guesses(np.arange(VOCAB), 2)
    logits = block(first, drafts)
    sampled, _ = run(logits, sampling_of(VOCAB, temperature=0.5, top_k=2), drafts, logprobs=3)
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :3]
    np.testing.assert_array_equal(sampled.top_ids, order)
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(want, order, -1), atol=1e-6)
    picked = np.take_along_axis(want, np.asarray(sampled.token)[..., None], -1)[..., 0]
    np.testing.assert_allclose(sampled.logprob, picked, atol=1e-6)


def test_an_early_stop_id_is_impossible_in_mid_block():
    """min_position holds for each row's own position."""
    stop = int(CHAIN[0].argmax())
    logits = np.tile(CHAIN[0], (1, 4, 1))
    sampling = sampling_of(1, stop_ids=stop, min_position=12)
    sampled, _ = run(logits, sampling, np.zeros((1, 3), int), position=[10])
    assert (np.asarray(sampled.token)[0] == stop).tolist() == [False, False, True, True]


@pytest.mark.parametrize("tokens", [1.0, 3.51, 6.0])
def test_simulated_acceptance_has_the_mean_it_is_told(tokens):
    count = 4000
    drafts, seed = np.tile(np.arange(5), (count, 1)), np.arange(count, dtype=np.uint32)
    none = np.zeros((count, 6, 0))
    sampled = Sampled(jnp.full((count, 6), 7), jnp.zeros((count, 6)), none, none)
    live = np.full(count, 5)
    out, accepted = simulated_acceptance(sampled, drafts, live, np.arange(count), seed, tokens)
    accepted = np.asarray(accepted)
    assert set(accepted) <= {int(tokens - 1), int(np.ceil(tokens - 1))}
    assert 1 + accepted.mean() == pytest.approx(tokens, abs=0.05)
    for row, taken in zip(np.asarray(out.token)[:50], accepted[:50], strict=True):
        assert row.tolist() == [*range(taken), *[7] * (6 - taken)]
    _, short = simulated_acceptance(sampled, drafts, live * 0, np.arange(count), seed, tokens)
    assert not np.asarray(short).any()
