"""Selection among candidates alone, and in tiles of rows, against selection over every entry."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv41_jax import compiling, indexer
from dsv41_jax.config import Config
from dsv41_jax.indexer import Indexer, by_row_tiles, pick_among, row_tiles
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.ops import local_ops
from dsv41_jax.rope import angles
from pallas_kernels.index_scores.ref import candidate_mask
from pallas_kernels.index_topk.ref import index_topk, top_blocks
from pallas_kernels.numerics import FLOAT32
from pallas_kernels.quant.storage import row_types

CFG = Config.preset("tiny")
SOURCE, RESTRICTED = (
    next(layer for layer in layer_plan(CFG) if getattr(layer, name))
    for name in ("candidate_source", "restricted")
)
OPS = SimpleNamespace(index_topk=index_topk)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("blocks", "size", "k"),
    [(5, 4, 8), (5, 4, 17), (3, 8, 17)],
)
def test_candidates_alone_give_the_picks_of_the_masked_row(blocks, size, k, rng):
    """Scores of few values, so that most picks are ties, or of none; every visible length."""
    entries = 150
    visible = jnp.asarray(np.arange(entries + 1)[None], jnp.int32)
    shape = (3, *visible.shape, entries)
    drawn = rng.integers(-1, 2, shape) * np.array([0, 1, 100])[:, None, None, None]
    scores = jnp.where(jnp.arange(entries) < visible[..., None], drawn, -jnp.inf)

    @compiling.jit
    def both(scores, visible):
        chosen = top_blocks(scores, visible, block_size=size, k=blocks)
        mask = candidate_mask(chosen, -(-entries // size), size)[..., :entries]
        want = index_topk(jnp.where(mask, scores, -jnp.inf), visible, k=k)
        at = chosen[..., None] * size + jnp.arange(size)
        at = jnp.where(chosen[..., None] < 0, entries, at).reshape(*visible.shape, -1)
        padded = jnp.pad(scores, ((0, 0), (0, 0), (0, size)), constant_values=-jnp.inf)
        compact = jnp.take_along_axis(padded, at, axis=-1)
        return want, pick_among(OPS, compact, visible, chosen, k=k)

    for one in scores:
        want, got = both(one, visible)
        assert np.array_equal(got, want)


def test_few_candidates_are_not_selected_from_alone():
    """Places beyond the visible candidates go to other visible entries: REF's rule (6.5)."""
    made = partial(Indexer, layer=RESTRICTED, numerics=FLOAT32, rngs=nnx.Rngs(0))
    size = CFG.candidate_block_size
    assert made(CFG).compact
    most = (CFG.candidate_topk_blocks - 1) * size + 1
    compact = {k: made(SimpleNamespace(**vars(CFG) | {"index_topk": k})) for k in (most, most + 1)}
    assert [one.compact for one in compact.values()] == [True, False]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_tiles_of_rows_join_to_the_whole(count, rng):
    x = jnp.asarray(rng.standard_normal((2, 7, 3)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 9, (2, 7)), jnp.int32)

    def function(x, y, none):
        return (x * y[..., None], none), y + 1

    got = by_row_tiles(function, (x, y, None), count)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(function(x, y, None)), strict=True):
        assert np.array_equal(a, b)


def test_a_tile_of_scores_has_a_limit():
    assert row_tiles((128, 6), 1 << 22) == 1  # verification
    for requests, rows, entries in ((1, 8192, 1 << 20), (4, 1000, 131072), (1, 300, 8192)):
        count = row_tiles((requests, rows), 4 * entries)
        tile = -(-rows // count)
        assert 4 * requests * tile * entries <= indexer.SCORE_BYTES
        assert count == 1 or 4 * requests * (tile + 2) * entries > indexer.SCORE_BYTES // 2


def selection(layer, rows: int, pages: int, tile: int, monkeypatch):
    """``Indexer.select`` of ``rows`` rows compiled in tiles of ``tile``, with its arguments."""
    module = Indexer(CFG, layer, numerics=FLOAT32, rngs=nnx.Rngs(0))
    ops, page = local_ops(FLOAT32, "reference"), 16
    entries = CFG.candidate_topk_blocks * CFG.candidate_block_size
    if not module.compact:
        entries = pages * page
    monkeypatch.setattr(indexer, "SCORE_BYTES", tile * 4 * entries)
    rng = np.random.default_rng(0)

    def normal(*shape: int):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    keys = row_types(FLOAT32).key.encode(normal(pages, page, CFG.index_head_dim))
    position = jnp.arange(pages * page - rows, pages * page)[None]
    blocks = jnp.sort(jnp.asarray(rng.permutation(8)[: CFG.candidate_topk_blocks]))
    candidates = jnp.broadcast_to(blocks, (1, rows, len(blocks))).astype(jnp.int32)
    arguments = (
        normal(1, rows, CFG.hidden_size), normal(1, rows, CFG.index_n_heads * CFG.index_head_dim),
        angles(CFG, layer.ratio, position), keys, jnp.arange(pages)[None],
        position.astype(jnp.int32) + 1, candidates,
    )  # fmt: skip
    run = compiling.jit(partial(module.select, ops)).lower(*arguments).compile()
    return run, arguments


@pytest.mark.parametrize("layer", [SOURCE, RESTRICTED], ids=lambda layer: f"layer {layer.index}")
def test_tiles_select_as_one(layer, monkeypatch):
    results = []
    for tile in (24, 7):
        run, arguments = selection(layer, 24, 8, tile, monkeypatch)
        results.append(jax.tree.leaves(run(*arguments)))
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


def test_prefill_holds_a_tile_of_scores(monkeypatch):
    """Temporary bytes grow with the tile and hardly with the rows."""

    def temporary(rows: int, tile: int) -> int:
        run, _ = selection(SOURCE, rows, 256, tile, monkeypatch)
        return run.memory_analysis().temp_size_in_bytes

    small, large, long = (temporary(*a) for a in ((64, 8), (64, 16), (128, 8)))
    scores = 4 * 256 * 16  # bytes of a row
    row = CFG.index_n_heads * scores  # the reference holds every head's
    assert 0.5 * 8 * row < large - small < 2.5 * 8 * row
    assert long - small < 64 * scores / 2
