"""The command: a table, JSON, a picture, traces, and one clear error for what is wrong."""

import json
from dataclasses import asdict

import pytest

from serving.simulate.command import main
from tests.serving.simulate.support import small


@pytest.fixture
def scenario(tmp_path) -> str:
    document = asdict(small()) | {"parameters": {"slow": {"clock.efficiency": 0.5}}}
    file = tmp_path / "small.json"
    file.write_text(json.dumps(document))
    return str(file)


def test_rows_for_every_policy_and_set_of_parameters(scenario, tmp_path, capsys):
    out = tmp_path / "rows.json"
    status = main([
        "--scenario", scenario, "--parameters", "all", "--seed", "3", "--json", str(out),
        "--value", "fleet.cache_gb=2", "--value", "workload.sessions=10",
        "--value", "window.measure_s=4",
    ])  # fmt: skip
    assert status == 0
    document = json.loads(out.read_text())
    rows = document["rows"]
    assert [(row["parameters"], row["policy"]) for row in rows] == [
        (parameters, policy)
        for parameters in ("base", "slow")
        for policy in ("affinity", "pool_workload_aware")
    ]
    promised = {"hit_rate", "ttft_p50_s", "ttft_p90_s", "idle_while_queued", "requests_per_s"}
    promised |= {"tokens_per_s_gpu", "tokens_per_s_user", "itl_p50_ms"}
    assert all(promised <= set(row) and row["projection"] and row["seed"] == 3 for row in rows)
    assert rows[2]["ttft_p50_s"] > 1.5 * rows[0]["ttft_p50_s"]
    assert document["scenarios"]["slow"]["workload"]["sessions"] == 10
    printed = capsys.readouterr()
    assert "projection, not measured" in printed.out
    assert "slow: pool_workload_aware against affinity: idle while queued /" in printed.out
    assert "requests simulated in" in printed.err


def test_traces_run_to_their_end(scenario, tmp_path, capsys):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    lines = [
        {"timestamp": 400 * i, "input_length": 1500, "output_length": 40, "hash_ids": [1, 2, i]}
        for i in range(3, 23)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--scenario", scenario, "--policies", "workload_aware", "--json", str(out)]
    given += ["--value", "fleet.cache_gb=2"]
    assert main([*given, "--mooncake", str(trace), "--requests", "10", "--time-scale", "0.5"]) == 0
    row = json.loads(out.read_text())["rows"][0]
    assert row["requests"] == 10
    # 1,024 of 1,500 tokens are shared, and the first request finds nothing.
    assert row["hit_rate"] == pytest.approx(0.9 * 1024 / 1504, abs=0.01)
    agents = tmp_path / "agents.json"
    request = {"t": 0, "type": "n", "in": 600, "out": 32, "hash_ids": [1, 2], "think_time": 0.5}
    sub = {"t": 1, "type": "subagent", "requests": [request]}
    record = {"id": "x", "block_size": 512, "hash_id_scope": "local", "requests": [request, sub]}
    agents.write_text(json.dumps(record))
    assert main([*given, "--agents", str(agents)]) == 0
    assert json.loads(out.read_text())["rows"][0]["requests"] == 2


def test_a_picture(scenario, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rows.png"
    given = ["--scenario", scenario, "--value", "fleet.cache_gb=2", "--plot", str(picture)]
    assert main(given) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "none"], "scenario 'none': must be"),
        (["--parameters", "none"], "parameters 'none': must be one of base, lighter"),
        (["--policies", "none"], "--policies 'none': must be of affinity"),
        (["--value", "fleet.none=1"], "no value 'fleet.none'"),
        (["--value", "fleet.instances=many"], "fleet.instances: 'many' must be a int"),
        (["--set", "launch_us=1"], "--set: needs --hardware"),
        (["--hardware", "gb300"], "give --set NAME=VALUE for"),
        (["--hardware", "h200"], "needs 2"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--mooncake", "none.jsonl"], "none.jsonl: cannot be read"),
        (["--mooncake", "none.jsonl", "--requests", "0"], "--requests 0: must be at least 1"),
        (["--agents", "none.json", "--time-scale", "0"], "--time-scale 0.0: must be above 0"),
        (["--plot", "picture.jpg"], "must end in .png"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
