"""`python -m sharding.sweep`: rows, front, table, and bad input."""

import json
from dataclasses import replace

import pytest

from dsv41_jax.config import Config
from sharding.hardware import MACHINES
from sharding.plot import pareto
from sharding.sweep import main

RUBIN = ("bf16_tflops=4000", "fp8_tflops=9000", "launch_us=1", "collective_us=4")
RUBIN += ("weights_factor=0.8", "cache_factor=0.6", "rows_factor=1")


def settings(values):
    return [word for value in values for word in ("--set", value)]


def swept(tmp_path, *arguments):
    path = tmp_path / "sweep.json"
    assert main([*arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_rows_for_programs(tmp_path, capsys):
    document = swept(
        tmp_path, "--layouts", "tp8,dep8", "--phase", "decode,prefill,verify", "--batch", "1,32",
        "--context", "8192",
    )  # fmt: skip
    rows = document["rows"]
    cases = {(r["layout"], r["phase"], r["batch"], r["context"]) for r in rows}
    assert len(rows) == len(cases) == 12
    first = rows[0]
    assert (first["layout"], first["phase"], first["batch"]) == ("tp8", "decode", 1)
    assert first["fits"] is True
    assert first["step_us_measured"] is None
    assert first["projection"] is False
    assert first["step_us_estimated"] == pytest.approx(1861, abs=1)
    assert first["step_us_estimated"] == pytest.approx(sum(first["parts_us"].values()))
    assert first["bytes_per_device"] == sum(first["bytes_by_kind"].values())
    assert first["tokens_per_s_user"] == pytest.approx(1e6 / first["step_us_estimated"])
    assert first["tokens_per_s_gpu"] == pytest.approx(first["tokens_per_s_user"] / 8)
    assert first["tokens_per_s_watt"] == pytest.approx(first["tokens_per_s_gpu"] / 700)
    prefill = next(r for r in rows if r["phase"] == "prefill" and r["batch"] == 32)
    assert prefill["tokens_per_s_gpu"] == pytest.approx(
        32 * 8192 / 8 / prefill["step_us_estimated"] * 1e6
    )
    assert all(r["tokens_per_s_user"] is None for r in rows if r["phase"] == "verify")
    assert document["kv_bytes_per_token"] == 890
    assert document["hardware"]["figures"]["memory_tbps"]["value"] == 4.3
    shown = capsys.readouterr().out
    assert "H200 SXM; times are estimates" in shown
    assert "prefill with bounded replay" in shown
    assert len([line for line in shown.splitlines() if line.startswith(("tp8", "dep8"))]) == 14


def test_all_layouts_that_the_devices_hold(tmp_path, capsys):
    document = swept(tmp_path, "--preset", "tiny", "--context", "64", "--batch", "2")
    assert [r["layout"] for r in document["rows"]] == [
        "tp1", "tp2", "tp4", "tp8", "dep2", "dep4", "dep8",
        "tp2xdp2", "tp2xdep2", "tp2xdp4", "tp2xdep4", "tp4xdp2", "tp4xdep2",
    ]  # fmt: skip
    assert document["left_out"] == {}
    assert "dep8: draft experts = 4: padded to 8" in capsys.readouterr().out


def test_layouts_that_do_not_divide_are_left_out_with_the_reason(tmp_path, capsys):
    cfg = replace(Config.preset("tiny"), vocab_size=516)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_json_dict()))
    document = swept(tmp_path, "--checkpoint", str(tmp_path), "--context", "64", "--batch", "2")
    assert document["left_out"] == {"tp8": "vocabulary = 516: must be divisible by 8"}
    assert "left out: tp8: vocabulary = 516" in capsys.readouterr().out
    ours = ["--checkpoint", str(tmp_path), "--context", "8", "--layouts", "tp8"]
    assert main(ours) == 2
    assert "layout tp8: vocabulary = 516" in capsys.readouterr().err


def test_a_checkpoint_gives_its_own_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Config.preset("tiny").to_json_dict()))
    ours = ["--layouts", "tp1", "--batch", "1", "--context", "64"]
    rows = swept(tmp_path, "--checkpoint", str(tmp_path), *ours)["rows"]
    assert rows == swept(tmp_path, "--preset", "tiny", *ours)["rows"]
    assert rows == swept(tmp_path, "--config", str(tmp_path / "config.json"), *ours)["rows"]


def test_replay_switch(tmp_path, capsys):
    case = ["--layouts", "tp8", "--phase", "prefill", "--batch", "1", "--context", "32768"]
    on = swept(tmp_path, *case)["rows"][0]["step_us_estimated"]
    off = swept(tmp_path, *case, "--no-swa-bounded-replay")["rows"][0]["step_us_estimated"]
    assert off > 1.7 * on
    assert "prefill without bounded replay" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("machine", "figures"), [("gb300", ("launch_us=1", "collective_us=5")), ("rubin", RUBIN)]
)
def test_projections_say_so(tmp_path, capsys, machine, figures):
    case = ["--layouts", "tp8", "--batch", "1", "--hardware", machine]
    document = swept(tmp_path, *case, *settings(figures))
    assert document["rows"][0]["projection"] is True
    assert document["rows"][0]["tokens_per_s_watt"] is None
    assert document["hardware"]["figures"]["launch_us"] == {"value": 1.0, "source": "user"}
    shown = capsys.readouterr().out
    assert "(projection, not measured) with" in shown
    assert "launch_us=1" in shown


@pytest.mark.parametrize("missing", RUBIN)
def test_unknown_figures_are_asked_for(capsys, missing):
    given = [figure for figure in RUBIN if figure != missing]
    assert main(["--layouts", "tp8", "--hardware", "rubin", *settings(given)]) == 2
    error = capsys.readouterr().err
    name = missing.partition("=")[0]
    assert error.startswith(f"error: hardware rubin: give --set NAME=VALUE for {name} (")


def test_a_figure_that_is_not_used_may_be_given(tmp_path):
    document = swept(tmp_path, "--layouts", "tp8", "--batch", "1", "--set", "sms=160")
    assert document["hardware"]["figures"]["sms"] == {"value": 160.0, "source": "user"}


def test_no_figure_is_a_guess():
    assert MACHINES["gb300"].known("sms") is None
    assert MACHINES["gb300"].known("watts") is None
    assert MACHINES["rubin"].known("bf16_tflops") is None
    for machine in MACHINES.values():
        assert all(figure.source for figure in machine.figures.values() if figure)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layouts", "tp3"], "layout 'tp3': must be one of tp1"),
        (["--layouts", "tp8,"], "--layouts 'tp8,': must be a list"),
        (["--layouts", "dep16"], "layout dep16: needs 16 devices, --devices is 8"),
        (["--devices", "32"], "network_gbps"),
        (["--devices", "0"], "--devices '0': must be a whole number"),
        (["--batch", "1,-2"], "--batch '-2': must be a whole number"),
        (["--batch", "x"], "--batch 'x'"),
        (["--context", "9999999"], "--context 9999999: must be at most 1048576"),
        (["--phase", "train"], "--phase 'train': must be of decode"),
        (["--hardware", "h100"], "hardware 'h100': must be one of h200, gb300, rubin, this"),
        (
            ["--devices", "16", "--layouts", "dep16", "--set", "network_gbps=50", "--measure"],
            "layout dep16: needs 16 devices, ",
        ),
        (["--set", "speed=1"], "--set speed=1: must be NAME=VALUE of"),
        (["--set", "sms"], "--set sms: sms must be a number above 0"),
        (["--set", "launch_us=-1"], "launch_us must be a number of at least 0"),
        (["--set", "memory_tbps=nan"], "memory_tbps must be a number above 0"),
        (["--set", "cache_factor=2"], "cache_factor must be at most 1"),
        (["--preset", "huge"], "preset 'huge'"),
        (["--checkpoint", "no/such/place"], "no/such/place"),
        (["--config", "no/such/config.json"], "no/such/config.json: cannot be read"),
        (["--json", "no/such/place.json"], "no/such/place.json: cannot be written"),
        (["--plot", "front.pdf"], "--plot front.pdf: must end in .png"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, says):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert says in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def row(user, gpu, *, fits=True, context=8):
    return {
        "phase": "decode", "context": context, "fits": fits,
        "tokens_per_s_user": user, "tokens_per_s_gpu": gpu,
    }  # fmt: skip


def test_the_front_holds_what_nothing_beats():
    fast, middle, wide = row(100, 10), row(50, 40), row(10, 90)
    beaten, equal = row(40, 30), row(50, 40)
    rows = [wide, beaten, row(200, 200, fits=False), fast, middle, equal, row(None, None)]
    assert pareto(rows) == [fast, middle, wide]
    other = row(1, 1, context=16)
    assert other in pareto([*rows, other])


def test_the_front_is_marked(tmp_path):
    rows = swept(tmp_path, "--batch", "1,8,32,128,512")["rows"]
    marked = [r for r in rows if r["pareto"]]
    assert len(marked) >= 3
    for one in marked:
        assert one["fits"]
        assert not any(
            other["fits"]
            and other["tokens_per_s_user"] > one["tokens_per_s_user"]
            and other["tokens_per_s_gpu"] > one["tokens_per_s_gpu"]
            for other in rows
        )


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sharding.plot.find_spec", lambda name: None)
    assert main(["--plot", str(tmp_path / "front.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "front.png"
    assert main(["--layouts", "tp8,dep8", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["--layouts", "tp1", "--plot", str(path)]) == 2
    assert "no decode step fits" in capsys.readouterr().err
