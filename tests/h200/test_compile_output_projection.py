"""The launches of the output projection compile for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.numerics import Numerics
from pallas_kernels.output_projection import kernel_sm90
from pallas_kernels.output_projection.cases import CASES, CHECKED
from pallas_kernels.output_projection.grouped_shape import MAX_ROWS
from pallas_kernels.output_projection.joint_shape import TOKENS
from pallas_kernels.quant import Fp8Blocks
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

ALL = {*CASES, *CHECKED}
KERNELS = sorted({c for c in ALL if c.rows <= MAX_ROWS and not c.both}, key=str)
JOINT = sorted({c for c in ALL if c.rows <= TOKENS and c.both}, key=str)


def matrix(n: int, k: int) -> Fp8Blocks:
    return Fp8Blocks(
        jax.ShapeDtypeStruct((n, k), jnp.float8_e4m3fn),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct((n // 32, k // 32), jnp.uint8),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("case", [*KERNELS, *JOINT], ids=str)
def test_projection(case, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    options = {"groups": case.groups, "numerics": Numerics.named(case.numerics)}

    def run(o, *weights):
        if case.both:
            return kernel_sm90.addends(o, *weights, **options)
        return kernel_sm90.grouped_projection(o, *weights, **options, early=case.early)

    o = jax.ShapeDtypeStruct((case.rows, case.heads, case.width), jnp.bfloat16)
    second = [matrix(case.hidden, case.outputs)] if case.both else []
    compile_for_h200(run, o, matrix(case.outputs, case.k), *second)
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report
