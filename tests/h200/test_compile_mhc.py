"""The hyper-connection kernels compile for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.addends import Addends
from pallas_kernels.mhc import kernel_sm90
from pallas_kernels.mhc.cases import Case
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

ROWS = (1, 8, 32, 128, 200, 400, 1000, 2000, 4000, 8192)
WIDTHS = (256, 1000, 6144)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch):
    """Checks what ptxas said of each kernel compiled."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    yield
    texts = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert texts
    for text in texts:
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        assert spilled and not any(spilled), text


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize(
    "case", [*(Case(rows) for rows in ROWS), *(Case(300, width=width) for width in WIDTHS)], ids=str
)
def test_expand_collapse_norm(case, reports):
    r, s, d = case.rows, case.streams, case.width

    def run(*args):
        return kernel_sm90.expand_collapse_norm(*args, norm_eps=1e-20)

    mix = f32(r, s)
    compile_for_h200(run, bf16(r, s, d), bf16(r, d), mix, f32(r, s, s), mix, bf16(d))


@pytest.mark.parametrize(
    "case", [*(Case(rows) for rows in ROWS), Case(9, width=1024), Case(2000, width=1024)], ids=str
)
def test_coefficients(case, reports):
    r, s, d = case.rows, case.streams, case.width

    def run(*args):
        return kernel_sm90.coefficients(*args, iters=case.iters, eps=1e-6, norm_eps=1e-20)

    compile_for_h200(run, bf16(r, s, d), f32(case.mixes, s * d), f32(case.mixes), f32(3))


@pytest.mark.parametrize("parts", [0, 16, 24])
@pytest.mark.parametrize("case", [Case(1), Case(7), Case(2, width=6144), Case(3, width=1024)])
def test_site(case, parts, reports):
    r, s, d = case.rows, case.streams, case.width

    def run(h, y, *args):
        y = Addends(y) if parts else y
        options = {"norm_eps": 1e-20, "iters": case.iters, "eps": 1e-6, "mix_eps": 1e-20}
        return kernel_sm90.site(h, y, *args, **options)

    mix, y = f32(r, s), f32(parts, r, d) if parts else bf16(r, d)
    mixing = f32(case.mixes, s * d), f32(case.mixes), f32(3)
    compile_for_h200(run, bf16(r, s, d), y, mix, f32(r, s, s), mix, bf16(d), *mixing)
