"""Traces for aiperf's AgentX scenario, and what is made of its export."""

import io
import itertools
import json
import stat
import sys
import urllib.request

import pytest

from dsv41_jax.errors import UserError
from serving.bench.__main__ import main
from serving.bench.agent_traces import write_traces
from serving.bench.agentx import result
from serving.bench.workloads import Scale, agents

EXPORT = {
    "request_count": {"avg": 12.0},
    "time_to_first_token": {"p50": 20.0, "p90": 31.5},
    "error_summary": [],
    "was_cancelled": False,
}
# Stands in for aiperf: notes its arguments and writes an export.
PROGRAM = """#!{python}
import json, os, pathlib, sys
given = sys.argv[1:]
out = pathlib.Path(given[given.index("--artifact-dir") + 1])
seen = dict(given=given, home=os.environ["HF_HOME"], offline=os.environ["HF_HUB_OFFLINE"])
(out / "seen.json").write_text(json.dumps(seen))
(out / "profile_export_aiperf.json").write_text({export!r})
sys.exit({status})
"""


def test_traces_grow_and_wait_for_a_subagent(tmp_path):
    paths = write_traces(tmp_path, model="mini", sessions=3, turns=4, seed=1)
    assert len(paths) == 3
    for path in paths:
        record = json.loads(path.read_text())
        kinds = [request["type"] for request in record["requests"]]
        assert kinds == ["s", "s", "subagent", "s", "s"]
        own = [request for request in record["requests"] if request["type"] == "s"]
        for before, after in itertools.pairwise(own):
            assert after["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
            assert after["t"] > before["t"]
        inner = record["requests"][2]["requests"]
        assert all(request["hash_ids"][:3] == own[0]["hash_ids"][:3] for request in inner)
        for request in own + inner:
            assert 0 < request["in"] <= 64 * len(request["hash_ids"]) < request["in"] + 64 + 1
        [conversation] = agents(str(path), vocabulary=512, scale=Scale())
        assert [len(turn.prompt) for turn in conversation.turns][:2] == [r["in"] for r in own[:2]]
    same = write_traces(tmp_path / "again", model="mini", sessions=3, turns=4, seed=1)
    assert [path.read_text() for path in same] == [path.read_text() for path in paths]


@pytest.fixture
def run(tmp_path, tiny_dir):
    def run(export: dict, status: int = 0, *options: str) -> int:
        program = tmp_path / "aiperf"
        text = PROGRAM.format(python=sys.executable, export=json.dumps(export), status=status)
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        given = ["agentx", "--aiperf", str(program), "--checkpoint", str(tiny_dir)]
        return main([*given, "--model", "tiny", "--out", str(tmp_path / "out"), *options])

    return run


def test_the_scenario_is_run_and_reported(run, tmp_path, capsys):
    assert run(EXPORT, 0, "--json", str(tmp_path / "rows.json"), "--seconds", "30") == 0
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row == {"requests": 12.0, "ttft_ms_p50": 20.0, "ttft_ms_p90": 31.5}
    seen = json.loads((tmp_path / "out" / "seen.json").read_text())
    given = seen["given"]
    for name, value in (
        ("--scenario", "inferencex-agentx-mvp"),
        ("--benchmark-duration", "30"),
        ("--input-file", str(tmp_path / "out" / "traces")),
        ("--tokenizer", "local/checkpoint"),
    ):
        assert given[given.index(name) + 1] == value
    assert seen["offline"] == "1" and seen["home"] == str(tmp_path / "out" / "hf")
    home = tmp_path / "out" / "hf" / "hub" / "models--local--checkpoint"
    revision = (home / "refs" / "main").read_text()
    assert (home / "snapshots" / revision / "tokenizer.json").is_file()
    assert len(list((tmp_path / "out" / "traces").iterdir())) == 8


@pytest.mark.parametrize(
    "export",
    [
        EXPORT | {"error_summary": [{"error_details": {"code": 503}, "count": 1}]},
        EXPORT | {"was_cancelled": True},
        EXPORT | {"request_count": {"avg": 0}},
        {"error_summary": [], "was_cancelled": False},
    ],
)
def test_an_export_with_errors_is_refused(export):
    with pytest.raises(UserError, match=r"aiperf: .* requests, errors"):
        result(export)


def test_bad_input(run, tmp_path, capsys, tiny_dir, monkeypatch):
    assert run(EXPORT, 3) == 2
    assert "aiperf: ended with status 3" in capsys.readouterr().err
    assert run(EXPORT, 0, "--sessions", "0") == 2
    assert "--sessions 0" in capsys.readouterr().err
    assert run(EXPORT, 0, "--checkpoint", str(tmp_path)) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    assert run(EXPORT, 0, "--aiperf", str(tmp_path / "none")) == 2
    assert "pip install -e '.[bench]'" in capsys.readouterr().err
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b'{"data": []}'))
    given = ["agentx", "--aiperf", str(tmp_path / "aiperf"), "--checkpoint", str(tiny_dir)]
    assert main([*given, "--out", str(tmp_path)]) == 2
    assert "lists no model" in capsys.readouterr().err
