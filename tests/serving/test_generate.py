"""``python -m serving.generate``: what it prints."""

import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Engine
from serving.generate import _report, main
from serving.output import TextOutput
from serving.request import Request, Result
from serving.sequence import Sequence
from tests.serving.support import log_softmax
from tests.tolerances import FP32_LOGITS_ABS, REPLAY_LOGITS_ABS

# Prompts of 33 to 64 tokens and one page of 64 tokens: every run shares the compiled programs.
TEXT = "Größe ☕ of a cache: bytes a token, rows a page, pages a slot"
KEYS = {"prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs", "stats"}
STATS = {
    "ttft_ms",
    "tpot_ms",
    "cached_tokens",
    "encoder_rows",
    "decoder_rows",
    "compiles_after_warmup",
    "kv_bytes_per_token",
}


@pytest.fixture(scope="module")
def executables():
    """What was compiled, by the options that shapes depend on."""
    return defaultdict(dict)


@pytest.fixture
def run(capsys, tiny_dir, monkeypatch, executables):
    """The command on the tiny checkpoint: standard output and standard error. Runs of the same
    shapes share what they compile.
    """

    def engine(model, ops, options, tokenizer, **placed):
        shapes = replace(options, replay=True, max_tokens=options.pages * options.page_size)
        return Engine(model, ops, options, tokenizer, executables[shapes], **placed)

    monkeypatch.setattr("serving.generate.Engine", engine)

    def run(*arguments, checkpoint=tiny_dir):
        always = ["--checkpoint", str(checkpoint), "--numerics", "float32", "--logprobs", "2"]
        assert main([*always, *map(str, arguments)]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def report(run):
    def report(*arguments, **options):
        return json.loads(run(*arguments, "--json", **options).out)

    return report


def listed(ids) -> str:
    return ",".join(map(str, np.asarray(ids).tolist()))


def assert_logprobs(tokens, logits, tolerance):
    for token, row in zip(tokens, log_softmax(logits), strict=True):
        assert set(token) == {"token_id", "logprob", "top"} and len(token["top"]) == 2
        assert token["top"][0] == {"token_id": token["token_id"], "logprob": token["logprob"]}
        for top in token["top"]:
            assert abs(top["logprob"] - row[top["token_id"]]) < tolerance


@pytest.mark.parametrize("replay", [True, False])
def test_json_report(run, goldens, replay):
    """One object with the contract's keys; its tokens, log probabilities and row counts."""
    if replay:
        arrays, switch, tolerance = goldens("replay_fp32.npz"), [], REPLAY_LOGITS_ABS
        want, logits = arrays["p37.decoder.tokens"], arrays["p37.decoder.logits"]
    else:
        arrays, switch = goldens("e2e_fp32.npz"), ["--no-swa-bounded-replay"]
        tolerance, want = FP32_LOGITS_ABS, arrays["p37.decode_tokens"][:9]
        logits = [arrays["p37.prefill_logits"][-1:], arrays["p37.decode_logits"][:8]]
        logits = np.concatenate(logits)
    ids = arrays["p37.input_ids"].tolist()
    out = run("--token-ids", listed(ids), "--max-new-tokens", 9, *switch, "--json").out
    assert out.endswith("}\n") and out.count("\n") == 1
    result = json.loads(out)
    assert set(result) == KEYS and set(result["stats"]) == STATS
    assert result["prompt_token_ids"] == ids and result["token_ids"] == want.tolist()
    assert result["finish_reason"] == "length" and isinstance(result["text"], str)
    assert_logprobs(result["logprobs"], logits, tolerance)
    stats = result["stats"]
    assert stats["encoder_rows"] == 37 and stats["decoder_rows"] == (16 if replay else 37)
    assert stats["cached_tokens"] == stats["compiles_after_warmup"] == 0
    # Float32 rows of 64 latent and 64 key values: half a row of layer 2 and one of layer 4.
    assert stats["kv_bytes_per_token"] == 768
    assert stats["ttft_ms"] > 0 and stats["tpot_ms"] > 0


@pytest.fixture(scope="module")
def greedy():
    """The report on TEXT, kept for the tests that compare with it."""
    return {}


@pytest.fixture
def greedy_report(greedy, report):
    if not greedy:
        greedy |= report("--prompt", TEXT, "--max-new-tokens", 8)
    return greedy


@pytest.fixture
def with_eos(tiny_dir, tmp_path):
    """The checkpoint with another id as its end of sequence."""

    def with_eos(token_id):
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        for path in tiny_dir.iterdir():
            (checkpoint / path.name).symlink_to(path)
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
        (checkpoint / "config.json").unlink()
        config["eos_token_id"] = token_id
        (checkpoint / "config.json").write_text(json.dumps(config), "utf-8")
        return checkpoint

    return with_eos


def test_text_streams_what_the_report_holds(run, greedy_report, with_eos, tmp_path):
    """The prompt as a file; text on standard output, progress on standard error. An end of sequence
    among the tokens is passed over when asked.
    """
    assert greedy_report["prompt_token_ids"][0] == 0
    assert 33 <= len(greedy_report["prompt_token_ids"]) <= 56
    (tmp_path / "prompt.txt").write_text(TEXT, "utf-8")
    streamed = run(
        "--prompt-file",
        tmp_path / "prompt.txt",
        "--max-new-tokens",
        8,
        "--ignore-eos",
        checkpoint=with_eos(greedy_report["token_ids"][1]),
    )
    assert streamed.out == greedy_report["text"] + "\n"
    lines = streamed.err.splitlines()
    assert [line for line in lines if line.startswith("compile encode")]
    assert lines[-1].startswith("length: {'ttft_ms': ")


def test_an_end_of_sequence_ends_it(report, with_eos, greedy_report):
    """It is the last token, and its log probability is told."""
    tokens = greedy_report["token_ids"]
    end = tokens.index(tokens[2]) + 1
    result = report("--prompt", TEXT, "--max-new-tokens", 8, checkpoint=with_eos(tokens[2]))
    assert result["token_ids"] == tokens[:end] and result["finish_reason"] == "stop"
    assert result["logprobs"] == greedy_report["logprobs"][:end]


def test_sampling_options_arrive(report, greedy_report):
    """Only the best id is left at --top-k 1; without it a hot draw goes elsewhere."""
    hot = ["--prompt", TEXT, "--max-new-tokens", 8, "--temperature", 5, "--seed", 3]
    assert report(*hot, "--top-k", 1)["token_ids"] == greedy_report["token_ids"]
    assert report(*hot)["token_ids"] != greedy_report["token_ids"]


def test_without_logprobs_there_is_no_such_key(tiny_dir):
    tokenizer = Tokenizer.from_dir(tiny_dir, Config.preset("tiny"))
    sequence = Sequence.of(Request((0,), 2), 0)
    sequence.result = Result(token_ids=[47, 35], finish_reason="length", ttft_ms=1.23456)
    sequence.output = TextOutput(tokenizer)
    text = "".join(map(sequence.output.push, [47, 35])) + sequence.output.finish()
    executor = SimpleNamespace(kv_bytes_per_token=105)
    compiles, options = SimpleNamespace(count=0), SimpleNamespace(speculation=None)
    engine = SimpleNamespace(compiles=compiles, executor=executor, options=options)
    report = _report(sequence, engine, 0)
    assert set(report) == KEYS - {"logprobs"} and set(report["stats"]) == STATS
    assert report["text"] == text == tokenizer.decode([47, 35])
    assert report["stats"]["ttft_ms"] == 1.235
