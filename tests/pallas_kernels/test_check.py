"""``pallas_kernels.check``: references pass as kernels, faulty ones fail where they should, and a
hang or a crash costs one case.
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.check import Check, Program, aligned, near, near_overall, same
from pallas_kernels.check import __main__ as command
from pallas_kernels.check.child import selected, serve
from pallas_kernels.check.parent import NoDevice, Outcome, outcomes
from pallas_kernels.compress import cases as store_cases
from pallas_kernels.index_scores import cases as score_cases
from pallas_kernels.index_scores.ref import index_scores
from pallas_kernels.index_topk import cases as topk_cases
from pallas_kernels.index_topk import ref as topk_ref
from pallas_kernels.moe_experts import cases as expert_cases
from pallas_kernels.moe_experts.ref import moe_experts
from pallas_kernels.moe_gate import cases as gate_cases
from pallas_kernels.moe_gate.ref import moe_gate
from pallas_kernels.sparse_attention import cases as attention_cases
from pallas_kernels.sparse_attention.ref import ring_attention, sparse_attention

GATE = gate_cases.Case(24, 8, 2, 64)
GATE_ROWS = gate_cases.Case(8, 16, 3, 64, bias_rows=True)
PICKS = topk_cases.Case(20, 600, 600, k=32)
BLOCKS = topk_cases.Case(3, 99, 99, blocks=8, block_size=4, picks="blocks")
EXPERTS = expert_cases.Case(4, expert_cases.Layout("small", 4, 64, 6, 64, 2))
ATTENTION = attention_cases.Case(2, 5, 130, 24, 20, 16, heads=8)
STORE = store_cases.StoreCase(3, 7, 2, page=6, ring=24)
SCORES = score_cases.Case(5, 3, 3, 17, heads=4, page=8, block_size=4)


def unread(select: Callable) -> Callable:
    """A selection that reads visible scores only."""

    def run(scores, visible, **options):
        seen = jnp.arange(scores.shape[1]) < visible[:, None]
        return select(jnp.where(seen, scores, -jnp.inf), visible, **options)

    return run


@pytest.fixture(autouse=True)
def one_set(monkeypatch):
    """Of rows that a benchmark takes in turn."""
    for cases in (attention_cases, score_cases):
        monkeypatch.setattr(cases, "COLD_BYTES", 1)


@pytest.mark.parametrize(
    ("checks", "case", "run"),
    [
        (gate_cases.checks, GATE, moe_gate),
        (gate_cases.checks, GATE_ROWS, gate_cases.xla_path),
        (topk_cases.checks, PICKS, unread(topk_ref.index_topk)),
        (topk_cases.checks, BLOCKS, unread(topk_ref.top_blocks)),
        (expert_cases.checks, EXPERTS, moe_experts),
        (partial(attention_cases.checks, ring=ring_attention), ATTENTION, sparse_attention),
        (score_cases.checks, SCORES, index_scores),
        (store_cases.checks, STORE, partial(store_cases.stored, kernel=False)),
    ],
    ids=lambda value: str(value) if hasattr(value, "rows") else "",
)
def test_the_reference_passes(checks, case, run):
    made = list(checks(case, 0, run))
    assert [check for check in made if not check.ok] == []
    assert len({check.name for check in made}) == len(made) >= 6


def failures(cases, case, run) -> list[str]:
    return [check.name for check in cases.checks(case, 0, run) if not check.ok]


def gate(fault: Callable) -> Callable:
    """The reference with fault(x, ids, weights) behind it."""
    return lambda x, weight, bias, **options: fault(x, *moe_gate(x, weight, bias, **options))


def swapped(x, ids, weights):
    return tuple(a.at[3].set(a[3, ::-1]) for a in (ids, weights))


def off(x, ids, weights):
    return ids, weights.at[5, 0].multiply(1.001)


def twice(x, ids, weights):
    return ids.at[3, 1].set(ids[3, 0]), weights


def leaking(x, ids, weights):
    return ids, weights + 0 * jnp.sum(x.astype(jnp.float32))


def moody(x, ids, weights):
    calls = iter(range(1, 100))
    noise = jax.pure_callback(
        lambda: np.float32(next(calls) * 1e-6), jax.ShapeDtypeStruct((), jnp.float32)
    )
    return ids, weights * (1 + noise)


def by_row(x, ids, weights):
    return ids, weights * (1 + 2e-7 * jnp.arange(len(x))[:, None])


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (swapped, "ids against ref's"),
        (off, "weights against ref's"),
        (twice, "ids twice or out of range"),
        (leaking, "2 of 24 rows"),
        (moody, "another run"),
        (by_row, "rows in another order"),
    ],
)
def test_faults_of_a_gate_are_found(fault, name):
    found = failures(gate_cases, GATE, gate(fault))
    assert any(name in one for one in found), found
    if fault in (moody, by_row):
        assert not any("ref" in one for one in found), found


def test_ties_to_the_highest_id_are_found():
    def backwards(x, weight, bias, **options):
        ids, weights = moe_gate(x, weight[::-1], bias[..., ::-1], **options)
        return len(weight) - 1 - ids, weights

    found = failures(gate_cases, GATE, backwards)
    assert found == ["ids of exact sums with ties", "ids where all scores are equal"]


def test_reading_behind_the_visible_entries_is_found():
    assert "distinct scores" in failures(topk_cases, PICKS, topk_ref.index_topk)


def test_weights_of_unused_experts_are_found():
    def run(x, ids, weights, experts, shared, **options):
        y = moe_experts(x, ids, weights, experts, shared, **options)
        return y.at[0].multiply(1.02) + (experts.w1.scales[1, 0, 0] == 255)

    found = failures(expert_cases, EXPERTS, run)
    every = ("drawn rows", "experts that none reaches poisoned")
    assert {f"{n}: {name}" for n in ("serving", "reference") for name in every} <= {*found}


def test_rows_that_nobody_sees_are_found():
    def run(q, cos, sin, window, *rest, **options):
        out = sparse_attention(q, cos, sin, window, *rest, **options)
        return (out + 0 * jnp.sum(window.decode(jnp.float32))).at[0, 0, 0].multiply(0.98)

    found = failures(attention_cases, ATTENTION, run)
    assert {"drawn rows, relative error", "what is not seen is NaN"} <= {*found}


def test_scores_two_steps_off_are_found():
    def run(*arguments, **options):
        scores = index_scores(*arguments, **options)
        return scores.at[0, 2, 5].multiply(1 + 2.0**-6)

    assert "drawn requests, bf16 steps" in failures(score_cases, SCORES, run)


def test_a_stored_row_that_must_stay_is_found():
    def run(cache, made):
        (ring, tags, pool, keys), *rest = store_cases.stored(cache, made, kernel=False)
        pool = replace(pool, words=pool.words.at[pool.words.shape[0] - 1, 0, 71].add(1))
        return (ring, tags, pool, keys), *rest

    found = failures(store_cases, STORE, run)
    assert found == [
        f"{k}: latents 2, words of rows not stored" for k in ("whole numbers", "any values")
    ]


def test_measures():
    a = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    assert same("", (a, a), (a, a)) == Check("", 0, 0)
    assert same("", a, a.at[0, 0].set(2)).error == 1 and same("", a, -a).error == 4
    assert not same("", a, a[:1]).ok and not same("", a, a.astype(jnp.bfloat16)).ok
    assert same("", a * jnp.nan, a * jnp.nan).ok
    assert near("", a, a, 0).ok and near_overall("", a, a, 0).ok and aligned("", a, a, 0).ok
    assert near("", a.at[0, 0].set(3.5), a, 0).error == pytest.approx(0.1)
    assert near_overall("", a.at[1, 1].set(1), a, 0).error == pytest.approx(0.2)
    assert aligned("", a.at[0].set(jnp.asarray([4.0, 3.0])), a, 0).error == pytest.approx(0.04)
    for measure in (near, near_overall, aligned):
        assert not measure("", a.at[0, 0].set(jnp.nan), a, 9).ok
    assert not near("", a.at[1, 0].set(1e-9), a, 9).ok


def test_memory_is_filled_before_every_run(monkeypatch):
    fills = []
    monkeypatch.setattr(jnp, "full", lambda shape, value, dtype: fills.append((shape, value)))
    program = Program(lambda x: (x, x.astype(jnp.int8)), np.zeros(100, np.float32))
    for _ in range(2):
        program(np.zeros(100, np.float32))
    assert {100, 25} <= {shape for shape, _ in fills}
    assert np.isnan(fills[0][1]) and fills[-1][1] == 1e30


CHILD = """
import json, os, sys, time
first, mode = int(sys.argv[1]), sys.argv[2]
def send(message):
    os.write(1, (json.dumps(message) + "\\n").encode())
if mode == "no start":
    sys.exit(3)
send({"device": "toy", "fits": mode != "no device"})
for case in range(first, 5):
    send({"case": case})
    send({"check": {"name": "good", "error": 0.0, "bound": 0}})
    if case == 1:
        time.sleep(60)
    if case == 2:
        os.abort()
    if case == 3:
        send({"check": {"name": "bad", "error": float("nan"), "bound": 9}})
        sys.exit(0 if mode == "early" else 7)
send({"end": True})
"""


@pytest.fixture
def run_child(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def run(mode: str) -> list[Outcome]:
        def start(first: int) -> list[str]:
            return [sys.executable, "-S", str(script), str(first), mode]

        return list(outcomes("toy", ["a", "b", "c", "d", "e"], start, timeout=10))

    return run


@pytest.mark.parametrize(("mode", "status"), [("", 7), ("early", 0)])
def test_a_case_that_hangs_or_dies_is_one_failure(run_child, mode, status):
    got = [(one.case, one.check, one.ok) for one in run_child(mode)]
    assert got == [
        ("a", "good", True),
        ("b", "good", True),
        ("b", "no end within 10 s", False),
        ("c", "good", True),
        ("c", "died with exit status -6", False),
        ("d", "good", True),
        ("d", "bad", False),
        ("d", f"died with exit status {status}", False),
        ("e", "good", True),
    ]


def test_a_child_that_does_not_start(run_child):
    (one,) = run_child("no start")
    assert (one.case, one.check, one.ok) == ("start", "died with exit status 3", False)
    with pytest.raises(NoDevice, match="toy"):
        run_child("no device")


def test_a_child_serves_from_a_case_on():
    check = Check("x", 0.5, 1)
    sent = []
    serve(["a", "b", "c"], 1, lambda case: [check] * (case == "b") + [check], sent.append)
    body = {"check": asdict(check)}
    assert sent == [{"case": 1}, body, body, {"case": 2}, body, {"end": True}]
    with pytest.raises(ValueError, match="case a must make a check"):
        serve(["a"], 0, lambda case: [], sent.append)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "op 'nothing' must be a folder of pallas_kernels"),
        (["quant"], "op 'quant' has no kernel to check"),
        (["moe_gate", "--case", "rows=7,"], "--case 'rows=7,' must be part of a case's name"),
        (["moe_gate", "--timeout", "0"], "--timeout 0 must be positive"),
        (["moe_gate", "--seed", "-1"], "--seed -1 must not be negative"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_hopper_gpu(capsys):
    assert command.main(["moe_gate", "--case", "rows=1,"]) == 2
    assert "error: the kernels need an sm_90 GPU, this is cpu" in capsys.readouterr().err


@pytest.mark.parametrize("errors", [(0.0, 0.5), (0.0, float("nan"))])
def test_the_command_reports_every_check(errors, tmp_path, monkeypatch, capsys):
    asked = []

    def fake(op, names, start, timeout):
        asked.append((op, names, start(1)[2:], timeout))
        for error in errors:
            yield Outcome(op, names[0], "what", error, 1, error <= 1)

    monkeypatch.setattr(command, "outcomes", fake)
    out = tmp_path / "checks.json"
    argv = ["moe_gate", "--case", "rows=8,", "--seed", "3", "--timeout", "5", "--json", str(out)]
    status = command.main(argv)
    names = [str(case) for case in selected("moe_gate", "rows=8,")]
    child = ["pallas_kernels.check.child", "moe_gate", "1", "3", "rows=8,"]
    assert asked == [("moe_gate", names, child, 5)]
    bad = errors[1] != errors[1]
    rows = json.loads(out.read_text())["checks"]
    assert [row["error"] for row in rows] == [0.0, None if bad else 0.5]
    assert [row["ok"] for row in rows] == [True, not bad] and rows[0]["seed"] == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("FAILED") == bad == status and "2 checks" in lines[2]


def test_names_of_cases_differ():
    for op in (
        "compress",
        "moe_gate",
        "moe_experts",
        "sparse_attention",
        "index_topk",
        "index_scores",
    ):
        cases = importlib.import_module(f"pallas_kernels.{op}.cases")
        names = [str(case) for case in cases.CHECKED]
        assert len({*names}) == len(names) and {*cases.CASES} <= {*cases.CHECKED}
