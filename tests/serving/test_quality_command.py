"""``python -m serving.quality``: bad input is one line; a small model end to end."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dsv41_jax.checkpoint.load import load_model
from pallas_kernels.numerics import FLOAT32, REFERENCE
from serving.engine import Engine
from serving.options import EngineOptions
from serving.quality.__main__ import main
from serving.quality.scorer import Scorer
from serving.quality.studies import Sweep, replay_rows, whole
from serving.quality.text import Piece
from serving.quality.variants import without_candidate_limit
from serving.request import Request
from sharding.build import build_ops

SENTENCE = "The quality of a model is what it costs to be wrong, number {} of them. "


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    bodies = (" ".join(SENTENCE.format(i * j) for i in range(40)) for j in range(1, 10))
    path.write_text("".join(f"\f{i}\n{body}\n" for i, body in enumerate(bodies)), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "held_out.txt: is missing; --text FILE"),
        (["--text", "nowhere"], "nowhere: No such file"),
        (["--text", "nowhere", "--only", "replay,speed"], "--only speed: must be one of replay,"),
        (["--only", "tasks"], "--only tasks: needs --tasks"),
        (["--pieces", "0"], "--pieces 0 must be at least 1"),
        (["--plot", "a.jpg"], "--plot a.jpg: must end in .png"),
        (["--tasks", "nowhere"], "nowhere: No such file"),
        (["--json", "/nowhere/a.json", "--text", "x"], "/nowhere/a.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line(given, message, tiny_dir, capsys):
    assert main(["--checkpoint", str(tiny_dir), *given]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}") or f"{message}" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(("context", "limit"), [("47", "48 and 112"), ("113", "48 and 112")])
def test_a_context_must_leave_room_for_replay_and_continuation(
    context, limit, tiny_dir, text, capsys
):
    assert main(["--checkpoint", str(tiny_dir), "--text", text, "--context", context]) == 2
    assert f"--context {context} must be between {limit}" in capsys.readouterr().err


def test_without_the_limit_every_entry_has_a_candidate_block(tiny_dir):
    model = load_model(tiny_dir, numerics=REFERENCE)
    other = without_candidate_limit(str(tiny_dir), REFERENCE, "reference", 112)
    cfg = other.cfg
    assert cfg.candidate_topk_blocks * cfg.candidate_block_size >= 112
    assert replace(cfg, candidate_topk_blocks=model.cfg.candidate_topk_blocks) == model.cfg
    np.testing.assert_array_equal(other.token_map[...], model.token_map[...])
    np.testing.assert_array_equal(other.embed(), model.embed())


@pytest.fixture(scope="module")
def exact_model(tiny_dir):
    return load_model(tiny_dir, numerics=FLOAT32), build_ops("tp1", FLOAT32, "reference")


@pytest.mark.slow
def test_scores_are_those_of_the_engine(exact_model):
    """Replay after a cold prompt and after a hit: the tokens and their log probabilities."""
    model, ops = exact_model
    window, new, hit = model.cfg.sliding_window, 5, 48
    ids = np.concatenate([[0], np.random.default_rng(4).integers(3, 500, 63)])
    options = EngineOptions(
        slots=1,
        pages=16,
        page_size=window,
        max_tokens=112,
        prefill=((1, window),),
        decode=(1,),
        prompt_logprobs=False,
    )
    engine = Engine(model, ops, options)
    engine.warm_up()
    request = Request(tuple(map(int, ids[:60])), new)
    cold, warm = (engine.run([request])[0].result for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, hit)
    scorer = Scorer(model, ops, requests=2, length=112)
    for result, adopted in ((cold, 0), (warm, hit)):
        text = np.asarray([*ids[:60], *result.token_ids, 0], np.int32)
        prompt = scorer.prompt(1, text, 60)
        cache = scorer.encoded(scorer.new_cache(), [scorer.prompt(0, text, 1), prompt])
        if adopted:
            prompt = scorer.after_hit(prompt, adopted)
        prompt = scorer.trimmed(prompt)
        if adopted:
            cache = scorer.encoded(cache, [prompt])
        _, (score,) = scorer.continued(cache, [prompt], [new])
        assert score.best.tolist() == result.token_ids
        logprobs = [token.logprob for token in result.logprobs]
        np.testing.assert_allclose(-score.nats, logprobs, atol=2e-5)


@pytest.mark.slow
def test_replay_is_exact_on_a_window_and_not_beyond(exact_model):
    model, ops = exact_model
    window = model.cfg.sliding_window
    ids = np.random.default_rng(9).integers(3, 500, (3, 96), np.int32)
    pieces = [Piece(own, i) for i, own in enumerate(ids)]
    scorer = Scorer(model, ops, requests=2, length=96)
    sweep = Sweep.of(window, scorer.page, 80)
    rows = replay_rows(scorer, pieces, whole(scorer, pieces, lambda _: None), sweep, lambda _: None)
    exact, beyond = rows[0], rows[1:]
    assert "(exact)" in exact.condition
    assert abs(exact.difference.mean) < 1e-5 and exact.agreement.mean == 1
    assert all(abs(row.difference.mean) > 1e-4 for row in beyond if row.condition != "all")


@pytest.mark.slow
def test_the_whole_command_on_a_small_model(tiny_dir, text, tmp_path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "One, two,", "answer": " three"}\n', "utf-8")
    arguments = ["--quick", "--context", "64", "--requests", "2", "--json", str(tmp_path / "f")]
    arguments += ["--only", "replay,variants,drafts,tasks", "--tasks", str(tasks)]
    assert main(["--checkpoint", str(tiny_dir), "--text", text, *arguments]) == 0
    shown = capsys.readouterr()
    found = json.loads((tmp_path / "f").read_text("utf-8"))
    studies = {(row["study"], row["variant"]) for row in found["rows"]}
    assert {variant for study, variant in studies if study == "replay"} == {
        "decoder", "encoder", "both",
    }  # fmt: skip
    assert {study for study, _ in studies} == {
        "replay", "cache", "WO-A", "candidates", "numerics",
    }  # fmt: skip
    assert len(found["drafts"]) == 2 and found["tasks"]["replayed"]["count"] == 1
    assert "drafts at temperature 1" in shown.out
    assert "replay: 0 of 2 pieces" in shown.err
