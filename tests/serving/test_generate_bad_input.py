"""``python -m serving.generate`` on bad input: one error line that names the thing, status 2."""

import subprocess
import sys

import pytest

from serving.generate import main

TOKENS = ["--token-ids", "1,2,3"]


def status_and_error(capsys, *arguments) -> tuple[int, str]:
    """Also argparse's own errors, which exit."""
    try:
        status = main(list(map(str, arguments)))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if "error: " in line]
    assert len(errors) == 1 and "Traceback" not in captured.err
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--token-ids", "4,-1"], ["token id -1 at index 1", "[0, 512)"]),
        (["--token-ids", "512"], ["token id 512 at index 0", "[0, 512)"]),
        (["--token-ids", "99999999999999999999"], ["token id 99999999999999999999"]),
        (["--token-ids", ""], ["token ids: '' must be an integer"]),
        (["--token-ids", "1,x"], ["token ids: 'x' must be an integer"]),
        (["--token-ids", "1,2,"], ["token ids: '' must be an integer"]),
        (["--token-ids", ",".join("3" * 129)], ["129 tokens", "max_position_embeddings=128"]),
        (["--token-ids", ",".join("3" * 128)], ["128 tokens", "max_position_embeddings=128"]),
        (["--prompt", "\ud800"], ["not valid Unicode"]),
        ([*TOKENS, "--max-new-tokens", "0"], ["max_new_tokens=0", "at least 1"]),
        ([*TOKENS, "--max-new-tokens", "126"], ["max_position_embeddings=128"]),
        ([*TOKENS, "--temperature", "-1"], ["temperature=-1.0", "finite and at least 0"]),
        ([*TOKENS, "--temperature", "nan"], ["temperature=nan"]),
        ([*TOKENS, "--top-p", "0"], ["top_p=0.0", "above 0 and at most 1"]),
        ([*TOKENS, "--top-k", "-1"], ["top_k=-1", "at least 0"]),
        ([*TOKENS, "--seed", "-1"], ["seed=-1", "unsigned 32-bit"]),
        ([*TOKENS, "--logprobs", "21"], ["--logprobs 21", "between 0 and 20"]),
        ([*TOKENS, "--page-size", "63"], ["--page-size 63", "even and at least 2"]),
        ([*TOKENS, "--page-size", "0"], ["--page-size 0", "even and at least 2"]),
        ([*TOKENS, "--chunk-size", "0"], ["--chunk-size 0", "at least 1"]),
        ([*TOKENS, "--layout", "tp3"], ["layout 'tp3'", "tp1"]),
        ([*TOKENS, "--layout", "dep8"], ["layout dep8: needs 8 devices, 1 cpu is here"]),
        ([*TOKENS, "--engram", "disk"], ["engram 'disk': must be one of hbm, host, shared"]),
        ([*TOKENS, "--engram", "host:/x"], ["engram 'host:/x': must be one of"]),
        ([*TOKENS, "--engram", "shared:"], ["engram 'shared:': must be one of"]),
        ([*TOKENS, "--process-id", "1"], ["--process-id 1 must be from 0 to 0"]),
        ([*TOKENS, "--processes", "2"], ["--coordinator and --processes above 1 go together"]),
        ([*TOKENS, "--coordinator", "x:1"], ["--coordinator and --processes above 1 go"]),
        ([*TOKENS, "--kernels", "mosaic"], ["kernels 'mosaic'"]),
        ([*TOKENS, "--kernels", "cuda"], ["--kernels", "'cuda'", "mosaic"]),
        ([*TOKENS, "--numerics", "int8"], ["--numerics", "'int8'", "reference"]),
        ([*TOKENS, "--prompt", "x"], ["--prompt", "not allowed with"]),
        ([], ["--prompt", "required"]),
        ([*TOKENS, "--max-new-tokens", "x"], ["--max-new-tokens", "'x'"]),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() or "none",
)
def test_bad_arguments(capsys, tiny_dir, arguments, words):
    status, error = status_and_error(capsys, "--checkpoint", tiny_dir, *arguments)
    assert status == 2 and all(word in error for word in words)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.txt", None, "No such file"),
        ("latin1.txt", "Größe".encode("latin-1"), "must be UTF-8 text, byte 2 is not"),
        ("", None, "directory"),
    ],
)
def test_bad_prompt_files(capsys, tiny_dir, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    path = tmp_path / name
    status, error = status_and_error(capsys, "--checkpoint", tiny_dir, "--prompt-file", path)
    assert status == 2 and f"error: {path}: " in error and words in error


def test_an_empty_file_name(capsys, tiny_dir):
    """A path like any other, not a missing prompt."""
    status, _ = status_and_error(capsys, "--checkpoint", tiny_dir, "--prompt-file", "")
    assert status == 2


def linked(tiny_dir, folder):
    for path in tiny_dir.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def test_missing_checkpoint(capsys, tmp_path):
    absent = tmp_path / "absent"
    status, error = status_and_error(capsys, "--checkpoint", absent, *TOKENS)
    assert status == 2 and str(absent) in error


@pytest.mark.parametrize("left", [0, 7, 5000, -1])
def test_truncated_shard(capsys, tiny_dir, tmp_path, left):
    folder = linked(tiny_dir, tmp_path)
    shard = folder / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:left])
    status, error = status_and_error(capsys, "--checkpoint", folder, *TOKENS)
    assert status == 2 and error.startswith("error: ") and shard.name in error


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00001-of-00003.safetensors"]
)
def test_missing_files(capsys, tiny_dir, tmp_path, name):
    folder = linked(tiny_dir, tmp_path)
    (folder / name).unlink()
    status, error = status_and_error(capsys, "--checkpoint", folder, *TOKENS)
    assert status == 2 and error.startswith("error: ") and name in error


def test_the_module_is_a_command(tmp_path):
    command = [sys.executable, "-m", "serving.generate", "--checkpoint", str(tmp_path), *TOKENS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
