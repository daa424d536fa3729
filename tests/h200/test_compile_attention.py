"""The attention kernel compiles for an H200 without spilling a register or serialising wgmma."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.numerics import SERVING
from pallas_kernels.quant.storage import LatentRows, WindowRows
from pallas_kernels.sparse_attention import kernel_sm90
from pallas_kernels.sparse_attention.attend_shape import ROPE, WIDTH
from pallas_kernels.sparse_attention.cases import CASES, Case
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

RANKS = [Case(rows, 1, 4096, heads=heads) for heads in (8, 16, 32) for rows in (1, 128)]
ODD = Case(3, 2, 70, 60, 60, window=64, page=7)


RING = 256
AHEAD = (4096, 4096), (5120, 4096)  # more than a launch asks for


def compile_case(case: Case, ring: bool, ahead: bool = False) -> jax.stages.Compiled:
    b, t, h = case.requests, case.rows, case.heads
    shape, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32

    def op(codes, window, written, slot, *rest):
        q, cos, sin, position, floor, *others = rest
        options = {"window_size": case.window, "numerics": SERVING}
        if ring:
            return kernel_sm90.ring_attention(
                q, cos, sin, window, written, slot, position, floor, *others, **options, ahead=codes
            )
        return kernel_sm90.sparse_attention(
            q, cos, sin, window, written, position, floor, *others, **options
        )

    def rows(kind: type, *lead: int):
        return jax.eval_shape(lambda: kind.zeros(lead, WIDTH))

    stored = (b + 1, RING) if ring else (b, case.window - 1 + t)
    pages = -(-(case.start + t) // case.page)
    return compile_for_h200(
        op,
        [shape(size, jnp.float8_e4m3fn) for size in AHEAD] if ahead else (),
        rows(WindowRows, *stored),
        shape(stored, i32 if ring else jnp.bool),
        shape((b,), i32),
        shape((b, t, h, WIDTH), jnp.bfloat16),
        *[shape((b, t, ROPE // 2), f32)] * 2,
        shape((b, t), i32),
        shape((b,), i32),
        rows(LatentRows, b * pages, case.page) if case.selected else None,
        shape((b, pages), i32),
        shape((b, t, case.selected), i32) if case.selected else None,
        shape((h,), f32),
    )


@pytest.mark.parametrize(
    ("case", "ring"),
    [*[(case, False) for case in (*CASES, *RANKS, ODD)], *[(case, True) for case in CASES[1:8:3]]],
    ids=lambda value: (
        f"{value},heads={value.heads}" if isinstance(value, Case) else f"ring={value}"
    ),
)
def test_compiles_without_spills(case, ring, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_case(case, ring)
    check_registers(tmp_path)


def check_registers(dumped: Path) -> None:
    (report,) = [path.read_text() for path in dumped.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report
    assert "serialized" not in report and "C75" not in report, report
    # 168 registers for each of 384 threads at the launch: the pool that setmaxnreg shares.
    assert re.search(r"Used 168 registers", report), report


@pytest.mark.parametrize("case", [Case(1, 1, 4096), Case(1, 6, 4096), Case(16, 1, 4096)], ids=str)
def test_what_is_read_ahead_takes_no_register_and_no_copy(case, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_case(case, ring=True, ahead=True)
    check_registers(tmp_path)
    (ptx,) = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert "cp.async.bulk.prefetch.L2.global" in ptx
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 1 << 20
