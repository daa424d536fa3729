"""Every case of ``moe_gate`` compiles for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.moe_gate import cases, kernel_sm90
from pallas_kernels.moe_gate.kernel_sm90 import Tuning
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

CASES = [(case, None, False) for case in cases.CASES]
CASES += [
    (cases.Case(3, 256, 8, 512), Tuning(8, 2), True),
    (cases.Case(3, 256, 8, 512), Tuning(8, spread=True), True),
    (cases.Case(8), Tuning(8, 16), False),
    (cases.Case(8), Tuning(8, spread=True), False),
    (cases.Case(100), None, True),
    (cases.Case(2048), None, True),
    (cases.Case(8192), Tuning(128, 2), True),
]


@pytest.mark.parametrize(("case", "tuning", "bias_rows"), CASES, ids=str)
def test_compiles_without_spills(case, tuning, bias_rows, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def op(x, weight, bias, *more):
        options = {"top_k": case.top_k, "scale": case.scale, "tuning": tuning}
        return kernel_sm90.moe_gate(x, weight, bias, *more, **options)

    # One bias a row, or all that a model has.
    more = [jax.ShapeDtypeStruct((case.experts,), jnp.float32)]
    more += [jax.ShapeDtypeStruct((case.rows,), jnp.bool)] * 2
    compile_for_h200(
        op,
        jax.ShapeDtypeStruct((case.rows, case.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((case.experts, case.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((case.rows,) * bias_rows + (case.experts,), jnp.float32),
        *([] if bias_rows else more),
    )
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report
    # Four warpgroups share 65536 registers at the launch.
    used = tuning or kernel_sm90.tuned(case.rows, case.experts, case.hidden)
    if case.experts == 384 and not used.spread:
        assert re.search(r"Used 128 registers", report), report
