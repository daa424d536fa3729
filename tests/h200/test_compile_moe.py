"""Every decode case of ``moe_experts`` compiles for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.moe_experts import cases, decode_shape, kernel_sm90, repack
from pallas_kernels.numerics import REFERENCE, SERVING, Numerics
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

RAGGED = cases.Case(17, cases.Layout("tp4", 384, 576))
SMALL = cases.Case(5, cases.Layout("small", 8, 256, experts=8, hidden=512, top_k=3))
CASES = [(case, SERVING) for case in (*cases.CASES, RAGGED, SMALL)] + [(cases.CASES[2], REFERENCE)]


def packed_types(layout: cases.Layout) -> repack.DecodeWeights:
    """What ``repack.pack`` makes of the layout's weights."""
    experts, shared = jax.eval_shape(
        lambda key: cases.random_weights(key, layout.local, layout.width, layout.hidden),
        jax.random.key(0),
    )
    return jax.eval_shape(repack.pack_unchecked, experts, shared)


def compile_case(case: cases.Case, numerics: Numerics):
    layout = case.layout

    def op(x, ids, weights, packed):
        return kernel_sm90.moe_experts_decode(
            x,
            ids,
            weights,
            packed,
            experts=layout.local,
            width=layout.width,
            limit=cases.LIMIT,
            numerics=numerics,
        )

    routing = (case.rows, layout.top_k)
    return compile_for_h200(
        op,
        jax.ShapeDtypeStruct((case.rows, layout.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct(routing, jnp.int32),
        jax.ShapeDtypeStruct(routing, jnp.float32),
        packed_types(layout),
    )


@pytest.mark.parametrize(("case", "numerics"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_compiles_without_spills(case, numerics, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_case(case, numerics)
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(reports) == (1 if numerics is SERVING else 2)
    for report in reports:
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
        assert spilled and not any(spilled), report
        # 80 registers for each of 768 threads at the launch: the pool that Tuning.registers shares.
        assert re.search(r"Used 80 registers", report), report


def test_tuned_settings_fit_the_cases_they_name():
    for case in cases.CASES:
        layout = case.layout
        tuning = decode_shape.tuned(case.rows, layout.local, layout.width)
        shape = decode_shape.Shape(
            case.rows,
            layout.top_k,
            layout.local,
            layout.hidden,
            layout.width,
            cases.LIMIT,
            132,
            tuning,
        )
        assert shape.up.steps * shape.up.splits == shape.up.depth
        assert shape.down8.steps * shape.down8.splits == shape.down8.depth
