"""``index_scores`` against float64, its masks and its roundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.index_scores.cases import CORNERS
from pallas_kernels.index_scores.op import build, build_candidates
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.quant.storage import row_types
from tests.dsv41_jax.support import poison
from tests.tolerances import F32_REL

index_scores = compiling.jit(
    lambda q, w, pool, table, visible, candidates, size, numerics: build("reference")(
        q, w, pool, table, visible, candidates, block_size=size, numerics=numerics
    ),
    static=(6, 7),
)
NUMERICS = pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE, SERVING], ids=lambda n: n.name)
SPARE = 3  # pages of the pool that no table names


def problem(case, numerics, seed=0):
    """q, weights, pool, page_table, visible, candidates and the keys each request sees."""
    rng = np.random.default_rng(seed)
    b, t, pages = case.requests, case.rows, case.pages
    table = rng.permutation(b * pages + SPARE)[: b * pages].reshape(b, pages).astype(np.int32)
    keys = rng.standard_normal((b * pages + SPARE, case.page, case.width))
    pool = jax.jit(row_types(numerics).key.encode)(jnp.asarray(keys, jnp.float32))
    q = jnp.asarray(rng.standard_normal((b, t, case.heads, case.width)), numerics.dtype)
    w = jnp.asarray(rng.standard_normal((b, t, case.heads)) / 32, numerics.dtype)
    visible = np.maximum(case.visible - np.arange(t)[::-1], 0) + np.zeros((b, 1), int)
    candidates = None
    if case.candidates:
        blocks = -(-pages * case.page // case.block_size)
        candidates = np.full((b, t, case.candidates), -1, np.int32)
        for i, j in np.ndindex(b, t):
            n = min(int(rng.integers(1, case.candidates + 1)), blocks)
            candidates[i, j, :n] = np.sort(rng.permutation(blocks)[:n])
    seen = np.asarray(pool.decode(jnp.float32))[table].reshape(b, pages * case.page, case.width)
    arguments = q, w, pool, jnp.asarray(table), jnp.asarray(visible, jnp.int32), candidates
    return arguments, seen.astype(np.float64)


def oracle(arguments, keys, case, numerics):
    """float64 sums of values rounded where ``numerics`` round, -inf where masked."""
    q, w, _, _, visible, candidates = arguments

    def rounded(a):
        return np.asarray(jnp.asarray(a, jnp.float32).astype(numerics.dtype), np.float64)

    dots = rounded(np.einsum("bthk,bnk->bthn", np.asarray(q, np.float64), keys))
    products = rounded(np.maximum(dots, 0) * np.asarray(w, np.float64)[..., None])
    scores = rounded(products.sum(2))
    entry = np.arange(keys.shape[1])
    mask = entry < np.asarray(visible)[..., None]
    if candidates is not None:
        block = entry // case.block_size
        mask &= (block[:, None] == candidates[..., None, :]).any(-1)
    return np.where(mask, scores, -np.inf)


@NUMERICS
@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_equals_the_oracle(case, numerics):
    arguments, keys = problem(case, numerics)
    got = np.asarray(index_scores(*arguments, case.block_size, numerics))
    want = oracle(arguments, keys, case, numerics)
    assert got.dtype == np.float32 and got.shape == want.shape
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    seen = np.isfinite(want)
    bound = 2.0**-6 if numerics.dtype == jnp.bfloat16 else 10 * F32_REL
    assert (np.abs(got[seen] - want[seen]) <= bound * np.maximum(np.abs(want[seen]), 1)).all()
    if numerics.dtype == jnp.bfloat16 and seen.any():
        assert np.array_equal(
            got[seen], np.asarray(jnp.asarray(got[seen], jnp.bfloat16), np.float32)
        )
        assert (got[seen] != want[seen]).sum() <= 2 + 0.03 * seen.sum()


@NUMERICS
def test_negative_dots_count_nothing(numerics):
    """The ReLU is per head, before the weighted sum; a negative weight stays negative."""
    kind = row_types(numerics).key
    key = jnp.zeros((1, 1, 32)).at[0, 0, 0].set(1)
    q = jnp.zeros((1, 1, 3, 32), numerics.dtype).at[0, 0, :, 0].set(jnp.asarray([2, -4, 3]))
    w = jnp.asarray([[[1.0, 8.0, -0.5]]], numerics.dtype)
    table, visible = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
    score = index_scores(q, w, kind.encode(key), table, visible, None, 8, numerics)
    assert np.array_equal(score, [[[0.5]]])


@NUMERICS
def test_what_nobody_sees_never_matters(numerics):
    """NaN in every entry that is not visible, in spare pages and in pages of -1."""
    case = CORNERS[2]
    arguments, _ = problem(case, numerics)
    q, w, pool, table, visible, _ = arguments
    want = index_scores(*arguments, case.block_size, numerics)
    used = np.zeros((case.requests * case.pages + SPARE, case.page), bool)
    for b in range(case.requests):
        for entry in range(case.visible):
            used[int(table[b, entry // case.page]), entry % case.page] = True
    bad = jax.tree.map(lambda plane: jnp.where(used[..., None], plane, poison(plane)), pool)
    got = index_scores(q, w, bad, table, visible, None, case.block_size, numerics)
    assert np.array_equal(got, want)
    narrow = index_scores(
        q, w, bad, table.at[:, 2].set(-1), jnp.minimum(visible, 16), None, case.block_size, numerics
    )
    assert np.array_equal(narrow[..., :14], want[..., :14])
    assert not np.isfinite(np.asarray(narrow)[..., 16:]).any()


def test_no_candidates_masks_everything():
    case = CORNERS[3]
    (q, w, pool, table, visible, _), _ = problem(case, FLOAT32)
    none = jnp.full((case.requests, case.rows, 5), -1)
    assert np.isneginf(index_scores(q, w, pool, table, visible, none, 4, FLOAT32)).all()


@pytest.mark.parametrize("case", CORNERS[3:], ids=str)
def test_candidate_scores_are_those_of_their_entries(case):
    """In the order of the blocks; entries behind the table, and blocks of -1, are -inf."""
    arguments, _ = problem(case, FLOAT32)
    whole = np.asarray(index_scores(*arguments, case.block_size, FLOAT32))
    options = {"block_size": case.block_size, "numerics": FLOAT32}
    got = compiling.jit(lambda *a: build_candidates("reference")(*a, **options))(*arguments)
    want = np.full(got.shape, -np.inf, np.float32)
    for b, t, i in np.ndindex(arguments[5].shape):
        at = arguments[5][b, t, i] * case.block_size
        row = whole[b, t, at : at + case.block_size] if at >= 0 else []
        want[b, t, i * case.block_size :][: len(row)] = row
    assert np.array_equal(got, want)
