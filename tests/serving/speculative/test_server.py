"""Drafts behind the HTTP interface: usage, metrics, opting out, and what a simulation says."""

from dataclasses import replace

import pytest

from serving.server.app import create_app
from serving.server.chat import chat_format
from serving.server.metrics import Metrics, snapshot
from serving.speculative import Speculation
from tests.serving.engine.support import ask, prompt, run
from tests.serving.server.support import NAME, OPTIONS, Served
from tests.serving.speculative.support import LENGTH, Drafter

PROMPT, NEW = prompt(33, 21), 13
BODY = {"model": NAME, "prompt": list(PROMPT), "temperature": 0, "max_tokens": NEW}
BODY |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def answer(plain):
    [sequence] = run(plain, [ask(PROMPT, NEW)])
    plain.ranks[0].cache.clear()
    return sequence.result.token_ids


def app_of(engine, tiny_dir):
    return create_app(
        engine, chat_format(tiny_dir, engine.cfg, engine.tokenizer, "auto", NAME), OPTIONS
    )


@pytest.fixture(scope="module")
def served(speculating, tiny_dir, answer):
    """Four of every five drafts are right."""
    engine = speculating.make()

    def propose(sequence, position, n):
        first = position + 1 - sequence.length
        return [*[*answer[first : first + n], *[3] * n][: n - 1], 3]

    Drafter(engine, propose)
    with Served(app_of(engine, tiny_dir), engine) as served:
        yield served


def by_position(served) -> list[float]:
    lines = served.get("/metrics").text.splitlines()
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]


def test_usage_and_metrics(served, answer):
    before, at = served.metrics(), by_position(served)
    body = served.post("/v1/completions", BODY).json()
    assert body["choices"][0]["token_ids"] == answer
    details = body["usage"]["completion_tokens_details"]
    # 12 tokens behind the first: blocks of 1 + 4, 1 + 4 and 1 + 1 of the one draft left.
    assert details == {"accepted_prediction_tokens": 9, "rejected_prediction_tokens": 2}
    after, names = served.metrics(), ("drafts", "draft_tokens", "accepted_tokens")
    names = [f"vllm:spec_decode_num_{name}_total" for name in names]
    grown = [after[name] - before[name] for name in names]
    assert grown == [3, 11, 9]
    assert [b - a for a, b in zip(at, by_position(served), strict=True)] == [3, 2, 2, 2, 0]
    assert len(at) == LENGTH and "dsv41_simulated_acceptance" not in after
    assert "simulated_acceptance" not in body


def test_a_request_may_opt_out(served, answer):
    before = served.metrics()["vllm:spec_decode_num_drafts_total"]
    body = served.post("/v1/completions", {**BODY, "speculative": False}).json()
    assert body["choices"][0]["token_ids"] == answer
    details = body["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert served.metrics()["vllm:spec_decode_num_drafts_total"] == before
    assert served.post("/v1/completions", {**BODY, "speculative": 1}).status_code == 400


def test_streams_hold_every_token_of_a_block(served, answer):
    body = {name: BODY[name] for name in ("model", "prompt", "temperature", "max_tokens")}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with served.client() as client:
        chunks = list(client.completions.create(**body, extra_body={"ignore_eos": True}))
    assert chunks[-1].usage.completion_tokens == len(answer)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == served.post("/v1/completions", BODY).json()["choices"][0]["text"]


def test_a_simulation_is_marked_everywhere(speculating, tiny_dir):
    """In every answer, in every chunk and on the metrics page."""
    engine = speculating.make()
    engine.options = replace(engine.options, speculation=Speculation(simulated=3.51))
    with Served(app_of(engine, tiny_dir), engine) as served:
        assert served.post("/v1/completions", BODY).json()["simulated_acceptance"] == 3.51
        assert served.metrics()["dsv41_simulated_acceptance"] == 3.51
        streamed = {**BODY, "stream": True, "return_token_ids": False}
        lines = served.post("/v1/completions", streamed).text.splitlines()
        events = [line for line in lines if line.startswith("data: {")]
        assert events and all('"simulated_acceptance": 3.51' in event for event in events)


def test_without_speculation_there_is_no_such_metric(plain):
    metrics = Metrics(NAME)
    metrics.show(snapshot(plain))
    assert b"spec_decode" not in metrics.render()
