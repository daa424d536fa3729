"""The serving programs compile for an H200 with every cache array updated in place."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from flax import nnx

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import COMPILER_OPTIONS
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.ops import local_ops
from pallas_kernels import dispatch
from pallas_kernels.numerics import SERVING
from serving.programs import Bucket, Programs
from serving.speculative import Speculation
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

HLO_NAMES = {"int32": "s32", "uint8": "u8", "float32": "f32", "bfloat16": "bf16"}


# One layer of each kind, with the widths that the kernels have.
WIDE = replace(
    Config.preset("tiny"),
    num_hidden_layers=5,
    compress_ratios=(0, 0, 2, 1, 1, 0),
    kv_source_layer_ids=(2, 3),
    index_source_layer_ids=(2, 3, 4),
    candidate_source_layer_id=3,
    engram_layer_ids=(1,),
    engram_num_embeddings=Config.preset("tiny").engram_num_embeddings[:1],
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(4,),
    head_dim=512,
    qk_rope_head_dim=64,
    index_n_heads=32,
    index_head_dim=128,
    candidate_block_size=8,
    hc_sinkhorn_iters=3,  # XLA takes half a minute for the twenty of a site
)
KERNELS = (
    "compress_store",
    "index_scores",
    "index_topk",
    "mhc_expand_collapse_norm",
    "sparse_attention",
)


def compiled_in_place(cfg: Config, kernels: str, name: str, bucket: Bucket) -> str:
    """The program's HLO, after every cache array was found aliased and none copied."""
    model = nnx.eval_shape(lambda: Model(cfg, numerics=SERVING, rngs=nnx.Rngs(0)))
    ops, shape = local_ops(SERVING, kernels), CacheShape(4, 256, 16)
    speculation = Speculation() if name == "verify" else None
    programs = Programs(model, ops, shape, speculation=speculation)
    cache = jax.eval_shape(programs.new_cache)
    compiled = compile_for_h200(
        programs.bound(name, bucket),
        programs.params,
        cache,
        *programs.input_shapes(name, bucket),
        donate=(1,),
        options=COMPILER_OPTIONS,
    )
    leaves = jax.tree.leaves(cache)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    assert memory.alias_size_in_bytes == total
    shapes = {
        f"{HLO_NAMES[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"
        for leaf in leaves
        if leaf.size * leaf.dtype.itemsize > 16_384
    }
    copies = [line for line in text.splitlines() if re.search(r" copy(-start)?\(", line)]
    assert [line for line in copies if any(shape in line for shape in shapes)] == []
    return text


@pytest.mark.parametrize(
    ("name", "bucket"),
    [("decode", Bucket(4, 1, 8)), ("encode", Bucket(2, 64, 8)), ("verify", Bucket(4, 6, 8))],
)
def test_cache_is_donated_and_never_copied(name, bucket):
    compiled_in_place(Config.preset("tiny"), "reference", name, bucket)


@pytest.mark.parametrize(
    ("name", "bucket"), [("decode", Bucket(4, 1, 8)), ("encode", Bucket(2, 64, 8))]
)
def test_kernels_write_the_cache_in_place(name, bucket, tmp_path: Path, monkeypatch):
    """No kernel spills; 64 rows are more than the rings hold beside a window, one is not."""
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled_in_place(WIDE, "auto", name, bucket)
    reports = {path.name: path.read_text() for path in tmp_path.glob("*.ptxas")}
    for kernel in KERNELS:
        assert any(name.startswith(kernel) for name in reports), (kernel, *reports)
    spilled = [int(n) for text in reports.values() for n in re.findall(r"(\d+) bytes spill", text)]
    assert spilled and not any(spilled), reports
