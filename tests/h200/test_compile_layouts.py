"""The decode step of eight-device layouts compiles for eight H200s, the cache updated in place."""

from dataclasses import replace

import jax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import COMPILER_OPTIONS
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.moe import MoE, RepackedExperts
from pallas_kernels import dispatch
from pallas_kernels.numerics import SERVING
from serving.programs import Bucket, Programs
from sharding.build import build_ops
from sharding.hlo import collectives
from sharding.place import BY_RANK, Placement, place
from sharding.repack import packing
from tools.h200_compile import h200_mesh

pytestmark = pytest.mark.h200


BUCKET, SHAPE = Bucket(4, 1, 8), CacheShape(4, 64, 16)


def repack_abstract(model: Model, placement: Placement) -> None:
    """What ``repack_placed`` does, in shapes."""
    for _, module in list(nnx.iter_modules(model)):
        if isinstance(module, MoE):
            weights = module.experts(), module.shared_experts()
            packed = jax.eval_shape(packing(placement), *weights)
            module.experts = RepackedExperts(packed)


def compiled_decode(name: str, cfg: Config, kernels: str, *, repacked: bool = False):
    placement = place(name, cfg, list(h200_mesh(8).devices.flat))
    model = nnx.eval_shape(lambda: Model(cfg, numerics=SERVING, rngs=nnx.Rngs(0), mtp=False))
    if repacked:
        repack_abstract(model, placement)
    ops = build_ops(placement.division, SERVING, kernels)
    programs = Programs(model, ops, SHAPE, placement=placement)

    def padded(keys, leaf, spec):
        path = ".".join(str(key.key) for key in keys if hasattr(key, "key"))
        # Repacked experts are as long as they are: nothing pads them.
        packed = path.endswith(".experts.weight")
        whole = leaf.shape if packed else placement.division.padded(path, leaf.shape)
        sharding = NamedSharding(placement.mesh, spec)
        return jax.ShapeDtypeStruct(whole, leaf.dtype, sharding=sharding)

    specs = placement.parameter_specs(programs.params)
    params = jax.tree_util.tree_map_with_path(padded, programs.params, specs)
    ours = NamedSharding(placement.mesh, BY_RANK)
    one_rank = jax.eval_shape(programs._rank_cache)
    cache = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0] * programs.ranks, *leaf.shape[1:]), leaf.dtype, sharding=ours
        ),
        one_rank,
    )
    inputs = placement.shapes(programs.input_shapes("decode", BUCKET), BY_RANK)
    traced = jax.jit(programs.bound("decode", BUCKET), donate_argnums=(1,)).trace(
        params, cache, *inputs
    )
    compiled = traced.lower(lowering_platforms=("cuda",)).compile(COMPILER_OPTIONS)
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one_rank))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("tp8", {"all-reduce", "all-gather"}), ("dep8", {"all-gather", "reduce-scatter"})],
)
def test_decode_compiles_for_eight(name, kinds):
    compiled, cache_bytes = compiled_decode(name, Config.preset("tiny"), "reference")
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    found = collectives(compiled.as_text())
    assert set(found) >= kinds
    assert all(traffic.count and traffic.nbytes for traffic in found.values())


@pytest.mark.parametrize(
    ("name", "launches"),
    [("tp8", 1), pytest.param("dep8", 2, id="dep8: routed and shared apart")],
)
def test_ranks_run_the_expert_kernels(name, launches, monkeypatch):
    """Inside ``shard_map``, at the release's width: 288 columns a rank, or one whole expert."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    # XLA takes half a minute for the twenty iterations of a site.
    few = {"hc_sinkhorn_iters": 3}
    sizes = {"moe_intermediate_size": 2304, "o_groups": 8, "o_lora_rank": 32, **few}
    cfg = replace(Config.preset("tiny"), **sizes)
    compiled, cache_bytes = compiled_decode(name, cfg, "auto", repacked=True)
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    assert compiled.as_text().count("mosaic_gpu") >= launches * cfg.num_hidden_layers
