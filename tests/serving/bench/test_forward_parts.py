"""Weight sets, routing tables and filled caches of ``serving.bench forward``."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.ops import local_ops
from pallas_kernels.moe_experts.repack import unpack
from pallas_kernels.numerics import SERVING
from serving.bench.forward_cache import filled_cache, spread
from serving.bench.forward_launches import kernels, launches
from serving.bench.forward_model import measured_model
from serving.bench.forward_programs import SharedPrograms
from serving.bench.forward_routing import new_tables, routed, table, touched
from serving.bench.forward_weights import WeightSets, random_sets, weight_sets
from sharding.place import place

TINY = Config.preset("tiny")
ONE = place("tp1", TINY)


@pytest.fixture(scope="module")
def shared():
    """Two weight sets for eight layers, and their values."""
    sets = weight_sets(TINY, SERVING, ONE, 2, "reference", draft=True)
    return sets, random_sets(sets, "reference")


def shapes(values):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), values)


def test_values_are_those_that_the_programs_are_compiled_for(shared):
    sets, weights = shared
    assert shapes(weights) == shapes(sets.shapes())


def test_layers_take_the_sets_in_turn_and_keep_what_is_their_own(shared):
    sets, weights = shared
    model = nnx.merge(nnx.graphdef(sets.model), sets.full(weights, ())[0])
    wkv = [np.asarray(block.attn.wkv().codes) for block in model.layers]
    assert all((wkv[i] == wkv[i % 2]).all() for i in range(8))
    assert (wkv[0] != wkv[1]).any()
    indexers = [np.asarray(model.layers[i].attn.indexer.wq_b().codes) for i in (2, 4, 6)]
    assert (indexers[0] != indexers[1]).any() and (indexers[1] != indexers[2]).any()
    assert [block.layer.index for block in model.layers] == list(range(8))
    experts = np.asarray(model.layers[0].ffn.experts.w1().codes)
    assert len({expert.tobytes() for expert in experts}) == TINY.n_routed_experts


def test_layers_of_one_set_do_not_share_work(shared):
    """Otherwise XLA would unpack a weight once for all of them."""
    sets, weights = shared

    def both(weights, x):
        state, x = sets.full(weights, x)
        model = nnx.merge(nnx.graphdef(sets.model), state)
        project = local_ops(SERVING, "reference").linear
        return [project(x, model.layers[i].attn.wkv()) for i in (1, 3)]

    text = jit(both).lower(weights, jnp.ones((3, 256), jnp.bfloat16)).compile().as_text()
    assert text.count(" dot(") == 2


@pytest.mark.slow
def test_experts_are_packed_by_what_packs_a_checkpoint():
    cfg = replace(TINY, moe_intermediate_size=256, n_routed_experts=16)
    sets = weight_sets(cfg, SERVING, place("tp1", cfg), 1, "mosaic", draft=False)
    assert sets.packed
    weights = random_sets(sets, "mosaic")
    assert shapes(weights) == shapes(sets.shapes())
    routed_experts, _ = unpack(weights["layers.0.ffn.experts.weight"], 16, 256, 256)
    codes = np.asarray(routed_experts.w1.codes)
    # Eight are drawn, the others repeat them.
    assert (codes[:8] == codes[8:]).all()
    assert len({expert.tobytes() for expert in codes}) == 8
    assert not weight_sets(cfg, SERVING, place("tp1", cfg), 1, "auto", draft=False).packed


@pytest.mark.parametrize("routing", ["balanced", "random", "zipf"])
def test_a_row_picks_distinct_experts(routing):
    ids = np.sort(table(routing, 384, 6, 0), axis=1)
    assert ids.min() >= 0 and ids.max() < 384
    assert (np.diff(ids, axis=1) > 0).all()


def test_routings_differ_as_they_say():
    counts = {
        name: np.bincount(table(name, 384, 6, 3).ravel(), minlength=384)
        for name in ("balanced", "random", "zipf")
    }
    assert counts["balanced"].tolist() == [128] * 384
    # 8192 rows pick an expert 128 times on average; six standard deviations are 67.
    assert abs(counts["random"] - 128).max() < 67
    falling = np.sort(counts["zipf"])[::-1]
    assert falling[0] > 6000 and falling[383] < 60
    assert touched("balanced", 384, 6, 32, 4) == 192
    assert touched("random", 384, 6, 32, 12) == pytest.approx(152, abs=6)
    assert touched("zipf", 384, 6, 32, 12) < 100


def test_the_router_runs_but_the_table_decides():
    calls = []

    def gate(x, *operands, top_k, scale):
        calls.append(top_k)
        return jnp.zeros((*x.shape[:-1], top_k), jnp.int32), jnp.full((*x.shape[:-1], top_k), scale)

    tables = {name: jnp.asarray(t) for name, t in new_tables(TINY, "random", 2, draft=True).items()}
    ops = routed(replace(local_ops(SERVING, "reference"), moe_gate=gate), tables, ONE)
    x = jnp.ones((2, 3, 256))
    found = [ops.moe_gate(x, jnp.ones((8, 256)), jnp.ones(8), top_k=2, scale=1.5) for _ in range(3)]
    for number, (ids, weights) in enumerate(found):
        expected = table("random", 8, 2, number % 2)[:6].reshape(2, 3, 2)
        assert (np.asarray(ids) == expected).all()
        assert (np.asarray(weights) == 1.5).all()
    draft, _ = ops.moe_gate(x, jnp.ones((4, 256)), jnp.ones(4), top_k=3, scale=1.0)
    assert (np.asarray(draft) == table("random", 4, 3, 1)[:6].reshape(2, 3, 3)).all()
    assert calls == [2, 2, 2, 3]
    live = jnp.array([[True, False, True]] * 2)
    operands = x, jnp.ones((8, 256)), jnp.ones(8), None, None, live
    ids, _ = ops.moe_gate(*operands, top_k=2, scale=1.5)
    assert (np.asarray(ids[:, 1]) == -1).all() and (np.asarray(ids[:, [0, 2]]) >= 0).all()


def test_every_position_of_a_filled_cache_holds_something():
    cfg = measured_model(TINY, "2,4,5", 100)
    sets = WeightSets(cfg, SERVING, ONE, 1, packed=False, draft=False)
    tables = new_tables(cfg, "random", 1, draft=False)
    programs = SharedPrograms(sets, local_ops(SERVING, "reference"), CacheShape(3, 8, 64), tables)
    cache = filled_cache(programs)(jnp.array([100, 7, 0], jnp.int32))
    ring = cache.windows[1]
    for slot, length in ((0, 100), (1, 7)):
        _, exists = ring.tail(jnp.array([slot]), jnp.array([length]), TINY.sliding_window)
        assert int(exists.sum()) == min(length, TINY.sliding_window)
    assert (np.asarray(ring.tags[2]) == -1).all()
    for pool in cache.pools.values():
        for rows in (pool.latents.decode(jnp.float32), pool.keys.decode(jnp.float32)):
            values = np.asarray(rows).reshape(-1, rows.shape[-1])
            assert np.isfinite(values).all()
            assert 0.5 < values.std() < 2
            assert len({row.tobytes() for row in values}) > 0.9 * len(values)
    carried, exists = cache.carry.at(jnp.array([0]), jnp.arange(84, 100)[None])
    assert exists.all()
    selected = np.asarray(carried.selected[0])
    assert (selected >= 0).all() and (selected.max(axis=1) < np.arange(85, 101)).all()
    assert (np.diff(selected, axis=1) > 0).all()


def test_spread():
    assert spread(jnp.array([3, 100]), 5).tolist() == [[0, 1, 2, -1, -1], [0, 20, 40, 60, 80]]


def test_what_a_program_launches():
    text = """HloModule m
%body (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%p)
}

ENTRY %main (a: f32[2]) -> (f32[2], s32[1]) {
  %a = f32[2]{0} parameter(0)
  %f = f32[2]{0} fusion(%a), kind=kLoop, calls=%body
  %k = (s32[1]{0}, u8[]) custom-call(%f), custom_call_target="mosaic_gpu_v2", op_name="run/gate/x"
  %g = s32[1]{0} get-tuple-element(%k), index=0
  ROOT %t = (f32[2]{0}, s32[1]{0}) tuple(%f, %g)
}
"""
    assert launches(text) == 2
    assert kernels(text) == {"gate": 1}


def test_a_model_of_few_layers_needs_no_engram():
    assert measured_model(TINY, "4,5", 100).engram_num_embeddings == ()
