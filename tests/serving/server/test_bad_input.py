"""Whatever is wrong with a request: an HTTP error that names it, and nobody else notices."""

import time
from dataclasses import replace

import httpx
import pytest

from tests.serving.server.support import NAME, OPTIONS, idle_pages, wait_for

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server(tiny_server):
    yield tiny_server
    answer = tiny_server.post(COMPLETION, {"prompt": "still well", "max_tokens": 2})
    assert answer.status_code == 200
    wait_for(lambda: tiny_server.on_engine(idle_pages) == tiny_server.engine.options.pages)


def refused(answer, status, param):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"], error
    assert error["code"] == status
    return error["message"]


BOTH = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2**80}, "top_k"),
    ({"min_p": 1}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**32 - 1, "n": 2}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**30}, "prompt"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(3, 12))}, "stop_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"return_token_ids": True, "stream": True}, "return_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options.chunk"),
    ({"priority": 2**31}, "priority"),
    ({"guided_json": {}}, "guided_json"),
    ({"lora": "x"}, "lora"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH, ids=lambda v: str(v)[:40])
def test_sampling_fields(server, fields, param):
    for path, start in ((COMPLETION, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        refused(server.post(path, start | fields), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [3, 512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [3, "x"]}, "prompt"),
        ({"prompt": [[3], "x"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[3]] * 261}, "prompt"),
        ({"prompt": [[3]] * 3, "n": 128}, "prompt"),
        ({"prompt": [3] * 129}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "messages": MESSAGES}, "messages"),
        ({"prompt": "x", "response_format": {"type": "text"}}, "response_format"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_completion_fields(server, fields, param):
    refused(server.post(COMPLETION, fields), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "nme": 1}]}, "messages[0].nme"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"functions": []}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_chat_fields(server, fields, param):
    refused(server.post(CHAT, {"messages": MESSAGES} | fields), 400, param)


def deep(opening: str, closing: str = "") -> bytes:
    return b'{"prompt": ' + opening.encode() * 30_000 + closing.encode() * 30_000 + b"}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'{"prompt": "x"} trailing', None),
        (b'{"prompt": "\xff\xfe"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'\xff{"prompt": "x"}', None),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "top_p": Infinity}', "top_p"),
        (b'{"prompt": "x", "logit_bias": {"3": -Infinity}}', "3"),
        (b'{"prompt": "x", "min_p": 1e999}', "min_p"),
        (deep("["), None),
        (deep("[", "]"), None),
        (deep('{"a":'), "prompt"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_broken_json(server, body, param):
    for path in (COMPLETION, CHAT, "/tokenize", "/detokenize"):
        answer = server.post(path, body)
        assert answer.status_code == 400
        if path == COMPLETION:
            refused(answer, 400, param)


def test_body_size(server):
    message = refused(server.post(COMPLETION, {"prompt": "x" * 10_000_000}), 413, None)
    assert str(OPTIONS.max_body_bytes) in message

    def endless():
        for _ in range(100):
            yield b"x" * 10_000

    refused(httpx.post(server.url + COMPLETION, content=endless(), timeout=30), 413, None)


def test_unknown_paths_and_methods(server):
    assert refused(server.get("/v2/models"), 404, None)
    assert refused(server.get(COMPLETION), 405, None)
    assert server.get("/docs").status_code == 404


def test_model_names(server):
    for path, body in (
        (COMPLETION, {"prompt": "x"}),
        (CHAT, {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [3]}),
    ):
        refused(server.post(path, body | {"model": "gpt"}), 404, "model")


def test_tokenize(server):
    answer = server.post("/tokenize", {"prompt": "Hi", "add_special_tokens": False}).json()
    with_bos = server.post("/tokenize", {"prompt": "Hi"}).json()
    assert with_bos["tokens"] == [0, *answer["tokens"]]
    assert (with_bos["count"], with_bos["max_model_len"]) == (3, 128)
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hi"}
    refused(server.post("/tokenize", {}), 400, "prompt")
    for tokens in ([512], [-1], [10**30]):
        refused(server.post("/detokenize", {"tokens": tokens}), 400, "tokens")


def test_api_key(scripted):
    with scripted(options=replace(OPTIONS, api_key="sésame")) as served:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame"}):
            given = {name: value.encode() for name, value in header.items()}
            answer = served.post(COMPLETION, {"prompt": "x"}, headers=given)
            refused(answer, 401, "Authorization")
            assert served.get("/v1/models", headers=given).status_code == 401
        right = {"Authorization": "Bearer sésame".encode()}
        assert served.post(COMPLETION, {"prompt": "x"}, headers=right).status_code == 200
        assert served.get("/health").status_code == served.get("/metrics").status_code == 200


def test_slow_body(scripted):
    with scripted(options=replace(OPTIONS, body_timeout_s=0.2)) as served:

        def slow():
            yield b'{"prompt"'
            time.sleep(1)
            yield b': "x"}'

        answer = httpx.post(served.url + COMPLETION, content=slow(), timeout=10)
        assert answer.status_code == 408


def test_every_field_is_honoured_or_refused(server):
    """Fields of OpenAI's API that exist and are not ours are refused by name."""
    for field in (
        "audio", "function_call", "metadata", "prediction", "prompt_cache_key", "service_tier",
        "store", "verbosity", "web_search_options", "safety_identifier",
    ):  # fmt: skip
        refused(server.post(CHAT, {"messages": MESSAGES, field: {}}), 400, field)


def test_null_means_default(server):
    fields = dict.fromkeys(
        ("temperature", "stop", "seed", "n", "logit_bias", "tools", "response_format", "stream")
    )
    answer = server.post(CHAT, {"messages": MESSAGES, "model": NAME, "max_tokens": 2} | fields)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] <= 2
