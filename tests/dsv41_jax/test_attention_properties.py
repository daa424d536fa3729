"""What must and what must not change the whole model's result; bit by bit within one bucket."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dsv41_jax.support import BUCKETS, PAGES, rows_for, tiny

BUCKET = BUCKETS[-1]
NUMERICS = pytest.mark.parametrize("numerics", ["float32", "reference"])
SLOW_IN_FLOAT32 = pytest.mark.parametrize(
    "numerics", [pytest.param("float32", marks=pytest.mark.slow), "reference"]
)


@pytest.fixture(scope="module")
def ids(goldens):
    return goldens("e2e_fp32.npz")["p96.input_ids"].tolist()[:60]


def logits(model, rows, cache=None):
    done = model.forward(rows, model.cache() if cache is None else cache)
    return np.asarray(done.logits[0, : int(rows.length[0])])


def same(a, b) -> bool:
    """Bit-equal trees; NaN equals itself."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


@NUMERICS
def test_causality(numerics, ids):
    model = tiny(numerics)
    want = logits(model, rows_for(ids))
    for t in (0, 1, 15, 16, 33, 59):
        changed = ids.copy()
        changed[t] ^= 1
        got = logits(model, rows_for(changed))
        assert np.array_equal(got[:t], want[:t]), t
        assert not np.array_equal(got[t], want[t]), t


@NUMERICS
def test_a_prefix_has_the_same_rows(numerics, ids):
    """Prompts of any length in one bucket; what lies behind them is padding."""
    model = tiny(numerics)
    want = logits(model, rows_for(ids))
    for n in (1, 2, 3, 15, 16, 17, 31, 59):
        assert np.array_equal(logits(model, rows_for(ids[:n], size=BUCKET)), want[:n]), n


@SLOW_IN_FLOAT32
def test_nothing_unwritten_matters(numerics, ids):
    """NaN or 0xFF in every row that no one has written, through prefill, decode and drafts."""
    model = tiny(numerics)
    results = []
    for cache in (model.cache(), model.poisoned()):
        done = model.forward(rows_for(ids[:37]), cache)
        step = model.forward(rows_for([5], 37, before=ids[:37]), done.cache)
        draft = model.draft(9, 38, step.cache)
        results.append((done.logits[0, :37], step.logits, draft, step.cache.history))
    assert np.isfinite(results[1][0]).all()
    assert same(*results)


@NUMERICS
@pytest.mark.parametrize("pad", [-1, 512, 2**31 - 1])
def test_padding_ids_never_matter(numerics, ids, pad):
    model = tiny(numerics)
    want = model.forward(rows_for(ids[:37]), model.cache())
    got = model.forward(rows_for(ids[:37], pad=pad), model.cache())
    assert same(got.logits[:, :37], want.logits[:, :37])
    assert same(got.cache, want.cache)


@NUMERICS
def test_entries_appear_when_their_group_closes(numerics, ids):
    """floor(n / ratio) entries on every owner; the rest of the pool keeps its bits."""
    model = tiny(numerics)
    poisoned = model.poisoned()
    for n in (1, 2, 3, 31, 32, 33):
        cache = model.forward(rows_for(ids[:n]), poisoned).cache
        for owner, pool in cache.pools.items():
            ratio = model.cfg.compress_ratios[owner]
            for plane, old in zip(
                jax.tree.leaves(pool), jax.tree.leaves(poisoned.pools[owner]), strict=True
            ):
                flat, before = (np.asarray(a).reshape(-1, a.shape[-1]) for a in (plane, old))
                assert same(flat[n // ratio :], before[n // ratio :]), (n, owner)
                if np.issubdtype(flat.dtype, np.floating):
                    assert np.isfinite(flat[: n // ratio]).all()


@SLOW_IN_FLOAT32
def test_pages_lie_anywhere(numerics, ids):
    model = tiny(numerics)
    rows = rows_for(ids)
    want = logits(model, rows)
    order = np.array([5, 0, 7, 2, -1, -1, -1, -1], np.int32)
    moved = replace(rows, page_table=jnp.asarray(order[None]), slot=jnp.ones(1, jnp.int32))
    done = model.forward(moved, model.poisoned())
    assert np.array_equal(done.logits[0, : len(ids)], want)
    untouched = [page for page in range(PAGES) if page not in order]
    for got, old in zip(
        jax.tree.leaves(done.cache.pools), jax.tree.leaves(model.poisoned().pools), strict=True
    ):
        assert same(np.asarray(got)[untouched], np.asarray(old)[untouched])


@SLOW_IN_FLOAT32
def test_no_live_row_changes_nothing(numerics, ids):
    model = tiny(numerics)
    cache = model.forward(rows_for(ids[:20]), model.poisoned()).cache
    rows = replace(rows_for(ids[:1], 20, before=ids[:20]), length=jnp.zeros(1, jnp.int32))
    assert same(model.forward(rows, cache).cache, cache)


@SLOW_IN_FLOAT32
def test_a_slot_is_reused_without_clearing(numerics, ids):
    model = tiny(numerics)
    used = model.forward(rows_for(ids[::-1]), model.cache()).cache
    for n in (1, 5, 37):
        assert np.array_equal(
            logits(model, rows_for(ids[:n]), used), logits(model, rows_for(ids[:n]))
        )


def test_rows_below_write_from_store_no_entry(float32, ids):
    """Shared entries keep their bits when the rows under them are computed again."""
    before = float32.forward(rows_for(ids[:30:-1], size=BUCKET), float32.cache()).cache
    cache = float32.forward(rows_for(ids[:40], write_from=20), before).cache
    for owner, pool in cache.pools.items():
        ratio = float32.cfg.compress_ratios[owner]
        for got, old in zip(
            jax.tree.leaves(pool), jax.tree.leaves(before.pools[owner]), strict=True
        ):
            got, old = (np.asarray(a).reshape(-1, a.shape[-1]) for a in (got, old))
            changed = np.flatnonzero((got != old).any(-1)).tolist()
            assert changed == list(range(20 // ratio, 40 // ratio)), owner


def test_floors_cut_the_windows_of_their_own_half(float32, ids):
    """``floor`` reaches every layer, ``decoder_floor`` the layers after the last KV source."""
    base, low, high = (
        float32.forward(rows_for(ids[:40], **floors), float32.cache())
        for floors in ({}, {"floor": 24}, {"decoder_floor": 24})
    )
    assert same(high.handoff, base.handoff)
    assert not same(low.handoff.h, base.handoff.h)
    assert same(high.logits[:, :24], base.logits[:, :24]) is False  # floors are for replayed rows
    for done in (low, high):
        assert not same(done.logits[:, 25:39], base.logits[:, 25:39])
    # Row 39's window is 24 .. 39: the floor takes nothing from it in the first layer it enters.
    none = float32.forward(rows_for(ids[:40], floor=0, decoder_floor=-5), float32.cache())
    assert same(none.logits, base.logits)


def test_decode_continues_a_prefill(float32, ids):
    """One token at a time from any length, across the window and odd and even positions."""
    want = logits(float32, rows_for(ids))
    for n in (1, 2, 15, 16, 33):
        cache = float32.forward(rows_for(ids[:n]), float32.cache()).cache
        for t in range(n, n + 4):
            done = float32.forward(rows_for([ids[t]], t, before=ids[:t]), cache)
            cache = done.cache
            assert np.abs(np.asarray(done.logits[0, 0]) - want[t]).max() < 1e-4, (n, t)
        assert np.array_equal(cache.history[0], ids[n + 1 : n + 4])


def test_a_query_has_no_head_norm(float32, ids):
    """Twice the projection gives twice the query; with V4's head norm it would not."""
    attn = float32.model.layers[2].attn
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 256)), jnp.float32)
    _, q = attn.queries(float32.ops, x)
    old = attn.wq_b.weight.get_value()
    attn.wq_b.weight.set_value(2 * old)
    _, doubled = attn.queries(float32.ops, x)
    attn.wq_b.weight.set_value(old)
    assert np.allclose(doubled, 2 * q, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_text_norm_has_no_visible_eps(float32, scale):
    """eps is 1e-20: a row of 1e-4 is normed as one of 1. With 1e-6 it would shrink."""
    norm = float32.model.layers[0].attn_norm
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 256)), jnp.float32)
    assert float32.cfg.rms_norm_eps == 1e-20
    assert np.allclose(norm(x * scale), norm(x), rtol=1e-5)
