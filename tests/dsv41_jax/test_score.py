"""``python -m dsv41_jax.score``: every position's logits, their likelihood, and bad input."""

import re
import subprocess
import sys

import numpy as np
import pytest

from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.errors import UserError
from dsv41_jax.ops import local_ops
from dsv41_jax.score import all_logits, default_numerics, main, negative_log_likelihood
from dsv41_jax.tokenizer import Tokenizer
from pallas_kernels.numerics import FLOAT32
from tests.tolerances import ACROSS_BUCKETS_ABS, FP32_LOGITS_ABS

LINE = re.compile(r"tokens (\d+)  mean nll ([\d.]+) nats  perplexity ([\d.]+)\n")


@pytest.fixture(scope="module")
def model(tiny_dir):
    return load_model(tiny_dir, numerics=FLOAT32)


def listed(ids) -> str:
    return ",".join(map(str, np.asarray(ids).tolist()))


def nats(logits, ids) -> np.ndarray:
    """Negative log likelihood of every token after the first, in float64."""
    logits = logits[:-1].astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    return total - logits[np.arange(len(logits)), np.asarray(ids)[1:]]


def test_every_position_against_the_golden(capsys, tiny_dir, tmp_path, goldens):
    """The file's logits and the printed figures, in numerics float32."""
    arrays = goldens("e2e_fp32.npz")
    ids, want = arrays["p37.input_ids"], arrays["p37.prefill_logits"]
    out = tmp_path / "logits.npy"
    arguments = ["--checkpoint", str(tiny_dir), "--token-ids", listed(ids)]
    assert main([*arguments, "--numerics", "float32", "--logits-out", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["logits.npy"]
    logits = np.load(out)
    assert logits.dtype == np.float32 and logits.shape == (37, 512)
    np.testing.assert_allclose(logits, want, rtol=0, atol=FP32_LOGITS_ABS)
    np.testing.assert_array_equal(logits.argmax(axis=1), want.argmax(axis=1))
    captured = capsys.readouterr()
    tokens, mean, perplexity = LINE.fullmatch(captured.out).groups()
    expected = nats(want, ids).mean()
    assert int(tokens) == 37 and abs(float(mean) - expected) < FP32_LOGITS_ABS
    assert abs(float(perplexity) / np.exp(expected) - 1) < 2 * FP32_LOGITS_ABS
    assert "37 of 37 tokens" in captured.err


def test_a_long_prompt_in_chunks(model, goldens):
    """p96 in chunks of 40 rows, the last one padded."""
    arrays = goldens("e2e_fp32.npz")
    ids, positions = arrays["p96.input_ids"].tolist(), arrays["p96.prefill_positions"]
    done = []
    logits = all_logits(model, local_ops(FLOAT32), ids, chunk=40, progress=done.append)
    assert logits.shape == (96, 512) and done == [40, 80, 96]
    np.testing.assert_allclose(
        logits[positions], arrays["p96.prefill_logits"], rtol=0, atol=FP32_LOGITS_ABS
    )


@pytest.mark.slow  # by default for the rows of one chunk, in test_attention_properties.py
def test_what_comes_later_changes_nothing(model, goldens):
    ids = goldens("e2e_fp32.npz")["p96.input_ids"].tolist()
    logits = all_logits(model, local_ops(FLOAT32), ids, chunk=40)
    other = [*ids[:60], *[7] * 36]
    changed = all_logits(model, local_ops(FLOAT32), other, chunk=40)
    assert changed[:60].tobytes() == logits[:60].tobytes()
    assert (changed[60:] != logits[60:]).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 15, 16, 17, 36])
def test_chunks_do_not_matter(model, goldens, chunk):
    ids = goldens("e2e_fp32.npz")["p37.input_ids"].tolist()
    want = all_logits(model, local_ops(FLOAT32), ids)
    got = all_logits(model, local_ops(FLOAT32), ids, chunk=chunk)
    np.testing.assert_allclose(got, want, rtol=0, atol=ACROSS_BUCKETS_ABS)


def test_negative_log_likelihood_of_large_logits():
    """Nats of the token that follows; no overflow."""
    logits = np.array([[1e4, 0, 0], [0, 0, 0], [5, 5, 5]], np.float32)
    got = negative_log_likelihood(logits, [2, 0, 1])
    np.testing.assert_allclose(got, [0, np.log(3)], atol=1e-6)


def test_a_text_is_scored_behind_a_bos(capsys, tiny_dir, tmp_path, monkeypatch, model):
    text = "Größe ☕"
    (tmp_path / "text").write_text(text, "utf-8")
    seen = []

    def logits(_model, _ops, ids, progress):
        seen.extend(ids)
        return np.zeros((len(ids), 512), np.float32)

    monkeypatch.setattr("dsv41_jax.score.all_logits", logits)
    arguments = ["--checkpoint", str(tiny_dir), "--text-file", str(tmp_path / "text")]
    assert main([*arguments, "--numerics", "float32"]) == 0
    assert seen == Tokenizer.from_dir(tiny_dir, model.cfg).encode(text, bos=True)
    tokens, mean, perplexity = LINE.fullmatch(capsys.readouterr().out).groups()
    assert (int(tokens), float(mean)) == (len(seen), pytest.approx(np.log(512), abs=1e-6))
    assert float(perplexity) == pytest.approx(512, rel=1e-5)


@pytest.mark.parametrize(
    ("ids", "words"), [([], "at least one token"), ([512], "token id 512"), ([-1], "token id -1")]
)
def test_bad_ids_are_refused(model, ids, words):
    with pytest.raises(UserError, match=words):
        all_logits(model, local_ops(FLOAT32), ids)


def test_default_numerics():
    assert default_numerics(None).name == "reference"
    assert default_numerics("serving").name == "serving"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--token-ids", "1,-1"], "token id -1 at index 1"),
        (["--token-ids", "1,512"], "token id 512 at index 1"),
        (["--token-ids", "1"], "1 tokens: at least 2"),
        (["--token-ids", ""], "token ids: ''"),
        (["--token-ids", ",".join("3" * 129)], "max_position_embeddings=128"),
        (["--text-file", "{tmp}/absent"], "absent: No such file"),
        (["--text-file", "{tmp}/latin1"], "latin1: must be UTF-8 text, byte 2 is not"),
        (["--text-file", "{tmp}/empty"], "1 tokens: at least 2"),
        (["--text-file", ""], "error: "),
        (["--token-ids", "1,2", "--logits-out", "{tmp}/absent/x.npy"], "x.npy: cannot be written"),
        (["--token-ids", "1,512", "--logits-out", "{tmp}/x.npy"], "token id 512"),
        (["--token-ids", "1,2", "--checkpoint", "{tmp}/absent"], "absent"),
        (["--token-ids", "1,2", "--numerics", "int8"], "--numerics"),
        (["--text-file", "x", "--token-ids", "1,2"], "not allowed with"),
        ([], "required"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_error_and_nothing_is_left(capsys, tiny_dir, tmp_path, arguments, words):
    (tmp_path / "latin1").write_bytes("Größe".encode("latin-1"))
    (tmp_path / "empty").write_bytes(b"")
    before = sorted(tmp_path.iterdir())
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    try:
        status = main(["--checkpoint", str(tiny_dir), *filled])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.count("error: ") == 1 and words in captured.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", ["{tmp}/kept.npy", "{tmp}"])
def test_a_failed_run_leaves_what_was_there(capsys, monkeypatch, tiny_dir, tmp_path, place):
    """An older file stays whole; a folder is no file to write to, and that shows at once."""
    (tmp_path / "kept.npy").write_bytes(b"older")
    if place == "{tmp}":
        monkeypatch.setattr("dsv41_jax.score.load_model", lambda *_, **__: pytest.fail("loaded"))
    arguments = ["--checkpoint", str(tiny_dir), "--token-ids", "1,512"]
    assert main([*arguments, "--logits-out", place.format(tmp=tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.npy"]
    assert (tmp_path / "kept.npy").read_bytes() == b"older"
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_folder_that_may_not_be_written(capsys, tiny_dir):
    """As root every folder may be, but for those that the kernel keeps."""
    arguments = ["--checkpoint", str(tiny_dir), "--token-ids", "1,2"]
    assert main([*arguments, "--logits-out", "/proc/self/logits.npy"]) == 2
    assert "logits.npy: cannot be written" in capsys.readouterr().err


def test_the_module_is_a_command(tmp_path):
    command = [sys.executable, "-m", "dsv41_jax.score", "--checkpoint", str(tmp_path)]
    done = subprocess.run(
        [*command, "--token-ids", "1,2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
