"""Speculation from the command line: options, reports, and checkpoints that cannot do it."""

import argparse
import json
import logging
from types import SimpleNamespace

import pytest

from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.errors import UserError
from pallas_kernels.numerics import FLOAT32
from serving.bench.generate import _drafts
from serving.generate import main, stats
from serving.request import Result
from serving.server.__main__ import _parser as server_parser
from serving.server.__main__ import engine_options
from serving.speculative import Acceptance, Speculation, add_options, speculation_of
from tests.dsv41_jax.test_checkpoint_read import drop, edit

ASK = ["--token-ids", "1,2,3", "--numerics", "float32"]


def parsed(*arguments: str) -> Speculation | None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return speculation_of(parser.parse_args(arguments))


def test_options():
    assert parsed() is None
    assert parsed("--speculative", "dspark") == Speculation(5, 32, None)
    values = ["--draft-length", "3", "--speculative-max-batch", "4"]
    simulated = ["--simulated-acceptance", "2.5"]
    assert parsed("--speculative", "dspark", *values, *simulated) == Speculation(3, 4, 2.5)
    assert parsed("--speculative", "dspark", "--draft-budget", "9") == Speculation(budget=9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speculative", "dspark", "--draft-length", "6"], ["draft length 6", "between 1 and 5"]),
        (["--speculative", "dspark", "--draft-length", "0"], ["draft length 0"]),
        (["--speculative", "dspark", "--speculative-max-batch", "0"], ["at least 1"]),
        (["--speculative", "dspark", "--simulated-acceptance", "7"], ["7.0", "between 1 and 6"]),
        (["--simulated-acceptance", "3.51"], ["need --speculative dspark"]),
        (["--draft-length", "4"], ["need --speculative dspark"]),
        (["--draft-budget", "4"], ["need --speculative dspark"]),
        (["--speculative", "dspark", "--draft-budget", "0"], ["draft budget 0", "at least 1"]),
        (["--speculative", "eagle"], ["'eagle'", "dspark"]),
    ],
)
def test_bad_options(capsys, tiny_dir, arguments, words):
    try:
        status = main(["--checkpoint", str(tiny_dir), *ASK, *arguments])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2 and all(word in error for word in words)


@pytest.fixture
def copy(tiny_dir, tmp_path):
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def with_block(folder, size: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["dspark_block_size"] = size
    (folder / "config.json").write_text(json.dumps(config))


def refused(capsys, folder) -> str:
    assert main(["--checkpoint", str(folder), *ASK, "--speculative", "dspark"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    return captured.err


def test_absent_stages_are_named(capsys, copy):
    """What is said of them without speculation: test_checkpoint_read.py."""

    def cut(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    for shard in (1, 2, 3):
        edit(copy, shard, cut)
    error = refused(capsys, copy)
    assert ": 169 problems" in error and "mtp.0.attn.wq_a.weight: is missing" in error


def test_a_missing_stage_tensor_is_named(capsys, copy, caplog):
    drop(copy, "mtp.1.attn_norm.weight")
    assert "mtp.1.attn_norm.weight: is missing" in refused(capsys, copy)
    with caplog.at_level(logging.INFO, "dsv41_jax.checkpoint"):
        assert not load_model(copy, numerics=FLOAT32).mtp
    assert [line for line in caplog.messages if "draft" in line] == [
        "no draft model: 1 mtp tensors absent, first mtp.1.attn_norm.weight"
    ]


def test_another_block_size_is_named(capsys, copy, caplog):
    with_block(copy, 4)
    assert "dspark_block_size=4 must be 5" in refused(capsys, copy)
    with caplog.at_level(logging.INFO, "dsv41_jax.checkpoint"):
        load_model(copy, numerics=FLOAT32)
    lines = [line for line in caplog.messages if "draft" in line]
    assert lines == ["no draft model: dspark_block_size=4, not 5"]


def test_both_at_once(copy):
    drop(copy, "mtp.0.main_norm.weight")
    with_block(copy, 6)
    with pytest.raises(UserError) as caught:
        load_model(copy, numerics=FLOAT32, speculation=True)
    assert "mtp.0.main_norm.weight: is missing" in caught.value.problems
    assert any("dspark_block_size=6" in problem for problem in caught.value.problems)


def engine_with(speculation: Speculation | None) -> SimpleNamespace:
    seen = Acceptance()
    for accepted in (5, 2, 0):
        seen.add(5, accepted)
    return SimpleNamespace(
        options=SimpleNamespace(speculation=speculation),
        compiles=SimpleNamespace(count=0),
        executor=SimpleNamespace(kv_bytes_per_token=890),
        acceptance=seen,
    )


def test_reports():
    result = Result(drafted=15, accepted=7)
    shown = stats(result, engine_with(Speculation()))
    assert (shown["draft_tokens"], shown["accepted_tokens"]) == (15, 7)
    assert shown["tokens_per_step"] == 3.333 and "simulated_acceptance" not in shown
    assert "draft_tokens" not in stats(result, engine_with(None))
    row = _drafts(engine_with(Speculation(length=3)))
    assert row == {"tokens_per_step": 3.333, "accepted": "0.667/0.667/0.333"}
    assert _drafts(engine_with(None)) == {}


def test_a_simulation_is_marked_in_every_report():
    simulated = engine_with(Speculation(simulated=3.51))
    assert stats(Result(), simulated)["simulated_acceptance"] == 3.51
    assert _drafts(simulated)["simulated_acceptance"] == 3.51


def test_the_server_takes_the_same_options(loaded, tiny_dir):
    cfg = loaded("float32")[0].cfg
    options = ["--checkpoint", str(tiny_dir), "--speculative", "dspark", "--draft-length", "2"]
    made = engine_options(server_parser().parse_args(options), cfg)
    assert made.speculation == Speculation(length=2)
    with pytest.raises(UserError, match="draft length 9"):
        engine_options(server_parser().parse_args([*options[:-1], "9"]), cfg)
