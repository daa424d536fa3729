"""``pool_pairs`` against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compress.cases import CORNERS
from pallas_kernels.compress.ref import pool_pairs
from tests.tolerances import F32_REL


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_pools_by_channel(case, rng):
    u, g = (rng.standard_normal((2, case.groups, 2, case.width)).astype(np.float32) for _ in "ug")
    g *= 5
    got = np.asarray(pool_pairs(jnp.asarray(u), jnp.asarray(g)), np.float64)
    first = 1 / (1 + np.exp(g[..., 1, :].astype(np.float64) - g[..., 0, :]))
    want = first * u[..., 0, :] + (1 - first) * u[..., 1, :]
    assert got.shape == (2, case.groups, case.width)
    assert np.abs(got - want).max(initial=0) < F32_REL * 5


def test_extreme_gates_choose_one_token():
    u = jnp.asarray([[[1.0], [2.0]]] * 3)
    g = jnp.asarray([[[500.0], [-500.0]], [[-1e30], [1e30]], [[7.0], [7.0]]])
    assert np.array_equal(pool_pairs(u, g)[:, 0], [1, 2, 1.5])


def test_order_of_the_two_tokens_does_not_matter(rng):
    u, g = (jnp.asarray(rng.standard_normal((4, 2, 8)), jnp.float32) for _ in "ug")
    assert np.array_equal(pool_pairs(u, g), pool_pairs(u[:, ::-1], g[:, ::-1]))
