"""Rotary embedding against complex float64 arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotate import rotate
from tests.tolerances import F32_REL

POSITIONS = np.array([0, 1, 127, 128, 4095, 100_000])


def angles(rope: int, positions=POSITIONS):
    angle = positions[:, None] * 1e4 ** (-np.arange(0, rope, 2) / rope)
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32), angle


@pytest.mark.parametrize(("width", "rope"), [(512, 64), (128, 64), (64, 32), (32, 32), (6, 2)])
@pytest.mark.parametrize("inverse", [False, True])
def test_pairs_turn_by_their_angle(width, rope, inverse, rng):
    cos, sin, angle = angles(rope)
    x = rng.standard_normal((3, len(POSITIONS), width))
    got = np.asarray(rotate(jnp.asarray(x, jnp.float32), cos, sin, inverse=inverse))
    x = x.astype(np.float32).astype(np.float64)
    tail = x[..., -rope:]
    turned = (tail[..., 0::2] + 1j * tail[..., 1::2]) * np.exp((-1j if inverse else 1j) * angle)
    want = np.stack([turned.real, turned.imag], -1).reshape(tail.shape)
    assert np.array_equal(got[..., :-rope], x[..., :-rope])
    assert np.abs(got[..., -rope:] - want).max() < F32_REL * np.abs(x).max()


def test_inverse_undoes_it(rng):
    cos, sin, _ = angles(64)
    x = jnp.asarray(rng.standard_normal((len(POSITIONS), 512)), jnp.float32)
    back = rotate(rotate(x, cos, sin), cos, sin, inverse=True)
    assert np.abs(np.asarray(back - x)).max() < F32_REL * 5


def test_a_shift_of_all_positions_leaves_scores_unchanged(rng):
    q, k = (jnp.asarray(rng.standard_normal((len(POSITIONS), 64)), jnp.float32) for _ in range(2))
    scores = []
    for shift in (0, 77):
        cos, sin, _ = angles(64, np.arange(len(POSITIONS)) * 3 + shift)
        scores.append(np.asarray(rotate(q, cos, sin) @ rotate(k, cos, sin).T))
    assert np.abs(scores[0] - scores[1]).max() < 1e-5 * np.abs(scores[0]).max()


def test_bfloat16_is_rounded_once(rng):
    cos, sin, _ = angles(32)
    x = jnp.asarray(rng.standard_normal((len(POSITIONS), 64)), jnp.bfloat16)
    want = rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16)
    assert np.array_equal(rotate(x, cos, sin), want)
