"""Tables, JSON and picture of a report; the variants it is about."""

import io
import json
import math
from dataclasses import replace
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.ops import local_ops
from pallas_kernels.numerics import REFERENCE, SERVING
from pallas_kernels.quant import Fp8Blocks, Fp8Rows
from serving.quality.compare import Pairs
from serving.quality.drafts import Acceptance
from serving.quality.needle import Recall
from serving.quality.picture import plot
from serving.quality.report import Report, as_text
from serving.quality.scorer import Score
from serving.quality.statistics import Estimate
from serving.quality.tasks import TaskResult
from serving.quality.variants import cache_bytes, rounded_heads

HALF = Estimate(0.5, 0.1, 40, 8)


@pytest.fixture
def report() -> Report:
    def row(study, variant, condition, extra):
        pairs, ids = Pairs(), np.arange(10)
        for cluster in range(4):
            exact = Score(np.full(10, 2, np.float32), ids)
            other = Score(exact.nats + extra * (1 + cluster % 2), ids + (ids < 2))
            pairs.add(other, exact, cluster)
        return pairs.row(study, variant, condition)

    rows = [
        row("replay", "decoder", "prompt of 64 (exact)", 0.0),
        row("replay", "decoder", "prompt of 65", 0.002),
        row("replay", "decoder", "all", 0.002),
        row("cache", "fp8", "33 B a token", -0.001),
    ]
    names = ("all", "depth 1 of 8", "residue 0", "residue 1")
    recalls = [
        Recall(name, HALF, HALF, Estimate(-0.25, 0.1, 4, 4), HALF, HALF, HALF) for name in names
    ]
    drafts = [Acceptance(0.0, Estimate(2.5, 0.2, 30, 8), (HALF,) * 5, (HALF,) * 5)]
    about = {"checkpoint": "mini", "numerics": "reference", "text": "held_out.txt"}
    about |= {"pieces": 4, "length": 99, "clusters": 4, "seconds": 61.0, "cpu_seconds": 100.0}
    lone = Estimate(0.5, math.nan, 3, 1)
    return Report(about, HALF, HALF, rows, recalls, drafts, TaskResult(lone, lone, lone))


def test_every_figure_stands_beside_its_error(report):
    lines = [" ".join(line.split()) for line in as_text(report).splitlines()]
    assert "exact: 40 tokens, perplexity 1.65 ± 0.16, 50.00 ± 10.00 % of next tokens right" in lines
    shown = "replay decoder prompt of 65 40 7.4113 7.3891 +3.00 ± 0.58 +5.2 80.00 ± 0.00"
    assert shown in lines
    assert "30 steps, 2.50 ± 0.20 tokens a step" in lines
    assert "depth 1 of 8 40 50.00 ± 10.00 50.00 ± 10.00 -25.00 ± 10.00" in " ".join(lines)
    assert any(
        line.startswith("2 residues") and "lower with replay at 2, higher at 0" in line
        for line in lines
    )


def test_json_holds_no_nan(report):
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert document["tasks"]["replayed"]["error"] is None
    assert document["rows"][1]["difference"]["mean"] == pytest.approx(0.003, rel=1e-4)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_picture_is_a_png(report):
    file = io.BytesIO()
    plot(report, "mini", file)
    assert file.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize(("cache", "size"), [("fp4", 890), ("fp8", 1650), ("bf16", 3200)])
def test_bytes_of_the_release(cache, size):
    """ARCHITECTURE 4.8."""
    assert cache_bytes(Config.preset("flash"), replace(SERVING, cache=cache)) == size


def test_only_the_heads_in_front_of_wo_a_are_rounded():
    rng = np.random.default_rng(2)
    o = jnp.asarray(rng.normal(size=(1, 3, 2, 32)), jnp.bfloat16)
    wo_a, wo_b = (
        Fp8Blocks.quantize(jnp.asarray(rng.normal(size=shape), jnp.float32))
        for shape in ((64, 32), (32, 64))
    )
    ops = local_ops(REFERENCE, "reference")
    rounded = Fp8Rows.quantize(o).dequantize(o.dtype)
    assert not np.array_equal(rounded, o)
    got = rounded_heads(ops).output_projection(o, wo_a, wo_b, groups=2)
    np.testing.assert_array_equal(got, ops.output_projection(rounded, wo_a, wo_b, groups=2))
