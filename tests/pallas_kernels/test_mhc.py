"""Hyper-connections against a float64 oracle of ARCHITECTURE section 7."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.mhc.cases import CORNERS
from pallas_kernels.mhc.op import build_coefficients, build_collapse, build_expand
from pallas_kernels.mhc.ref import sinkhorn, split_mixes
from tests.tolerances import F32_REL, SINKHORN_ABS

coefficients, collapse, expand = (
    build("reference") for build in (build_coefficients, build_collapse, build_expand)
)
EPS, NORM_EPS = 1e-6, 1e-20


def oracle_sinkhorn(comb, iters=20, eps=EPS):
    comb = np.exp(comb - comb.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return comb


def oracle_split(mixes, base, scale, s, iters=20):
    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    pre = sigmoid(mixes[..., :s] * scale[0] + base[:s]) + EPS
    post = 2 * sigmoid(mixes[..., s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[..., 2 * s :] * scale[2] + base[2 * s :]).reshape(*mixes.shape[:-1], s, s)
    return pre, post, oracle_sinkhorn(comb, iters)


def close(got, want, bound):
    assert got.dtype == jnp.float32 and got.shape == want.shape
    assert np.abs(np.asarray(got, np.float64) - want).max(initial=0) <= bound


def test_golden_split_and_sinkhorn(goldens):
    """Tight enough to see a misplaced eps: on pre, on post, after the first softmax."""
    g = goldens("quant_vectors.npz")
    run = compiling.jit(lambda *a: split_mixes(*a, streams=4, iters=20, eps=EPS))
    got = run(*(jnp.asarray(g[f"sinkhorn.{name}"]) for name in ("mixes", "base", "scale")))
    for name, value in zip(("pre", "post", "comb"), got, strict=True):
        close(value, g[f"sinkhorn.{name}"], SINKHORN_ABS)


def test_pre_has_eps_and_post_has_none():
    """Saturated mixes: the sigmoids are 0, so only the eps is left."""
    mixes = jnp.full((1, 24), -200.0).at[0, 8:].set(0)
    pre, post, _ = split_mixes(mixes, jnp.zeros(24), jnp.ones(3), streams=4, iters=20, eps=EPS)
    assert np.array_equal(pre, np.full((1, 4), np.float32(EPS)))
    assert not np.asarray(post).any()


def test_eps_after_the_first_softmax():
    """One step on an almost one-hot matrix: without that eps the small entries would be 0."""
    comb = sinkhorn(200 * jnp.eye(4), iters=1, eps=EPS)
    close(comb, oracle_sinkhorn(200 * np.eye(4), 1), SINKHORN_ABS)
    assert np.allclose(np.asarray(comb)[0, 1], EPS, rtol=1e-4)


@pytest.mark.parametrize("spread", [0.1, 1, 10, 60])
def test_mixing_matrix_of_random_inputs(spread, rng):
    comb = (rng.standard_normal((1000, 4, 4)) * spread).astype(np.float32)
    got = sinkhorn(jnp.asarray(comb), iters=20, eps=EPS)
    close(got, oracle_sinkhorn(comb.astype(np.float64)), 1e-4 if spread > 10 else 1e-5)
    columns = np.asarray(got).sum(-2)
    assert np.abs(columns - 1).max() < 4 * EPS  # it ends on the columns
    if spread <= 1:
        assert np.abs(np.asarray(got).sum(-1) - 1).max() < 1e-3


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_coefficients(case, dtype, rng):
    s, d = case.streams, case.width
    h = jnp.asarray(rng.standard_normal((case.rows, s, d)) * 3, dtype)
    fn = (rng.standard_normal((case.mixes, s * d)) * 0.05).astype(np.float32)
    base, scale = (rng.standard_normal(n).astype(np.float32) for n in (case.mixes, 3))
    got = coefficients(
        h, *map(jnp.asarray, (fn, base, scale)), iters=case.iters, eps=EPS, norm_eps=NORM_EPS
    )
    v = np.asarray(h, np.float64).reshape(case.rows, s * d)
    mixes = v @ fn.T.astype(np.float64) / np.sqrt((v**2).mean(-1, keepdims=True) + NORM_EPS)
    for value, want in zip(got, oracle_split(mixes, base, scale, s, case.iters), strict=True):
        close(value, want, 10 * F32_REL)


def test_norm_eps_keeps_tiny_streams_at_full_size(rng):
    """eps is 1e-20: streams of 1e-6 still give mixes of order 1. With 1e-6 they would vanish."""
    h = rng.standard_normal((3, 4, 64))
    fn = jnp.asarray(rng.standard_normal((24, 256)), jnp.float32)

    def run(h):
        return coefficients(
            jnp.asarray(h, jnp.float32),
            fn,
            jnp.zeros(24),
            jnp.ones(3),
            iters=20,
            eps=EPS,
            norm_eps=1e-20,
        )

    for big, small in zip(run(h), run(1e-6 * h), strict=True):
        assert np.allclose(big, small, atol=1e-5)
    assert np.asarray(run(h)[0]).std() > 0.1


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_collapse_and_expand(case, dtype, rng):
    r, s, d = case.rows, case.streams, case.width
    h, y = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((r, s, d), (r, d)))
    pre, post = (jnp.asarray(rng.random((r, s)), jnp.float32) for _ in "ab")
    comb = jnp.asarray(rng.random((r, s, s)), jnp.float32)
    h64, y64, pre64, post64, comb64 = (np.asarray(a, np.float64) for a in (h, y, pre, post, comb))
    joined = np.einsum("ri,rid->rd", pre64, h64)
    # The first index of comb is the source stream.
    spread = post64[..., None] * y64[:, None] + np.einsum("rij,rid->rjd", comb64, h64)
    ulp = 2.0**-8 if dtype == jnp.bfloat16 else F32_REL
    for got, want in ((collapse(h, pre), joined), (expand(h, y, post, comb), spread)):
        assert got.dtype == dtype and got.shape == want.shape
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= ulp * np.maximum(np.abs(want), 0.1 * s)).all()


def test_expand_sums_over_the_source_stream():
    h = jnp.asarray([[[1.0], [10.0]]])
    comb = jnp.asarray([[[0.0, 1.0], [0.0, 0.0]]])  # stream 0 goes to stream 1, stream 1 nowhere
    out = expand(h, jnp.zeros((1, 1)), jnp.zeros((1, 2)), comb)
    assert np.array_equal(out, [[[0.0], [1.0]]])
