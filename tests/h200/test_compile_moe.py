"""Every case of ``moe_experts`` compiles for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.moe_experts import cases, decode_shape, kernel_sm90, repack
from pallas_kernels.moe_experts.decode_arrange import arrange
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
LAUNCHES = {("decode", SERVING): 2, ("decode", REFERENCE): 3, "prefill": 3}


def types(layout: cases.Layout) -> tuple[repack.PackedExperts, ExpertWeights]:
    """What ``repack.pack`` makes of the layout's weights, and its shared expert as released."""
    experts, shared = jax.eval_shape(
        lambda key: cases.random_weights(key, layout.local, layout.width, layout.hidden),
        jax.random.key(0),
    )
    return jax.eval_shape(repack.pack_unchecked, experts, shared), shared


def compile_case(case: cases.Case, numerics: Numerics, *, parts: bool = False):
    layout = case.layout
    sizes = {"experts": layout.local, "width": layout.width, "limit": cases.LIMIT}

    def op(x, ids, weights, packed, shared):
        if case.phase == "prefill":
            return kernel_sm90.moe_experts_prefill(
                x, ids, weights, packed, shared, numerics=numerics, **sizes
            )
        if parts:
            return kernel_sm90.decode_addends(x, ids, weights, packed, numerics=numerics, **sizes)
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
    # warpgroups share. The launch before them has few.
    assert set(sorted(launched)[1:]) == {128 if prefill else 80}, launched


@pytest.mark.parametrize(
    ("rows", "parts"), [(1, False), (1, True), (6, False), (6, True), (32, False)]
)
def test_xla_adds_what_is_not_left_in_parts_and_does_nothing_else(
    rows, parts, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    text = compile_case(cases.Case(rows, cases.LAYOUTS[0]), SERVING, parts=parts).as_text()
    assert text is not None
    assert len(re.findall(r" custom-call\(", text)) == 2
    launched = re.findall(r" (fusion|copy|copy-start|while|call)\(", text[text.index("ENTRY") :])
    assert launched == [] if parts else launched == ["fusion"], text
    for report in (path.read_text() for path in tmp_path.glob("*.ptxas")):
        assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}, report


@pytest.mark.parametrize("layout", [*cases.LAYOUTS[::2], cases.DRAFT, SMALL], ids=lambda v: v.name)
@pytest.mark.parametrize("rows", [1, 6, 8, 32, 128])
def test_the_launch_before_the_products_does_not_spill(layout, rows, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    local, width, d = layout.local, layout.width, layout.hidden
    tuning = decode_shape.tuned(rows, local, width)
    s = decode_shape.Shape(rows, layout.top_k, local, d, width, cases.LIMIT, 132, tuning)
    kinds = ((rows * s.k,), jnp.int32), ((rows * s.k,), jnp.float32), ((rows, d), jnp.bfloat16)
    compile_for_h200(arrange(s, True), *(jax.ShapeDtypeStruct(*kind) for kind in kinds))
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert re.findall(r"(\d+) bytes spill \w+, (\d+) bytes spill", report) == [("0", "0")], report


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
