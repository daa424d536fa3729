"""The decode step of eight-device layouts compiles for eight H200s, the cache updated in place."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import COMPILER_OPTIONS
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.moe import MoE, RepackedExperts
from pallas_kernels import dispatch
from pallas_kernels.all_reduce.exchange import SLOTS, Exchange
from pallas_kernels.numerics import SERVING
from serving.bench.forward_launches import kernels
from serving.programs import READERS, Bucket, Programs
from serving.speculative import Speculation
from sharding.build import build_ops
from sharding.hlo import collectives
from sharding.peer import PeerMemory
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


@pytest.fixture
def no_memory(monkeypatch):
    """Peer-to-peer sums without memory, since no device is there."""

    def make(mesh, axes, *, rows, width, timeout_s, room, kernels):
        ranks = prod(mesh.shape[axis] for axis in axes)
        exchange = Exchange(ranks, rows, width, timeout_s, room)
        shape = jax.ShapeDtypeStruct((mesh.size, exchange.table_words), jnp.int32)
        return PeerMemory(mesh, axes, exchange, kernels, None, shape)

    monkeypatch.setattr(PeerMemory, "make", make)


def compiled_step(
    name: str,
    cfg: Config,
    kernels: str,
    *,
    repacked: bool = False,
    peers: str = "",
    dump: Path | None = None,
    program: str = "decode",
    bucket: Bucket = BUCKET,
):
    speculation = None if program == "decode" else Speculation()
    placement = place(name, cfg, list(h200_mesh(8).devices.flat))
    model = nnx.eval_shape(
        lambda: Model(cfg, numerics=SERVING, rngs=nnx.Rngs(0), mtp=bool(speculation))
    )
    if repacked:
        repack_abstract(model, placement)
    ops = build_ops(placement.division, SERVING, kernels, "peer" if peers else "psum")
    programs = Programs(
        model, ops, SHAPE, placement=placement, peers=peers, speculation=speculation
    )

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
    inputs = placement.shapes(programs.input_shapes(program, bucket), BY_RANK)
    if memory := programs.memory(program, bucket):
        inputs = *inputs, placement.shapes(memory.table, memory.table_spec)
    donated = () if program in READERS else (1,)
    traced = jax.jit(programs.bound(program, bucket), donate_argnums=donated).trace(
        params, cache, *inputs
    )
    dumped = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True} if dump else {}
    compiled = traced.lower(lowering_platforms=("cuda",)).compile(COMPILER_OPTIONS | dumped)
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one_rank))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("tp8", {"all-reduce", "all-gather"}), ("dep8", {"all-gather", "reduce-scatter"})],
)
def test_decode_compiles_for_eight(name, kinds):
    compiled, cache_bytes = compiled_step(name, Config.preset("tiny"), "reference")
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    found = collectives(compiled.as_text())
    assert set(found) >= kinds
    assert all(traffic.count and traffic.nbytes for traffic in found.values())


WIDE = {"moe_intermediate_size": 2304, "o_groups": 8, "o_lora_rank": 32}
# XLA takes half a minute for the twenty iterations of a site.
FEW = {"hc_sinkhorn_iters": 3}


def test_data_ranks_run_the_expert_kernels(monkeypatch):
    """One whole expert a rank, inside ``shard_map``; routed and shared apart."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    cfg = replace(Config.preset("tiny"), **WIDE, **FEW)
    compiled, cache_bytes = compiled_step("dep8", cfg, "auto", repacked=True)
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    assert compiled.as_text().count("mosaic_gpu") >= 2 * cfg.num_hidden_layers


def outermost(compiled: jax.stages.Compiled, dump: Path) -> list[str]:
    """Kinds of the outermost thunks of a program without collectives of XLA's."""
    assert collectives(compiled.as_text()) == {}
    (thunks,) = [p.read_text() for p in dump.glob("*thunk_sequence_after_thunk_passes.txt")]
    return re.findall(r"^\d+: (k\w+) ", thunks, re.M)


@pytest.mark.parametrize(("program", "rows"), [("draft", 5), ("verify", 4)])
def test_drafts_of_tensor_ranks_are_one_command_buffer(
    program, rows, no_memory, monkeypatch, tmp_path
):
    """288 columns a rank, as at the release's width, and streams that the mHC kernels take."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    cfg = replace(Config.preset("tiny"), **WIDE, hidden_size=1024)
    compiled, _ = compiled_step(
        "tp8",
        cfg,
        "auto",
        repacked=True,
        peers="mosaic",
        dump=tmp_path,
        program=program,
        bucket=Bucket(2, rows, 8),
    )
    assert outermost(compiled, tmp_path) == ["kCommandBuffer"]


def test_the_release_on_tensor_ranks_is_one_command_buffer(no_memory, monkeypatch, tmp_path):
    """All 40 layers. Sums, embedding, Engram rows and outputs, logits and sampled tokens need no
    collective of XLA's.
    """
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    cfg = Config.preset("flash")
    compiled, cache_bytes = compiled_step(
        "tp8", cfg, "auto", repacked=True, peers="mosaic", dump=tmp_path
    )
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes
    assert outermost(compiled, tmp_path) == ["kCommandBuffer"]
    # Nothing takes a sum in where Engram comes next; the embedding is one too: 81 fill the slots.
    engrams = len(cfg.engram_layer_ids)
    found, fused = kernels(compiled.as_text()), 2 * cfg.num_hidden_layers - engrams
    assert (fused + engrams + 1) % SLOTS == 0
    assert (found["peer_all_reduce_norm"], found["peer_all_reduce"]) == (fused, engrams + 1)
    # Rows and outputs of each Engram layer, logits, tokens.
    assert (found["peer_gather"], found["peer_report"]) == (2 * engrams + 2, 1)
