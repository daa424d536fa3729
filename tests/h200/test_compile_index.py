"""``index_topk`` and ``index_scores`` compile for an H200 without spilling a register."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.index_scores import cases as score_cases
from pallas_kernels.index_scores import kernel_sm90 as index_scores
from pallas_kernels.index_topk import cases as topk_cases
from pallas_kernels.index_topk import kernel_sm90 as index_topk
from pallas_kernels.numerics import SERVING
from pallas_kernels.quant.storage import KeyRows
from tools.h200_compile import compile_for_h200

pytestmark = pytest.mark.h200

TOPK = [*topk_cases.CASES, topk_cases.Case(3, 5001, 5001), topk_cases.CORNERS[0]]
SCORES = [
    *score_cases.CASES,
    *(score_cases.Case(4, rows, 64, 4096) for rows in (2, 3, 4, 5)),
    score_cases.Case(2, 1, 64, 2048, page=32),
]


@pytest.fixture
def reports(tmp_path: Path, monkeypatch):
    """Checks what ptxas said of the one kernel compiled."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    yield
    (report,) = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    assert spilled and not any(spilled), report


@pytest.mark.parametrize("case", TOPK, ids=str)
def test_index_topk(case, reports):
    def pick(scores, visible):
        if case.picks == "entries":
            return index_topk.index_topk(scores, visible, k=case.k)
        return index_topk.top_blocks(scores, visible, block_size=case.block_size, k=case.blocks)

    scores = jax.ShapeDtypeStruct((case.rows, case.entries), jnp.float32)
    compile_for_h200(pick, scores, jax.ShapeDtypeStruct((case.rows,), jnp.int32))


@pytest.mark.parametrize("case", SCORES, ids=str)
def test_index_scores(case, reports):
    shape, lead = jax.ShapeDtypeStruct, (case.requests, case.rows)
    pool_lead = case.requests * case.pages, case.page
    words = (shape((*pool_lead, n), jnp.int32) for n in (case.width // 8, case.width // 128))
    candidates = shape((*lead, case.candidates), jnp.int32) if case.candidates else None

    def score(*args):
        run = index_scores.index_scores if candidates is None else index_scores.candidate_scores
        return run(*args, block_size=case.block_size, numerics=SERVING)

    compile_for_h200(
        score,
        shape((*lead, case.heads, case.width), jnp.bfloat16),
        shape((*lead, case.heads), jnp.bfloat16),
        KeyRows(*words),
        shape((case.requests, case.pages), jnp.int32),
        shape(lead, jnp.int32),
        candidates,
    )
