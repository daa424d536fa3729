"""Sparse attention: the reference's vectors, float64, and what must not matter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax import compiling
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.quant.storage import row_types
from pallas_kernels.sparse_attention.cases import CORNERS
from pallas_kernels.sparse_attention.op import build, build_list
from tests.compare import bf16_ulps, rel_rms
from tests.dsv41_jax.support import poison
from tests.tolerances import F32_REL, ONE_PASS_REL_RMS, SPARSE_BF16_ULPS

NUMERICS = pytest.mark.parametrize("numerics", [FLOAT32, REFERENCE, SERVING], ids=lambda n: n.name)
list_attention = compiling.jit(
    lambda q, kv, valid, sink, numerics: build_list("reference")(
        q, kv, valid, sink, numerics=numerics
    ),
    static=(4,),
)
sparse_attention = compiling.jit(
    lambda a, size, numerics: build("reference")(*a, window_size=size, numerics=numerics),
    static=(1, 2),
)


def golden_lists(goldens, which):
    """q, kv, valid, sink as ``list_attention`` takes them, and the reference's output."""
    if which == "sparse":
        g = goldens("quant_vectors.npz")
        q, kv, want = (g[f"sparse.{name}"] for name in ("q", "kv", "o"))
    else:
        g = goldens("extra_vectors.npz")
        bits = (g[f"sparse640.{name}"] for name in ("q", "kv", "o"))
        q, kv, want = ((b.astype(np.int32) << 16).view(np.float32) for b in bits)
    idx, sink = g[f"{which}.idx"], g[f"{which}.sink"]
    q, kv = (jnp.asarray(a).astype(jnp.bfloat16) for a in (q, kv))
    return (q[None], kv[np.maximum(idx, 0)][None], jnp.asarray(idx >= 0)[None], sink), want


@pytest.mark.parametrize("which", ["sparse", "sparse640"])
def test_golden_lists(goldens, which):
    arguments, want = golden_lists(goldens, which)
    got = np.asarray(list_attention(*arguments, REFERENCE)[0], np.float32)
    assert bf16_ulps(got, want).max() <= SPARSE_BF16_ULPS
    empty = ~np.asarray(arguments[2][0]).any(-1)
    assert empty.any() and not got[empty].any()


def test_golden_blocks_round_by_the_running_maximum(goldens):
    """Ten blocks of 64: nearly every element equal, where one pass over all of them is not."""
    arguments, want = golden_lists(goldens, "sparse640")
    blockwise, one_pass = (
        np.asarray(list_attention(*arguments, n)[0], np.float32) for n in (REFERENCE, SERVING)
    )
    assert (blockwise != want).mean() < 0.02
    assert (one_pass != want).mean() > 0.1
    assert rel_rms(one_pass, want) < ONE_PASS_REL_RMS


def list_oracle(q, kv, valid, sink):
    """float64, one query at a time."""
    q, kv, sink = (np.asarray(a, np.float64) for a in (q, kv, sink))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(q.shape[:3]):
        rows = kv[b, t][np.asarray(valid[b, t])]
        if len(rows):
            s = rows @ q[b, t, h] * q.shape[-1] ** -0.5
            top = max(s.max(), sink[h])
            p = np.exp(s - top)
            out[b, t, h] = p @ rows / (p.sum() + np.exp(sink[h] - top))
    return out


def lists(length, numerics, seed=0):
    rng = np.random.default_rng(seed)
    q, kv = (rng.standard_normal(shape) for shape in ((2, 3, 4, 32), (2, 3, length, 32)))
    valid = rng.random((2, 3, length)) < 0.6
    valid[0, 0] = False
    valid[1, 1] = True
    return *(jnp.asarray(a, numerics.dtype) for a in (q, kv)), valid, jnp.linspace(-3, 3, 4)


@NUMERICS
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 200])
def test_lists_of_any_length(numerics, length):
    arguments = lists(length, numerics)
    got = list_attention(*arguments, numerics)
    want = list_oracle(*arguments)
    error = np.abs(np.asarray(got, np.float64) - want)
    bound = 5 * F32_REL if numerics is FLOAT32 else 2.0**-7
    assert got.dtype == numerics.dtype and error.max() <= bound * np.abs(want).max()
    assert not np.asarray(got, np.float32)[0, 0].any()


@NUMERICS
def test_sink_takes_weight_and_gives_no_value(numerics):
    q = jnp.zeros((1, 1, 3, 32), numerics.dtype)
    kv = jnp.ones((1, 1, 4, 32), numerics.dtype)
    valid = jnp.asarray([[[True, True, False, True]]])
    got = list_attention(q, kv, valid, jnp.asarray([-1e30, 0.0, np.log(9.0)]), numerics)
    assert np.allclose(np.asarray(got, np.float32)[0, 0, :, 0], [1, 0.75, 0.25], rtol=2.0**-8)


@NUMERICS
def test_a_huge_sink_or_score_stays_finite(numerics):
    q, kv, valid, _ = lists(70, numerics)
    got = list_attention(300 * q, 300 * kv, valid, jnp.asarray([-1e4, 0, 80, 1e4]), numerics)
    assert np.isfinite(np.asarray(got, np.float32)).all()


@NUMERICS
def test_a_repeated_slot_counts_twice(numerics):
    q, kv, _, _ = lists(3, numerics)
    sink = jnp.zeros(4)
    doubled = jnp.concatenate([kv[:, :, :2], kv[:, :, 1:2]], axis=2)
    valid = np.ones((2, 3, 3), bool)
    got = list_attention(q, doubled, valid, sink, numerics)
    want = list_oracle(q, doubled, valid, sink)
    assert np.abs(np.asarray(got, np.float64) - want).max() < 2.0**-7 * np.abs(want).max()
    once = list_attention(q, kv[:, :, :2], valid[..., :2], sink, numerics)
    assert not np.array_equal(got, once)


def problem(case, numerics, seed=0, floor=0):
    """Arguments of ``sparse_attention`` and, in float64, each query's own list."""
    rng = np.random.default_rng(seed)
    b, t, size = case.requests, case.rows, case.window
    position = case.start + np.arange(t) + np.zeros((b, 1), int)
    angle = position[..., None] * 1e4 ** (-np.arange(0, case.rope, 2) / case.rope)
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    q = jnp.asarray(rng.standard_normal((b, t, case.heads, case.width)), numerics.dtype)
    kinds = row_types(numerics)
    encode = [jax.jit(kind.encode) for kind in (kinds.window, kinds.latent)]
    rows = rng.standard_normal((b, size - 1 + t, case.width))
    window = encode[0](jnp.asarray(rows, jnp.float32))
    first = case.start - (size - 1)
    written = np.broadcast_to(first + np.arange(size - 1 + t) >= 0, (b, size - 1 + t)).copy()
    pool = selected = None
    pages = max(1, -(-(case.start + t) // case.page))
    table = rng.permutation(b * pages).reshape(b, pages).astype(np.int32)
    if case.selected:
        entries = rng.standard_normal((b * pages, case.page, case.width))
        pool = encode[1](jnp.asarray(entries, jnp.float32))
        selected = np.full((b, t, case.selected), -1, np.int32)
        for i, j in np.ndindex(b, t):
            selected[i, j, : case.chosen] = np.sort(
                rng.permutation(pages * case.page)[: case.chosen]
            )
    floors = jnp.full(b, floor, jnp.int32)
    sink = jnp.linspace(-2, 2, case.heads)
    return [
        q, cos, sin, window, jnp.asarray(written), jnp.asarray(position, jnp.int32), floors, pool,
        jnp.asarray(table), None if selected is None else jnp.asarray(selected), sink,
    ]  # fmt: skip


def oracle(a, case, floor=0):
    q, cos, sin, window, written, position, _, pool, table, selected, sink = a
    turn = (
        np.asarray(cos, np.float64)
        + 1j * np.asarray(sink * 0, np.float64)[0]
        + 1j * np.asarray(sin, np.float64)
    )

    def rotated(x, turn):
        tail = x[..., -case.rope :]
        z = (tail[..., 0::2] + 1j * tail[..., 1::2]) * turn[:, :, None]
        return np.concatenate(
            [x[..., : -case.rope], np.stack([z.real, z.imag], -1).reshape(tail.shape)], -1
        )

    rows = np.asarray(window.decode(jnp.float32), np.float64)
    q = rotated(np.asarray(q, np.float64), turn)
    out = np.zeros(q.shape)
    first = case.start - (case.window - 1)
    for i, j in np.ndindex(q.shape[:2]):
        p = int(position[i, j])
        kept = range(max(p - case.window + 1, floor, 0), p + 1)
        seen = [rows[i, at - first] for at in kept if written[i, at - first]]
        for entry in [] if selected is None else np.asarray(selected[i, j]):
            if entry >= 0:
                page = int(table[i, entry // case.page])
                values = np.asarray(pool.take(page, int(entry % case.page)).decode(jnp.float32))
                seen.append(values.astype(np.float64))
        kv = np.array(seen).reshape(1, 1, len(seen), -1)
        one = list_oracle(q[i : i + 1, j : j + 1], kv, np.ones((1, 1, len(seen)), bool), sink)
        out[i, j] = one[0, 0]
    return rotated(out, turn.conj())


@pytest.mark.parametrize("case", CORNERS, ids=lambda c: f"{c},chosen={c.chosen}")
@NUMERICS
def test_equals_the_oracle(case, numerics):
    arguments = problem(case, numerics)
    got = sparse_attention(arguments, case.window, numerics)
    want = oracle(arguments, case)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert got.dtype == numerics.dtype
    assert error.max() <= (10 * F32_REL if numerics is FLOAT32 else 2.0**-6) * np.abs(want).max()


def test_floor_hides_older_window_rows():
    case = CORNERS[3]
    for floor in (0, 4, case.start, case.start + case.rows):
        arguments = problem(case, FLOAT32, floor=floor)
        got = np.asarray(sparse_attention(arguments, case.window, FLOAT32), np.float64)
        assert np.abs(got - oracle(arguments, case, floor)).max() < 1e-5, floor


@NUMERICS
def test_a_row_that_sees_nothing_is_zero(numerics):
    case = CORNERS[1]
    arguments = problem(case, numerics)
    arguments[4] = jnp.zeros_like(arguments[4])
    assert not np.asarray(sparse_attention(arguments, case.window, numerics), np.float32).any()


@NUMERICS
def test_what_is_not_seen_never_matters(numerics):
    """NaN, or all bits set, in unwritten window rows, unselected entries and later rows."""
    case = CORNERS[2]
    arguments = problem(case, numerics)
    want = sparse_attention(arguments, case.window, numerics)
    window, written, pool, table, selected = (arguments[i] for i in (3, 4, 7, 8, 9))
    arguments[3] = jax.tree.map(lambda x: jnp.where(written[..., None], x, poison(x)), window)
    used = np.zeros(jax.tree.leaves(pool)[0].shape[:2], bool)
    for i, j, k in np.ndindex(selected.shape):
        if (entry := int(selected[i, j, k])) >= 0:
            used[int(table[i, entry // case.page]), entry % case.page] = True
    arguments[7] = jax.tree.map(lambda x: jnp.where(used[..., None], x, poison(x)), pool)
    assert np.array_equal(sparse_attention(arguments, case.window, numerics), want)


def test_window_rows_lie_left_of_the_selected_ones():
    """Lists are left-aligned from max(p-W+1, 0): a block of 64 holds window rows, then entries."""
    case = CORNERS[5]
    arguments = problem(case, REFERENCE)
    got = sparse_attention(arguments, case.window, REFERENCE)
    q, cos, sin, window, _, _, _, pool, table, selected, sink = arguments
    rows = window.decode(jnp.bfloat16)[:, : case.window]
    page, entry = table[0, selected[0, 0] // case.page], selected[0, 0] % case.page
    entries = pool.take(page, entry).decode(jnp.bfloat16)[None]
    kv = jnp.concatenate([rows, entries], axis=1)[:, None]
    from pallas_kernels.rotate import rotate

    at = cos[:, :1, None], sin[:, :1, None]
    valid = jnp.ones(kv.shape[:3], bool)
    o = list_attention(rotate(q[:, :1], *at), kv, valid, sink, REFERENCE)
    assert np.array_equal(got[:, :1], rotate(o, *at, inverse=True))
