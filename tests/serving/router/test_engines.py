"""The router before real servers, whose engines say what the tests want."""

import contextlib
import json
import socket
from typing import Any

import pytest

from serving.router.policy import OwnPolicy
from serving.router.prompts import LocalTexts
from serving.routing.score import Weights
from tests.serving.kv_events.worker import publishing_server
from tests.serving.router.fake import wait_for
from tests.serving.router.support import CLIENT, RunningRouter

pytest.importorskip("zmq", reason="the extra [route] is not installed")
PAGE = 16
PROMPT = [5 + index % 300 for index in range(6 * PAGE + 3)]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 5, "logprobs": 1}),
    ("/v1/completions", {"prompt": [PROMPT[:20], [7, 8]], "max_tokens": 4, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "Hello", "model": "unknown"}),
    ("/v1/chat/completions", {"messages": []}),
]


def comparable(answer) -> Any:
    """An answer without what differs from one time to the next; choices share a stream in any
    order.
    """
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")[:-2] if streamed else [answer.text]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines]
    for body in bodies:
        body.pop("id", None)
        body.pop("created", None)
    return answer.status_code, len(bodies), sorted(map(repr, bodies))


@pytest.fixture
def engines(tiny_dir):
    """Two servers whose engines say 7 and have two data ranks, and a router before them."""
    policy = OwnPolicy(Weights())
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(2):
            made = publishing_server(tiny_dir, lambda request: [7] * 4000, ranks=2, step_s=0.005)
            servers.append(stack.enter_context(made))
        texts = LocalTexts(str(tiny_dir), "auto")
        urls = [server.url for server in servers]
        router = stack.enter_context(RunningRouter(*urls, policy=policy, texts=texts))
        router.await_states("up", "up")
        yield router, servers, policy
        wait_for(lambda: router.metric("in_flight") == 0)
        router.on_loop(policy.board.check)
        assert all(load.requests == 0 for load in router.on_loop(policy.board.loads.copy).values())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_the_server(engines, stream):
    router, servers, _ = engines
    for path, body in BODIES:
        asked = {**body, "seed": 5, "ignore_eos": True, "stream": stream}
        direct = CLIENT.post(servers[0].url + path, json=asked)
        assert comparable(router.post(asked, path)) == comparable(direct)


def test_the_second_turn_finds_the_pages_of_the_first(engines):
    router, _, policy = engines
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
    first = router.post(body).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    wait_for(lambda: router.on_loop(lambda: len(policy.pages.device)) >= 6)
    usage = router.post({**body, "prompt": [*PROMPT, 9, 9]}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6 * PAGE
    assert router.metric("cached_tokens_total") == 6 * PAGE


def test_a_prompt_is_off_the_books_before_its_answer_is_there(engines):
    """Although that is not streamed; when its client goes it is aborted."""
    router, servers, policy = engines
    asked = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    def loads() -> list[tuple[int, float]]:
        found = router.on_loop(lambda: list(policy.board.loads.values()))
        return sorted((load.requests, load.prefill) for load in found)

    def running() -> int:
        counts = [s.on_engine(lambda e: [len(r.running) for r in e.ranks]) for s in servers]
        return sum(map(sum, counts))

    with socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: loads() == [(0, 0), (0, 0), (0, 0), (1, 0)])
        assert running() == 1
    wait_for(lambda: running() == 0)
    wait_for(lambda: loads() == [(0, 0)] * 4)
