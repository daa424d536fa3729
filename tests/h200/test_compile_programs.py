"""The serving programs compile for an H200 with every cache array updated in place."""

import jax
import pytest
from flax import nnx

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import COMPILER_OPTIONS
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.ops import local_ops
from pallas_kernels.numerics import SERVING
from serving.programs import Bucket, Programs
from serving.speculative import Speculation
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

HLO_NAMES = {"int32": "s32", "uint8": "u8", "float32": "f32", "bfloat16": "bf16"}


@pytest.mark.parametrize(
    ("name", "bucket", "speculation"),
    [
        ("decode", Bucket(4, 1, 8), None),
        ("encode", Bucket(2, 64, 8), None),
        ("verify", Bucket(4, 6, 8), Speculation()),
    ],
)
def test_cache_is_donated_and_never_copied(name, bucket, speculation):
    cfg = Config.preset("tiny")
    model = nnx.eval_shape(lambda: Model(cfg, numerics=SERVING, rngs=nnx.Rngs(0)))
    ops, shape = local_ops(SERVING, "reference"), CacheShape(4, 256, 16)
    programs = Programs(model, ops, shape, speculation=speculation)
    cache = jax.eval_shape(programs.new_cache)
    inputs = programs.input_shapes(name, bucket)
    compiled = compile_for_h200(
        programs.bound(name, bucket),
        programs.params,
        cache,
        *inputs,
        donate=(1,),
        options=COMPILER_OPTIONS,
    )
    leaves = jax.tree.leaves(cache)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert compiled.memory_analysis().alias_size_in_bytes == total
    shapes = {
        f"{HLO_NAMES[leaf.dtype.name]}[{','.join(map(str, leaf.shape))}]"
        for leaf in leaves
        if leaf.size * leaf.dtype.itemsize > 16_384
    }
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert [line for line in copies if any(shape in line for shape in shapes)] == []
