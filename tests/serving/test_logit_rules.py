"""Penalties, bias and the minimum length against plain Python."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.batch import neutral_sampling
from serving.logit_rules import GENERATED, PROMPT, LogitRules, adjusted, counted

V = 6


def rules(batch: int = 1, **values) -> LogitRules:
    """Rules that change nothing but what is given, for every row."""
    neutral = neutral_sampling(batch, 2, 3).rules
    filled = {}
    for name, value in values.items():
        array = getattr(neutral, name).copy()
        given_values = np.asarray(value)
        array[..., : given_values.shape[-1] if given_values.ndim else None] = value
        filled[name] = array
    return replace(neutral, **filled)


def plain(logits, prompt, output, repetition, frequency, presence) -> list[float]:
    """The usual definition, one id at a time."""
    out = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * output.count(token) + presence * (token in output)
        out.append(logit)
    return out


def counts(prompt: list[int], output: list[int]) -> np.ndarray:
    array = np.zeros((1, V), np.int32)
    array[0, prompt] = PROMPT
    np.add.at(array[0], output, GENERATED)
    return array


IDS = st.lists(st.integers(0, V - 1), max_size=6)


@given(
    st.lists(st.floats(-4, 4, width=32), min_size=V, max_size=V),
    IDS,
    IDS,
    st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from([-1.0, 0.0, 0.5]),
    st.sampled_from([-2.0, 0.0, 0.25]),
)
@settings(max_examples=40, deadline=None)
def test_penalties_are_the_usual_ones(logits, prompt, output, repetition, frequency, presence):
    row = np.array([logits], np.float32)
    asked = rules(repetition=repetition, frequency=frequency, presence=presence)
    got = adjusted(jnp.asarray(row), asked, counts(prompt, output), np.zeros(1, np.int32))
    want = plain(row[0].tolist(), prompt, output, repetition, frequency, presence)
    np.testing.assert_allclose(got[0], want, rtol=1e-6, atol=1e-6)


def test_neutral_rules_change_no_bit():
    logits = np.random.default_rng(0).normal(size=(3, V)).astype(np.float32)
    seen = np.full((3, V), PROMPT + 3 * GENERATED, np.int32)
    got = adjusted(logits, rules(3), seen, np.full(3, 7, np.int32))
    assert np.asarray(got).tobytes() == logits.tobytes()


def test_bias_is_added_to_its_ids_alone():
    logits = np.zeros((1, V), np.float32)
    asked = rules(bias_ids=[4, 1], bias=[100.0, -100.0])
    got = adjusted(jnp.asarray(logits), asked, counts([], []), np.zeros(1, np.int32))
    np.testing.assert_array_equal(got, [[0, -100, 0, 0, 100, 0]])


@pytest.mark.parametrize(("position", "possible"), [(9, False), (10, True), (11, True)])
def test_stop_ids_are_impossible_before_the_minimum(position, possible):
    asked = rules(stop_ids=[3], min_position=10)
    got = adjusted(jnp.zeros((1, V)), asked, counts([], []), np.array([position]))
    assert np.isfinite(np.asarray(got)).sum() == V - (not possible)
    assert np.isfinite(got[0, 3]) == possible


def test_rows_do_not_touch_each_other():
    asked = rules(2, stop_ids=[3], bias_ids=[1], bias=[2.0])
    asked = replace(asked, min_position=np.array([5, 0], np.int32))
    none = np.zeros((2, V), np.int32)
    got = adjusted(jnp.zeros((2, V)), asked, none, np.array([3, 3], np.int32))
    np.testing.assert_array_equal(got, [[0, 2, 0, -np.inf, 0, 0], [0, 2, 0, 0, 0, 0]])


def test_live_tokens_are_counted_each_in_its_slot():
    slot, token = np.array([1, 0, 1], np.int32), np.array([2, 2, 2], np.int32)
    before = jnp.full((2, V), PROMPT, jnp.int32)
    got = np.asarray(counted(before, slot, token, np.array([True, True, False])))
    want = np.full((2, V), PROMPT)
    want[:, 2] += GENERATED
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("vocab", [6, 32, 65])
def test_allowed_bits(vocab):
    """Ids whose bit is not set are impossible, after everything else; each row has its own."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(3, vocab)).astype(np.float32)
    possible = rng.random((3, vocab)) < 0.5
    possible[2] = True
    words = np.zeros((3, -(-vocab // 32) * 32), bool)
    words[:, :vocab] = possible
    allowed = np.packbits(words, axis=1, bitorder="little").view(np.int32)
    neutral = replace(neutral_sampling(3, 2, 3, vocab).rules, allowed=allowed)
    seen = np.zeros((3, vocab), np.int32)
    got = np.asarray(adjusted(jnp.asarray(logits), neutral, seen, np.zeros(3, np.int32)))
    np.testing.assert_array_equal(got, np.where(possible, logits, -np.inf))
    everything = neutral_sampling(3, 2, 3, vocab).rules
    same = np.asarray(adjusted(jnp.asarray(logits), everything, seen, np.zeros(3, np.int32)))
    assert same.tobytes() == logits.tobytes()
