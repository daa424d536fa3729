"""The command ``sharding.bench``: arguments, its child processes and what it makes of them."""

import json
import subprocess
from functools import partial

import pytest

from sharding import bench
from sharding.peer_parts import PARTS

DONE = partial(subprocess.CompletedProcess, ["python"])
ROW = {
    "wrong": 0,
    "executions": 3,
    "calls": 81,
    "us": {"none": 1.0, "peer": 4.0, "psum": 20.0},
    "cost_us": 3.0,
    "goal_us": 4.0,
}


def answers(monkeypatch, *results):
    """Children that end with ``results`` in turn; returns the commands that they were started
    with.
    """
    commands, left = [], list(results)

    def run(command, *, timeout, **options):
        commands.append(command)
        one = left.pop(0)
        if one is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return one

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_every_part_runs_in_a_child(monkeypatch, capsys, tmp_path):
    commands = answers(monkeypatch, *[DONE(0, json.dumps(ROW), "")] * len(PARTS))
    out = tmp_path / "rows.json"
    assert bench.main(["all_reduce", "--json", str(out)]) == 0
    assert [c[c.index("--part") + 1] for c in commands] == list(PARTS)
    rows = json.loads(out.read_text())["rows"]
    assert [row["part"] for row in rows] == list(PARTS) and rows[0]["us"]["psum"] == 20
    line = capsys.readouterr().out.splitlines()[0]
    assert "0 wrong bits in 3 x 81 calls" in line and "costs 3.00 us a call (goal 4: met)" in line


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (None, "FAILED: no end within 5 s"),
        (DONE(-9, "", ""), "FAILED: status -9: no message"),
        (DONE(1, "", "Traceback\nValueError: x"), "FAILED: status 1: ValueError: x"),
        (DONE(0, json.dumps(ROW | {"wrong": 2, "cost_us": 5.0}), ""), "2 wrong bits"),
    ],
)
def test_what_goes_wrong_is_told(result, told, monkeypatch, capsys):
    answers(monkeypatch, result)
    assert bench.main(["all_reduce", "--part", "rows=8", "--part", PARTS[1], "--timeout", "5"]) == 1
    said = capsys.readouterr()
    assert told in said.out and ("Traceback" in said.err) == ("ValueError" in told)


def test_a_named_silence_is_no_failure(monkeypatch, capsys):
    error = {"error": "step 0: rank 0 got no answer from rank 1", "wrong": 0}
    answers(monkeypatch, DONE(0, json.dumps(error), ""))
    assert bench.main(["all_reduce", "--part", "silent"]) == 0
    assert "rank 0 got no answer from rank 1" in capsys.readouterr().out


def test_too_few_gpus_are_one_clear_error(monkeypatch, capsys):
    assert bench.main(["all_reduce", "--in-process", "--part", PARTS[0]]) == 3
    said = capsys.readouterr().err
    assert (
        said.startswith("error: --devices 2: needs 2 Hopper GPUs, 0 of ") and said.count("\n") == 1
    )
    answers(monkeypatch, DONE(3, "", f"a warning\n{said}"))
    assert bench.main(["all_reduce"]) == 2
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["all_reduce", "--devices", "1"], "--devices 1 must be at least 2"),
        (["all_reduce", "--timeout", "0"], "--timeout 0 must be positive"),
        (
            ["all_reduce", "--part", "rows=7"],
            "--part 'rows=7' must be part of one of part=sum,rows=1,",
        ),
        (
            ["all_reduce", "--in-process", "--part", "sum"],
            "--part 'sum' must be one of part=sum,rows=1,",
        ),
        (["broadcast"], "invalid choice: 'broadcast'"),
    ],
)
def test_bad_arguments(arguments, error, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(arguments)
    assert exit_.value.code == 2 and error in capsys.readouterr().err
