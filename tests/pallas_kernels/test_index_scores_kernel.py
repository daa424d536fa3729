"""The score kernel's own PTX on a host machine (``ptx_machine``), against float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import kernel_sm90, op, ref
from pallas_kernels.index_scores.cases import Case
from pallas_kernels.index_scores.scores_ptx import program
from pallas_kernels.index_scores.scores_shape import MAX_SCALE_BYTE, Scores
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_index_scores import oracle, problem

CANARY = -7.0
CASES = [  # with the settings of the launch
    (Case(1, 1, 2, 100), {}),
    (Case(1, 1, 1, 0), {}),
    (Case(1, 1, 8, 500), {"splits": 2, "warpgroups": 2, "depth": 2}),
    (Case(2, 1, 9, 280, page=32), {"splits": 2, "warpgroups": 1, "round_list": 4}),
    (Case(1, 3, 7, 55, page=8), {"warpgroups": 1}),
    (Case(1, 6, 4, 200), {"warpgroups": 2, "depth": 1}),
    (Case(1, 8, 4, 250), {"warpgroups": 1}),
    (Case(2, 3, 6, 350, 12), {"splits": 2, "warpgroups": 1, "round_list": 8}),
    (Case(2, 1, 6, 190, 24, page=32), {"warpgroups": 2}),
]


def shape_of(case: Case, pool, **settings) -> Scores:
    sharing = case.rows if case.candidates else 1
    return Scores(
        case.requests * sharing,
        case.rows // sharing,
        case.pages,
        case.page,
        pool.codes.shape[0],
        case.candidates,
        sharing,
        **settings,
    )


def run(
    s: Scores, q, weights, pool, table, visible, candidates, machine: Callable = Cluster
) -> np.ndarray:
    """The kernel's scores; the output lies between two canaries."""
    memory = Guarded(1 << 22)
    out = np.full((s.requests * s.rows + 2, s.outputs), CANARY, np.float32)
    among = table if candidates is None else candidates
    inputs = (q, weights, pool.codes, pool.scales, table, visible, among)
    at = [memory.place(np.asarray(a)) for a in inputs]
    out_at = memory.place(out)
    lines = program(s)
    for unit, split in np.ndindex(s.requests * s.row_tiles, s.splits):
        operands = [*at, out_at + 4 * s.outputs, 0, unit, split]
        machine(
            lines,
            memory,
            threads=s.threads,
            shared=4 * s.words,
            operands=lambda rank, operands=operands: operands,
        ).run()
    out = memory.read(out_at, out)
    assert (out[[0, -1]] == CANARY).all()
    return out[1:-1].reshape(*visible.shape, s.outputs)


def whole(scores: np.ndarray, candidates, entries: int) -> np.ndarray:
    """Scores of candidate blocks at their entries, -inf elsewhere."""
    full = np.full((*scores.shape[:2], entries), -np.inf, np.float32)
    for b, t, i in np.ndindex(candidates.shape):
        block, got = candidates[b, t, i], scores[b, t, 8 * i : 8 * i + 8]
        if block < 0:
            assert np.isneginf(got).all()
        else:
            full[b, t, 8 * block : 8 * block + 8] = got
    return full


@pytest.mark.parametrize(("case", "settings"), CASES, ids=str)
def test_equals_the_oracle_whatever_nobody_sees(case, settings):
    """NaN and infinities in entries that nobody sees; the reference's roundings, bit for bit but
    where float32 sums of another order straddle a rounding.
    """
    (q, w, pool, table, visible, candidates), keys = problem(case, SERVING)
    used = np.zeros(pool.codes.shape[:2], bool)
    for b, entry in np.ndindex(case.requests, case.visible):
        used[int(table[b, entry // case.page]), entry % case.page] = True
    pool = jax.tree.map(lambda plane: np.where(used[..., None], plane, np.int32(-1)), pool)
    arguments = q, w, pool, table, visible, candidates
    got = run(shape_of(case, pool, **settings), *arguments)
    want = oracle(arguments, keys, case, SERVING)
    if candidates is not None:
        got = whole(got, candidates, want.shape[-1])
    seen = np.isfinite(want)
    assert np.array_equal(np.isneginf(got), ~seen)
    ulp = 2.0**-7 * np.abs(want[seen])
    assert (np.abs(got[seen] - want[seen]) <= ulp).all()
    assert (got[seen] != want[seen]).sum() <= 0.01 * seen.sum()


@pytest.mark.parametrize("number", [2, 7])
def test_warps_in_any_order(number):
    case, settings = CASES[number]
    arguments, _ = problem(case, SERVING)
    s = shape_of(case, arguments[2], **settings)
    got = run(s, *arguments, machine=partial(Strict, seed=number))
    assert np.array_equal(got, run(s, *arguments))


def test_pages_outside_the_pool_are_not_read():
    case = CASES[0][0]
    (q, w, pool, table, visible, _), _ = problem(case, SERVING)
    s = shape_of(case, pool)
    want = run(s, q, w, pool, table, visible, None)
    for page in (-1, pool.codes.shape[0], 1 << 30):
        got = run(s, q, w, pool, table.at[0, 1].set(page), visible, None)
        assert np.array_equal(got[..., :64], want[..., :64])
        assert np.isneginf(got[..., 64:]).all()


@pytest.mark.parametrize("byte", [60, 127, MAX_SCALE_BYTE])
def test_scales_of_any_size_are_exact(byte):
    case = CASES[0][0]
    (q, w, pool, table, visible, _), _ = problem(case, SERVING)
    pool = replace(pool, scales=np.full(pool.scales.shape, byte * 0x01010101, np.uint32))
    keys = replace(pool, scales=jnp.asarray(pool.scales.view(np.int32))).decode(jnp.float32)
    seen = np.asarray(keys, np.float64)[np.asarray(table)].reshape(1, -1, case.width)
    arguments = q, w, pool, table, visible, None
    want = oracle(arguments, seen, case, SERVING)
    assert np.array_equal(run(shape_of(case, pool), *arguments), want)


def test_bad_arguments_name_the_value():
    (q, w, pool, table, visible, _), _ = problem(CASES[0][0], SERVING)

    def scores(q, numerics=SERVING, candidates=None, pool=pool, block_size=8):
        return kernel_sm90.index_scores(
            q, w, pool, table, visible, candidates, block_size=block_size, numerics=numerics
        )

    with pytest.raises(ValueError, match="heads=16 and width=128 must be 32 and 128"):
        scores(q[:, :, :16])
    with pytest.raises(ValueError, match=r"numerics.name='float32' .* must be of bfloat16"):
        scores(q, FLOAT32)
    with pytest.raises(ValueError, match="block_size=4 must be 8"):
        scores(q, candidates=jnp.zeros((1, 1, 3), jnp.int32), block_size=4)
    with pytest.raises(ValueError, match="page=63 entries must be a power of two"):
        scores(q, pool=jax.tree.map(lambda plane: plane[:, :63], pool))


def test_candidate_scores_return_to_their_entries(monkeypatch):
    case = Case(1, 2, 2, 128, 3)
    (q, w, pool, table, visible, _), _ = problem(case, SERVING)
    candidates = jnp.asarray([[[2, 15, -1], [0, 1, 3]]], jnp.int32)
    compact = np.arange(48, dtype=np.float32).reshape(1, 2, 24)
    monkeypatch.setattr(kernel_sm90, "_launch", lambda *_: jnp.asarray(compact))
    got = kernel_sm90.index_scores(
        q, w, pool, table, visible, candidates, block_size=8, numerics=SERVING
    )
    want = np.full((1, 2, 16, 8), -np.inf)
    for t, i in np.ndindex(2, 3):
        if candidates[0, t, i] >= 0:
            want[0, t, candidates[0, t, i]] = compact[0, t, 8 * i : 8 * i + 8]
    assert np.array_equal(got, want.reshape(1, 2, 128))


def test_auto_on_hopper_takes_the_reference_for_other_shapes(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    for name in ("index_scores", "candidate_scores"):
        monkeypatch.setattr(ref, name, lambda *_, **__: "ref")
        monkeypatch.setattr(kernel_sm90, name, lambda *_, **__: "kernel")
    options = {"block_size": 8, "numerics": SERVING}
    (small, *_), _ = problem(Case(1, 1, 1, 1, heads=4, width=32, page=8), SERVING)
    (q, *rest), _ = problem(CASES[0][0], SERVING)
    for build in (op.build, op.build_candidates):
        assert build("auto")(q, *rest, **options) == "kernel"
        assert build("auto")(small, *rest, **options) == "ref"
        for numerics in (FLOAT32, REFERENCE):
            assert build("auto")(q, *rest, **options | {"numerics": numerics}) == "ref"
        assert build("mosaic")(small, *rest, **options) == "kernel"  # which raises
