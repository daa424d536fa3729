"""``serving.bench check --checkpoint``: what differs, what is followed, what ran."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels import dispatch
from pallas_kernels.numerics import SERVING
from serving.bench import check as module
from serving.bench import check_models, check_reasons
from serving.bench.__main__ import main
from serving.bench.check import Check
from serving.bench.check_compare import Compared, Picks, Tolerance
from serving.bench.check_goldens import GOLDEN, Bounds, GoldenRun, agreement
from serving.bench.check_implementations import Implementation
from serving.bench.check_models import NEAR, CheckpointModels
from serving.bench.check_programs import Choices
from serving.bench.check_report import Report
from serving.bench.forward_cases import parse_case
from serving.buckets import Bucket
from sharding.build import build_ops
from tests.tolerances import E2E_ARGMAX, E2E_COSINE_MEAN, E2E_COSINE_MIN


@pytest.fixture(scope="module")
def models(tiny_dir) -> CheckpointModels:
    return CheckpointModels(tiny_dir)


def test_a_wrong_operation_is_found(models, monkeypatch):
    """A router that picks others is counted, and its picks do not go on."""
    fast = {**module.OPTIONS, "xla_backend_optimization_level": 0}
    monkeypatch.setattr(module, "OPTIONS", fast)
    check, right = Check(models, ("draft=2*1@40",), 1), build_ops("tp1", SERVING, "reference")
    (case,) = check.cases

    def gate(x, weight, *others, top_k, scale):
        return right.moe_gate(x, -weight, *others, top_k=top_k, scale=scale)

    def project(o, *weights, **options):
        return right.output_projection(-o, *weights, **options)

    with ThreadPoolExecutor(1) as pool:
        reference = check.side(right, "reference", pool)
        wrong = replace(right, moe_gate=gate, output_projection=project)
        ours = check.side(wrong, "wrong", pool, reference.programs)
        for side in (reference, ours):
            side.compile(check.dispatches(case))
        want = check.result(reference, case)
        got = check.result(ours, case, want)
    assert all(value.within(NEAR) for value in check.values(case, want, want))
    values = {value.name: value for value in check.values(case, got, want)}
    failed = {name for name, value in values.items() if not value.within(NEAR)}
    assert failed == {"draft, head input", "draft, logits", "draft, moe_gate"}
    picks = values["draft, moe_gate"]
    assert isinstance(picks, Picks) and picks.picks == 3 * 2 * 5 * 3  # of stages, requests, rows
    ((key, _),) = reference.compiled.items()
    found = {one.op: one for one in ours.programs.implementations(*key)}
    assert found["moe_gate"].calls == 3 and not any(one.by_kernel for one in found.values())
    assert found["moe_gate"].reasons == {"cpu is no sm_90 GPU": 3}


def test_choices_of_another_run_go_on():
    ids, weights = jnp.asarray([[0, 1], [2, 3]]), jnp.asarray([[0.6, 0.4], [0.5, 0.5]])
    others = {"moe_gate": [(ids.at[1].set([3, 4]), weights + 1)], "index_topk": [(ids + 7,)]}
    choices = Choices(others)
    right = build_ops("tp1", SERVING, "reference")
    ops = choices.ops(
        replace(right, moe_gate=lambda *_, **__: (ids, weights), index_topk=lambda *_, **__: ids)
    )
    got, used = ops.moe_gate(ids, ids, ids, top_k=2, scale=1.0)
    np.testing.assert_array_equal(got, [[0, 1], [3, 4]])
    np.testing.assert_allclose(used, [[0.6, 0.4], [1.5, 1.5]])
    np.testing.assert_array_equal(ops.index_topk(ids, ids, k=2), ids + 7)
    np.testing.assert_array_equal(choices.made["index_topk"][0][0], ids)  # its own are noted


def test_kernels_are_found_where_they_fit(models, monkeypatch):
    """Traced as for a GPU: the launches of what fits, the limit of what does not."""
    for asked in (dispatch, check_reasons):
        monkeypatch.setattr(asked, "on_hopper", lambda: True)
    check = Check(models, ("draft=2*1@40",), 1)
    programs, _ = models.programs("auto", build_ops("tp1", SERVING), check.shape, None)
    (dispatch_,) = check.dispatches(check.cases[0])
    found = programs.implementations(dispatch_.program, dispatch_.bucket)
    by_op = {one.op: one for one in found}
    for op in ("normed_linears", "output_projection"):
        assert by_op[op].by_kernel == by_op[op].calls == 3 and not by_op[op].reasons
    assert by_op["moe_gate"].reasons == {"experts=4 must be 128, 256 or 384": 3}
    assert by_op["moe_experts"].reasons == {"width f=64 must be a multiple of 256 or 288": 3}
    assert by_op["list_attention"].reasons == {"has no kernel": 3}
    assert "fits, but runs no kernel" not in {why for one in found for why in one.reasons}


def test_report(tmp_path, capsys):
    """Each step is in the file before the next; without kernels it says so."""
    path = tmp_path / "check.json"
    report, case = Report(str(path), "a device", "auto"), parse_case("decode=1*1@8")
    assert json.loads(path.read_text())["notes"] == ["a device", "unfinished"]
    one = Implementation("linear", 3, 0, {}, {"too wide": 3})
    report.program("decode", Bucket(2, 1, 1), [one])
    report.case(case, NEAR, [Compared("x", 1, float("inf"), 1.0, 0.0)])
    values = [agreement("p5, decode", np.eye(3), np.eye(3)[::-1])]
    report.golden("reference", values, GOLDEN)
    report.golden("serving", values, None)
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("within") for row in rows] == [None, False, False, None]
    assert rows[1]["rel"] == "inf"  # JSON has none
    assert report.finish() == 2
    shown = capsys.readouterr().out
    assert "linear: 0 of 3 calls by kernels\n    3: too wide" in shown
    assert "no kernel ran on this device" in shown
    assert json.loads(path.read_text())["notes"][1] == "2 values are outside their limits"


def test_goldens_are_those_of_the_model(tiny_dir, tmp_path):
    assert Bounds(E2E_COSINE_MEAN, E2E_COSINE_MIN, E2E_ARGMAX) == GOLDEN
    cfg = Config.from_json(tiny_dir / "config.json")
    run = GoldenRun(str(tiny_dir.parent), cfg)
    assert [prompt.name for prompt in run.prompts] == ["p5", "p37", "p96"]
    assert (run.longest, run.steps, run.drafts, run.pages) == (96, 12, 5, 2)
    with pytest.raises(UserError, match="is not of a model of 600 tokens"):
        GoldenRun(str(tiny_dir.parent), replace(cfg, vocab_size=600))
    with pytest.raises(UserError, match=r"e2e_quant\.npz: cannot be read"):
        GoldenRun(str(tmp_path), cfg)


def test_agreement():
    logits = np.asarray([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]])
    same = agreement("x", 2 * logits, logits)
    assert (same.rows, same.same) == (2, 1) and same.mean == same.worst == pytest.approx(1)
    assert same.within(GOLDEN)
    off = agreement("x", np.asarray([logits[0], [np.nan, 1, 3]]), logits)
    assert off.worst == -1 and not off.within(GOLDEN)


def test_cases_that_a_checkpoint_cannot_run(models, monkeypatch):
    for case in (*models.cases, "verify=1*6@60:5"):
        Check(models, (case,), 1)
    with pytest.raises(UserError, match="must be at most 128"):
        Check(models, ("decode=1*1@129",), 1)
    monkeypatch.setattr(models, "drafts", False)
    Check(models, models.cases, 1)
    with pytest.raises(UserError, match="has no draft stages"):
        Check(models, ("verify=1*6@60:5",), 1)


@pytest.mark.slow
def test_the_whole_command(tiny_dir, tmp_path, capsys, monkeypatch):
    """Beside the goldens, too; a limit that nothing keeps gives status 1."""
    path = tmp_path / "check.json"
    arguments = ["check", "--checkpoint", str(tiny_dir), "--case", "decode=4*1@64", "--jobs", "1"]
    goldens = ["--goldens", str(tiny_dir.parent), "--json", str(path)]
    assert main([*arguments, *goldens]) == 0
    shown = capsys.readouterr().out
    assert "no kernel ran on this device: the reference was compared with itself" in shown
    assert "0 values are outside their limits" in shown and "FAIL" not in shown
    assert "ok   verify of p5, p37, p96: 18 rows" in shown
    rows = json.loads(path.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"implementation", "value"}
    monkeypatch.setattr(check_models, "NEAR", Tolerance(rel=-1, cosine=2, stored_rel=-1))
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 1
