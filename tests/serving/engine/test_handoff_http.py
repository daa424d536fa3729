"""Two servers that share requests, as a router uses them: one begins, the other one answers."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest

from serving.handoff.options import HandoffOptions
from serving.server.app import create_app
from serving.server.chat import chat_format
from tests.serving.engine.support import prompt
from tests.serving.handoff.support import POOL, new_pool
from tests.serving.server.support import NAME, OPTIONS, Served, wait_for

POOL_NAME = f"test-handoff-http-{os.getpid()}"
AWAY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}


@pytest.fixture(scope="module")
def servers(engines, tiny_dir) -> Iterator[tuple[Served, Served]]:
    """One that begins requests or runs them, one that only goes on with them."""
    new_pool(POOL_NAME)
    pool = replace(POOL, name=POOL_NAME)
    chat = chat_format(tiny_dir, engines.model.cfg, engines.tokenizer, "auto", NAME)
    with ExitStack() as running:
        made = []
        for role in ("both", "decode"):
            engine = engines.make(kv_pool=pool, handoff=HandoffOptions(role))
            made.append(running.enter_context(Served(create_app(engine, chat, OPTIONS), engine)))
        yield made[0], made[1]
    new_pool(POOL_NAME)


@pytest.fixture
def pair(servers):
    """The same; nothing compiles, and nothing is left in them."""
    for served in servers:
        served.engine.compiles.start()
    yield servers
    for served in servers:
        assert served.engine.compiles.count == 0
        wait_for(lambda served=served: served.on_engine(lambda engine: engine.idle))
        assert served.on_engine(free_pages) == served.engine.options.pages


def free_pages(engine) -> int:
    engine.check()
    engine.ranks[0].cache.clear()
    return engine.ranks[0].pool.free


def begun(served: Served, path: str, body: dict) -> dict:
    """What the other server has to be given, got as a router gets it."""
    asked = {name: value for name, value in body.items() if name not in ("stream", "max_tokens")}
    answer = served.post(path, asked | {"max_tokens": 1, "kv_transfer_params": AWAY})
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


# Prompts of so few pages that nobody adopts a hit of them.
COMPLETION = {
    "prompt": [list(prompt(70, 30)), list(prompt(71, 17))],
    "n": 2,
    "max_tokens": 4,
    "temperature": 0.9,
    "seed": 5,
    "logprobs": 2,
    "min_tokens": 3,
}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
    "temperature": 0,
    "response_format": {"type": "json_object"},
}
PATHS = {"completions": COMPLETION, "chat/completions": CHAT}


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_is_that_of_one_server(pair, path):
    a, b = pair
    path, body = f"/v1/{path}", PATHS[path]
    whole = a.post(path, body).json()
    split = b.post(path, body | {"kv_transfer_params": begun(a, path, body)})
    assert split.status_code == 200, split.text
    assert "kv_transfer_params" not in {**whole, **split.json()}
    for one, two in zip(whole["choices"], split.json()["choices"], strict=True):
        assert {**one, "logprobs": None} == {**two, "logprobs": None}
        if one["logprobs"]:
            assert one["logprobs"]["tokens"] == two["logprobs"]["tokens"]
            values = two["logprobs"]["token_logprobs"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-5)
    for name in ("prompt_tokens", "completion_tokens"):
        assert whole["usage"][name] == split.json()["usage"][name]


def test_it_can_be_streamed(pair):
    a, b = pair
    body = {"prompt": list(prompt(72, 20)), "max_tokens": 6, "temperature": 0, "stream": True}
    given = {"kv_transfer_params": begun(a, "/v1/completions", body)}
    lines = b.post("/v1/completions", body | given).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert lines[-2] == "data: [DONE]"
    assert text == a.post("/v1/completions", body | {"stream": False}).json()["choices"][0]["text"]


def test_without_a_seed_both_draw_from_one(pair):
    a, b = pair
    body = {"prompt": list(prompt(73, 9)), "n": 4, "return_token_ids": True, "temperature": 3}
    answer = a.post("/v1/completions", body | {"max_tokens": 1, "kv_transfer_params": AWAY}).json()
    given = {"max_tokens": 4, "kv_transfer_params": answer["kv_transfer_params"]}
    after = b.post("/v1/completions", body | given).json()
    firsts = [choice["token_ids"] for choice in answer["choices"]]
    assert [choice["token_ids"][:1] for choice in after["choices"]] == firsts
    # With the seeds of the beginning the rest is what one server draws.
    seed = answer["kv_transfer_params"]["handoffs"][0]["seed"]
    whole = a.post("/v1/completions", body | {"max_tokens": 4, "seed": seed}).json()
    ids = [[choice["token_ids"] for choice in said["choices"]] for said in (after, whole)]
    assert ids[0] == ids[1]


def test_what_is_lost_is_told_before_the_first_byte(pair):
    a, b = pair
    body = {"prompt": list(prompt(74, 40)), "max_tokens": 2, "n": 2}
    given = {"kv_transfer_params": begun(a, "/v1/completions", body)}
    before = b.metrics()
    assert b.post("/v1/completions", body | given).status_code == 200
    b.engine.kv_pool.flush()
    for stream in (False, True):
        again = b.post("/v1/completions", body | given | {"stream": stream})
        assert again.status_code == 503 and again.headers["content-type"] == "application/json"
        error = again.json()["error"]
        assert error["code"] == "handoff_lost" and "gone" in error["message"]
    wait_for(lambda: b.on_engine(lambda engine: engine.idle))
    ends = [f"vllm:request_success_total:{reason}" for reason in ("error", "abort")]
    assert sum(b.metrics()[end] - before[end] for end in ends) == 4
    assert b.get("/health").status_code == 200


def test_refusals(pair):
    a, b = pair
    plain = {"prompt": [5, 6, 7], "max_tokens": 2}
    for served, body, message in (
        (b, plain, "never runs a prompt"),
        (b, plain | {"kv_transfer_params": AWAY}, "never runs a prompt"),
        (a, plain | {"stream": True, "kv_transfer_params": AWAY}, "cannot be streamed"),
        (a, plain | {"kv_transfer_params": {"do_remote_prefill": True}}, "needs the handoffs"),
    ):
        answer = served.post("/v1/completions", body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and message in error["message"]
        assert error["param"] == "kv_transfer_params"
    scored = plain | {"prompt_logprobs": 1, "kv_transfer_params": AWAY}
    assert a.post("/v1/completions", scored).json()["error"]["param"] == "prompt_logprobs"
    roles = [served.get("/worker").json()["role"] for served in pair]
    assert roles == ["both", "decode"]


def test_a_client_that_goes_while_the_server_loads(pair, monkeypatch):
    a, b = pair
    body = {"prompt": list(prompt(75, 40)), "max_tokens": 5, "stream": True}
    given = {"kv_transfer_params": begun(a, "/v1/completions", body)}
    store, called, gate = b.engine.kv_pool.pool.checked.store, threading.Event(), threading.Event()
    real = store.get

    def slow(*given):
        called.set()
        assert gate.wait(60)
        return real(*given)

    monkeypatch.setattr(store, "get", slow)
    url, content = httpx.URL(b.url), json.dumps(body | given).encode()
    with socket.create_connection((url.host, url.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        assert called.wait(60)
        assert not b.on_engine(lambda engine: engine.idle)
    wait_for(lambda: b.on_engine(lambda engine: engine.idle))
    gate.set()
