"""The commands: exit statuses, error lines, JSON, progress."""

import json
import subprocess
import sys

import pytest

from dsv41_jax.checkpoint.__main__ import main


def test_inspect_preset_flash(capsys):
    assert main(["inspect", "--preset", "flash"]) == 0
    out = capsys.readouterr().out
    for text in ("96,085 tensors", "763,205,315,794 parameters", "510,286,023,000 bytes"):
        assert text in out
    assert "8 x 141 GB, Engram in HBM: " in out and "tokens of KV per GPU at 890 B" in out


def test_inspect_directory_as_json(capsys, tiny_dir):
    assert main(["inspect", str(tiny_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tensors"], report["nbytes"]) == (826, 8_374_072)
    assert report["missing"] == report["unknown"] == report["problems"] == []
    assert report["kv_bytes_per_token"] == 105 and len(report["fits"]) == 8


def test_inspect_damaged_directory_reports_and_fails(capsys, tmp_path, tiny_dir):
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "model-00002-of-00003.safetensors: shard is missing" in captured.err
    assert "488 tensors" in captured.out and "unreadable: 338: " in captured.out


def test_random_convert_and_back(capsys, tmp_path, tiny_dir):
    random, orbax, back = (str(tmp_path / name) for name in ("r", "o", "b"))
    assert main(["random", random, "--preset", "tiny", "--seed", "5"]) == 0
    assert "100 %" in capsys.readouterr().err
    assert main(["convert", random, orbax]) == 0
    assert main(["convert", orbax, back]) == 0
    for path in (tmp_path / "r").iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()
    assert main(["inspect", random]) == main(["inspect", orbax]) == 0
    out = capsys.readouterr().out
    assert out.count("826 tensors") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "{tmp}/absent"], "absent: is not a directory"),
        (["inspect", "{tmp}"], "config.json: cannot be read"),
        (["convert", "{tmp}/absent", "{tmp}/out"], "absent: is not a directory"),
        (["convert", "{tiny}", "{tmp}/absent/out"], "out: cannot be written"),
        (["convert", "{tiny}", "{tiny}"], "tiny_ckpt: is not empty"),
        (["random", "{tmp}/absent/out", "--preset", "tiny"], "out: cannot be written"),
        (["random", "{tmp}/out", "--preset", "tiny", "--seed", "-1"], "--seed -1: must be 0"),
        (
            ["random", "{tmp}/out", "--preset", "tiny", "--tokenizer", "{tmp}/absent"],
            "absent: tokenizer file is missing",
        ),
    ],
)
def test_bad_input_is_one_error_and_status_2(capsys, tmp_path, tiny_dir, arguments, words):
    filled = [a.format(tmp=tmp_path, tiny=tiny_dir) for a in arguments]
    assert main(filled) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == 1 and words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["inspect"], ["inspect", "--preset", "pro"], ["random", "x"], ["inspect", "a", "b"]],
)
def test_bad_usage_is_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "dsv41_jax.checkpoint", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and not done.stdout
    assert "Traceback" not in done.stderr
