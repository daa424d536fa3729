"""Every case of ``moe_experts`` compiles for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.moe_experts import cases, decode_shape, kernel_sm90, repack
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import REFERENCE, SERVING, Numerics
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

TP4 = cases.Layout("tp4", 384, 576)
SMALL = cases.Layout("small", 8, 256, experts=8, hidden=512, top_k=3)
EXTRA = (
    cases.Case(17, TP4),
    cases.Case(5, SMALL),
    cases.Case(1000, TP4, "prefill"),
    cases.Case(129, SMALL, "prefill"),
)
CASES = [(case, SERVING) for case in (*cases.CASES, *EXTRA)]
CASES += [(EXTRA[0], REFERENCE), (EXTRA[3], REFERENCE)]
LAUNCHES = {("decode", SERVING): 1, ("decode", REFERENCE): 2, "prefill": 3}


def types(layout: cases.Layout) -> tuple[repack.PackedExperts, ExpertWeights]:
    """What ``repack.pack`` makes of the layout's weights, and its shared expert as released."""
    experts, shared = jax.eval_shape(
        lambda key: cases.random_weights(key, layout.local, layout.width, layout.hidden),
        jax.random.key(0),
    )
    return jax.eval_shape(repack.pack_unchecked, experts, shared), shared


def compile_case(case: cases.Case, numerics: Numerics):
    layout = case.layout
    sizes = {"experts": layout.local, "width": layout.width, "limit": cases.LIMIT}

    def op(x, ids, weights, packed, shared):
        if case.phase == "prefill":
            return kernel_sm90.moe_experts_prefill(
                x, ids, weights, packed, shared, numerics=numerics, **sizes
            )
        return kernel_sm90.moe_experts_decode(x, ids, weights, packed, numerics=numerics, **sizes)

    routing = (case.rows, layout.top_k)
    return compile_for_h200(
        op,
        jax.ShapeDtypeStruct((case.rows, layout.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct(routing, jnp.int32),
        jax.ShapeDtypeStruct(routing, jnp.float32),
        *types(layout),
    )


@pytest.mark.parametrize(("case", "numerics"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_compiles_without_spills(case, numerics, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_case(case, numerics)
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    prefill = case.phase == "prefill"
    assert len(reports) == LAUNCHES["prefill" if prefill else (case.phase, numerics)]
    launched = []
    for report in reports:
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
        assert spilled and not any(spilled), report
        # A loss of overlap that ptxas admits to: wgmma waits after each instruction.
        assert "serializ" not in report, report
        launched += [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    # 80 registers for each of 768 threads at the launch, or 128 for each of 512: the pool that the
    # warpgroups share. The gather has few.
    assert sorted(launched)[1:] == [128, 128] if prefill else set(launched) == {80}, launched


def test_tuned_settings_fit_the_cases_they_name():
    for case in cases.CASES:
        if case.phase == "prefill":
            continue
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
