"""Compress-and-store compiles for an H200 without spilling a register or copying a cache."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.compress.beside_sm90 import linears_beside_rows
from pallas_kernels.compress.cases import CASES, StoreCase, caches, inputs, store_layer
from pallas_kernels.numerics import SERVING
from pallas_kernels.quant import Fp8Blocks
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

ODD = (StoreCase(3, 7, 2, page=6, ring=24), StoreCase(3, 7, 1, page=6, ring=24))


@pytest.mark.parametrize("case", [*CASES, *ODD], ids=str)
def test_compress(case: StoreCase, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    made = jax.eval_shape(partial(inputs, case), jax.random.key(0))
    cache = caches(*made[2:])
    layer = partial(store_layer, kernel=True)
    compiled = compile_for_h200(layer, cache, made, donate=(0,))
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(reports) == (2 if case.ratio else 1)
    spilled = [int(n) for report in reports for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), reports
    stored = sum(plane.size * plane.dtype.itemsize for plane in jax.tree.leaves(cache))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and memory.alias_size_in_bytes == stored
    assert text is not None and not re.search(r"\bcopy(-start)?\(", text)


@pytest.mark.parametrize("rows", [1, 8, 32, 128])
@pytest.mark.parametrize("outputs", [(32768,), (32768, 4096)], ids=len)
def test_products_beside_stores(rows, outputs, tmp_path: Path, monkeypatch):
    """Of a layer that owns global rows, then of one that does not."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    case = StoreCase(rows, 1, len(outputs) - 1)
    made = jax.eval_shape(partial(inputs, case), jax.random.key(0))

    def run(planes, made, x, norm, *weights):
        chunk, paged, _, keys, window = made
        window = replace(window, ring=planes[0], tags=planes[1])
        jobs = {"window": window, "paged": paged, "keys": keys}
        options = {"eps": 1e-6, "row_eps": 1e-20, "numerics": SERVING}
        return linears_beside_rows(x, norm, weights, chunk, **jobs, **options)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    weights = [
        Fp8Blocks(array(jnp.float8_e4m3fn, n, 1280), array(jnp.uint8, n // 32, 40))  # pyright: ignore[reportArgumentType]
        for n in outputs
    ]
    planes = made[-1].ring, made[-1].tags
    arrays = array(jnp.bfloat16, rows, 1, 1280), array(jnp.bfloat16, 1280)
    compiled = compile_for_h200(run, planes, made, *arrays, *weights, donate=(0,))
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report
    memory = compiled.memory_analysis()
    stored = sum(plane.size * plane.dtype.itemsize for plane in jax.tree.leaves(planes))
    assert memory is not None and memory.alias_size_in_bytes >= stored
