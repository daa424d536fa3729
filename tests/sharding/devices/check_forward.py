"""``serving.bench forward`` on layouts: peer-to-peer sums, collectives by themselves, memory."""

import json

import pytest

from serving.bench.__main__ import main

pytestmark = pytest.mark.slow
COMMON = ["forward", "--preset", "tiny", "--kernels", "reference", "--no-layer-times"]
DECODE = ["--batch", "2", "--context", "64", "--jobs", "1", "--weight-sets", "2"]


@pytest.mark.parametrize(("name", "all_reduce"), [("tp2", "peer"), ("dep2", "auto")])
def test_whole_steps_of_layouts(name, all_reduce, tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = [*COMMON, *DECODE, "--layout", name, "--all-reduce", all_reduce, "--json", str(path)]
    assert main(command) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["layout"] == name and row["us"] > 0 and row["finite"]
    assert row["all_reduce"] == ("peer" if all_reduce == "peer" else "psum")
    kinds = {"tp2": {"all_reduce"}, "dep2": {"gather", "all_to_all"}}[name]
    assert set(row["collective_us"]) == kinds and min(row["collective_us"].values()) > 0
    assert row["load_s"] >= 0 and row["compile_s"] > 0
    assert {"experts", "dense", "engram tables", "cache"} <= set(row["bytes_per_device"])
    assert f"{name}: GB a device: " in capsys.readouterr().out
    assert main(command) == 0  # nothing is measured again
    assert json.loads(path.read_text())["rows"] == [row]


def test_a_layout_without_tensor_ranks_cannot_sum(capsys):
    command = [*COMMON, *DECODE, "--layout", "dep2", "--all-reduce", "peer"]
    assert main(command) == 2
    assert "all-reduce 'peer': layout dep2 has no tensor ranks" in capsys.readouterr().err
