"""The Engram kernels compile for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.engram import kernel_sm90
from pallas_kernels.engram.cases import CASES, CHECKED, EPS
from pallas_kernels.quant import Fp8Rows
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

KERNELS = sorted({*CASES, *CHECKED}, key=str)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch):
    """Checks what ptxas said of the one kernel compiled."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    yield
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report


def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("case", [c for c in KERNELS if c.part == "rows"], ids=str)
def test_rows(case, reports):
    def run(codes, scales, ids):
        return kernel_sm90.engram_rows(Fp8Rows(codes, scales), ids, dtype=jnp.bfloat16)

    codes = array(jnp.float8_e4m3fn, case.table, case.width)
    scales = array(jnp.uint8, case.table, case.width // 32)
    compile_for_h200(run, codes, scales, array(jnp.int32, case.rows, case.columns))


@pytest.mark.parametrize("case", [c for c in KERNELS if c.part == "gate"], ids=str)
def test_gate_and_addition(case, reports):
    def run(*args):
        return kernel_sm90.engram_gate_add(*args, eps=EPS)

    r, s, d = case.rows, case.streams, case.hidden
    weights = [array(jnp.bfloat16, s, d)] * 2
    h, kv = array(jnp.bfloat16, r, s, d), array(jnp.bfloat16, r, (s + 1) * d)
    compile_for_h200(run, h, kv, *weights, array(jnp.bool_, r))
