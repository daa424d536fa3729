"""The FP8 ``linear`` kernels compile for an H200 without spilling a register."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear import cases, kernel_sm90
from pallas_kernels.linear.cases import Case
from pallas_kernels.linear.stream_shape import Stream
from pallas_kernels.numerics import REFERENCE, SERVING
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

MANY = {case for case in cases.CHECKED if case.rows > 128}
FEW = [case for case in cases.CHECKED if case not in MANY]
POOL = 65536  # registers of a multiprocessor


@pytest.fixture
def reports(tmp_path: Path, monkeypatch):
    """What ptxas said of the kernels compiled, registers by kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def read() -> dict[str, int]:
        used = {}
        for text in [path.read_text() for path in tmp_path.glob("*.ptxas")]:
            spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
            assert spilled and not any(spilled), text
            assert "serializ" not in text, text  # wgmma that waits after each instruction
            name = re.findall(r"entry function '(\w+)_mosaic_gpu_kernel'", text)[0]
            used[name] = int(re.findall(r"Used (\d+) registers", text)[0])
        return used

    return read


def compile_case(case: Case, **options) -> None:
    x, weights = jax.eval_shape(lambda: cases.inputs(case, 0))
    options = {"numerics": SERVING, "early": case.early, **options}
    if case.norm:
        norm = jax.ShapeDtypeStruct(x.shape[-1:], x.dtype)
        run = partial(kernel_sm90.normed_linears, eps=cases.EPS, **options)
        compile_for_h200(run, x, norm, weights)
    else:
        compile_for_h200(partial(kernel_sm90.linears, **options), x, weights)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_rows(case, reports):
    compile_case(case)
    (used,) = reports().values()
    norm = cases.EPS if case.norm else None
    s = kernel_sm90.few(case.rows, case.k, case.outputs, early=case.early, norm=norm)
    side_by_side = 1 if isinstance(s, Stream) else 2
    assert POOL // (s.threads * used) >= side_by_side, used


@pytest.mark.parametrize("case", sorted(MANY, key=str), ids=str)
def test_many_rows(case, reports):
    compile_case(case)
    used = reports()
    # 128 registers for each of 512 threads at the launch: the pool that the warpgroups share.
    assert used.pop("linear_many_rows") == POOL // 512
    assert [*used] == ["linear_arrange"]


@pytest.mark.parametrize("rows", [3, 5, 200])
def test_reference_numerics_and_float32_results(rows, reports):
    case = Case("pair", rows, (1280, 512), 5120)
    compile_case(case, numerics=REFERENCE, out_dtype=jnp.float32)
    assert len(reports()) == 1 + (rows > 128)
