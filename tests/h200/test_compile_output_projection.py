"""The grouped projection compiles for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.numerics import Numerics
from pallas_kernels.output_projection import kernel_sm90
from pallas_kernels.output_projection.cases import CASES, CHECKED
from pallas_kernels.output_projection.grouped_shape import MAX_ROWS
from pallas_kernels.quant import Fp8Blocks
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

KERNELS = sorted({c for c in (*CASES, *CHECKED) if c.rows <= MAX_ROWS}, key=str)


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_grouped_projection(case, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def run(o, weight):
        numerics = Numerics.named(case.numerics)
        options = {"groups": case.groups, "numerics": numerics, "early": case.early}
        return kernel_sm90.grouped_projection(o, weight, **options)

    weight = Fp8Blocks(
        jax.ShapeDtypeStruct((case.outputs, case.k), jnp.float8_e4m3fn),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct((case.outputs // 32, case.k // 32), jnp.uint8),  # pyright: ignore[reportArgumentType]
    )
    compile_for_h200(
        run, jax.ShapeDtypeStruct((case.rows, case.heads, case.width), jnp.bfloat16), weight
    )
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report
