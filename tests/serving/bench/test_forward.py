"""``serving.bench forward`` as a command, on the small preset."""

import json

import pytest

from serving.bench.__main__ import main

SMALL = ["forward", "--preset", "tiny", "--layers", "4,5", "--weight-sets", "1", "--jobs", "1"]
SMALL += ["--context", "64"]


def measured(path, *arguments) -> dict:
    assert main([*SMALL, *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_decode(tmp_path, capsys):
    path, kernels = tmp_path / "forward.json", tmp_path / "kernels.json"
    ours = ["--batch", "2", "--no-layer-times", "--routing", "balanced"]
    ours += ["--profile", str(kernels)]
    (row,) = (document := measured(path, *ours))["rows"]
    assert (row["phase"], row["batch"], row["rows"], row["context"]) == ("decode", 2, 1, 64)
    assert row["measured"] and row["us"] > 0 and row["samples"] >= 3
    assert row["finite"] and row["caches_moved"] == 0
    assert 0 < row["floor_us"] < row["us"]
    assert row["launches"] > 20 and row["kernels"] == {} and row["parts"] == {}
    (about, _, weights) = document["notes"]
    assert "balanced routing" in about
    assert "2 layers, 1 weight sets resident (layer i uses set i mod 1)" in weights
    assert "experts in the released order" in weights and "Engram tables of no rows" in weights
    shown = capsys.readouterr().out
    assert "decode 2*1@64" in shown and "H200 SXM" in shown
    (profile,) = json.loads(kernels.read_text())["rows"]
    assert (profile["case"], profile["mode"]) == ("decode 2*1@64", "launches")
    assert profile["wall_us"] == row["us"] and profile["busy_us"] <= profile["span_us"]
    names = [one["name"] for one in profile["kernels"]]
    assert len(set(names)) == len(names) > 10 and any("dot" in name for name in names)
    assert sum(one["share_pct"] for one in profile["kernels"]) == pytest.approx(100, abs=1)
    assert sum(one["launches"] for one in profile["kernels"]) == pytest.approx(profile["launches"])
    assert "decode 2*1@64, launch by launch" in shown and names[0] in shown
    # What a file already holds is not measured again.
    assert measured(path, *ours)["rows"] == [row]
    assert "compiled" not in capsys.readouterr().err


@pytest.mark.slow
def test_every_phase_with_the_parts(tmp_path, capsys):
    """Each dispatch and its layers; prompts with and without replay and command buffers."""
    ours = ["--layers", "1,2,3,4,5,6", "--weight-sets", "2", "--batch", "2"]
    ours += ["--phase", "decode,verify,draft,prefill,replay", "--rows", "96", "--chunk", "64"]
    rows = measured(tmp_path / "forward.json", *ours)["rows"]
    assert [row["case"] for row in rows] == [
        "decode 2*1@64",
        "prefill 1*96 replay off",
        "prefill 1*96 replay on, no command buffers",
        "prefill 1*96 replay on",
        "replay 2*16@64 replay on",
        "verify 2*6@64:5",
        "draft 2*1@64",
    ]
    assert all(row["measured"] and row["finite"] and row["caches_moved"] == 0 for row in rows)
    by_case = {row["case"]: row for row in rows}
    counts = {
        name: {kind: part["count"] for kind, part in row["parts"].items()}
        for name, row in by_case.items()
    }
    every = {"window+engram": 1, "full-2+engram": 1, "reuse-2": 1, "full-1": 1, "reuse-1": 1}
    assert counts["decode 2*1@64"] == {**every, "reindex-1": 1, "ends": 1}
    # Two chunks; with replay the layers after the last KV source run once, on the window.
    twice = {kind: 2 for kind in every}
    assert counts["prefill 1*96 replay off"] == {**twice, "reindex-1": 2, "ends": 2}
    assert counts["prefill 1*96 replay on"] == {**twice, "reuse-1": 1, "reindex-1": 1, "ends": 1}
    assert counts["prefill 1*96 replay on, no command buffers"] == {}
    assert counts["draft 2*1@64"] == {}
    for row in rows:
        parts = row["parts"].values()
        assert row["extrapolated_us"] == pytest.approx(sum(p["total_us"] for p in parts) or None)
        floors = sum(part["count"] * part["floor_us"] for part in parts)
        if "verify" in row["case"]:  # which also makes the draft stages' window rows
            assert floors < row["floor_us"]
        elif "prefill" not in row["case"] and parts:
            assert floors == pytest.approx(row["floor_us"], rel=0.02)
    shown = capsys.readouterr().out
    assert "time to the first token, measured" in shown
    assert shown.count("sum, extrapolated") == 5
    assert "a draft beside the step that verifies it" in shown


@pytest.mark.slow
def test_mixed_batches_and_a_picture(tmp_path):
    picture = tmp_path / "forward.png"
    ours = ["--case", "mix=64,2*1@40", "--replay", "on", "--plot", str(picture), "--no-layer-times"]
    rows = measured(tmp_path / "forward.json", *ours, "--routing", "zipf,balanced")["rows"]
    cases = "mix 1*64,2*1@40 replay on, no command buffers", "mix 1*64,2*1@40 replay on"
    assert [(row["routing"], row["case"]) for row in rows] == [
        (routing, case) for routing in ("zipf", "balanced") for case in cases
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--phase", "decode,x"], "--phase x: must be of"),
        (["--batch", "0"], "--batch '0': must be a whole number"),
        (["--context", "1000"], "1000 tokens must be at most 128"),
        (["--weight-sets", "0"], "--weight-sets 0: must be at least 1"),
        (["--routing", "zipf,x"], "--routing x: must be of balanced, random, zipf"),
        (["--layers", "5"], "lacks 4"),
        (["--case", "x"], "--case x: must be NAME"),
        (["--layout", "tp64"], "layout 'tp64': must be one of"),
        (["--layout", "tp2"], "layout tp2: needs 2 devices"),
        (["--plot", "x.pdf"], "must end in .png"),
    ],
)
def test_bad_input(arguments, what, capsys):
    assert main([*SMALL, *arguments]) == 2
    assert what in capsys.readouterr().err


def test_a_file_of_something_else_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("[1]")
    assert main([*SMALL, "--json", str(path)]) == 2
    assert "is there, but no result" in capsys.readouterr().err
    assert path.read_text() == "[1]"
