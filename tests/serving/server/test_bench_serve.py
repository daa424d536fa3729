"""The load test against the project's own server."""

import json

from serving.bench.__main__ import main


def test_multi_turn_load_reports_hits_and_latencies(tiny, tmp_path, capsys):
    out = tmp_path / "rows.json"
    arguments = ["serve", "--url", tiny.url, "--vocab-size", "500", "--concurrency", "1,4"]
    arguments += ["--conversations", "6", "--turns", "2", "--prompt-tokens", "24"]
    arguments += ["--output-tokens", "6", "--shared-tokens", "32", "--json", str(out)]
    assert main(arguments) == 0
    one, four = json.loads(out.read_text())["rows"]
    assert (one["concurrency"], four["concurrency"]) == (1, 4)
    for row in (one, four):
        assert row["errors"] == {} and row["requests"] == 12
        assert row["ttft_p50_ms"] > 0 and row["itl_p99_ms"] > 0
        assert row["output_tokens_per_s"] > 0
    assert four["hit_rate"] > 0.3
    assert "hit_rate" in capsys.readouterr().out


def test_refused_requests_are_counted_not_raised(tiny, capsys):
    arguments = ["serve", "--url", tiny.url, "--vocab-size", "500", "--conversations", "3"]
    assert main([*arguments, "--prompt-tokens", "400"]) == 0
    assert "{'HTTP 400': 3}" in capsys.readouterr().out


def test_no_server_is_one_error(capsys):
    assert main(["serve", "--url", "http://127.0.0.1:9", "--vocab-size", "500"]) == 2
    assert "error: --url http://127.0.0.1:9" in capsys.readouterr().err
