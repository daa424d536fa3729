"""Compress-and-store compiles for an H200 without spilling a register or copying a cache."""

import re
from functools import partial
from pathlib import Path

import jax
import pytest

from pallas_kernels.compress.cases import CASES, StoreCase, caches, inputs, store_layer
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
