"""The router before servers of the tiny checkpoint: it says the same as a server alone."""

import contextlib
import json
import os
from typing import Any

import pytest

from dsv41_jax.tokenizer import Tokenizer
from serving.handoff.options import HandoffOptions
from serving.kv_events.publisher import publisher_of
from serving.kv_pool.options import PoolOptions
from serving.kv_pool.shm import pool_path
from serving.router.__main__ import make_policy
from serving.server.app import create_app
from serving.server.chat import chat_format
from tests.serving.engine.support import PAGE, Engines, prompt
from tests.serving.kv_events.worker import FREE
from tests.serving.router.fake import wait_for
from tests.serving.router.support import CLIENT, RunningRouter
from tests.serving.server.support import NAME, OPTIONS, Served

pytest.importorskip("zmq", reason="the extra [route] is not installed")
pytestmark = pytest.mark.slow
PROMPTS = [list(prompt(seed, 4 * PAGE + 3)) for seed in range(4)]


class Servers:
    """Servers over one model that publish what they have cached."""

    def __init__(self, stack: contextlib.ExitStack, loaded, directory):
        model, ops = loaded("float32")
        self._tokenizer = Tokenizer.from_dir(directory, model.cfg)
        self._engines = Engines(model, ops, self._tokenizer, None)
        self._chat = chat_format(directory, model.cfg, self._tokenizer, "plain", NAME)
        self.stack = stack

    def start(self, **options: Any) -> Served:
        engine = self._engines.make(**options)
        events = publisher_of(engine, FREE)
        app = create_app(engine, self._chat, OPTIONS, events)
        return self.stack.enter_context(Served(app, engine))


@pytest.fixture
def servers(loaded, tiny_dir):
    with contextlib.ExitStack() as stack:
        yield Servers(stack, loaded, tiny_dir)


def says(url: str, ids: list[int], **fields: Any) -> tuple[list[int], int]:
    """What the model says, and how much of the prompt was cached."""
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = CLIENT.post(f"{url}/v1/completions", json=body | fields).json()
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"]


@pytest.mark.parametrize("policy", ["own", "auto"])
def test_two_servers(servers, policy):
    """Second turns find their pages, also after another router has taken over."""
    direct, *workers = (servers.start() for _ in range(3))
    urls = [worker.url for worker in workers]
    with RunningRouter(*urls, policy=make_policy(policy, 0.75)) as router:
        router.await_states("up", "up")
        first = [says(direct.url, ids) for ids in PROMPTS]
        assert [says(router.url, ids) for ids in PROMPTS] == first
        assert {cached for _, cached in first} == {0}
    turns = [[*ids, *said, 11, 12] for ids, (said, _) in zip(PROMPTS, first, strict=True)]
    second = [says(direct.url, ids) for ids in turns]
    assert {cached for _, cached in second} == {4 * PAGE}
    with RunningRouter(*urls, policy=make_policy(policy, 0.75)) as router:
        router.await_states("up", "up")
        for ids in turns:
            wait_for(
                lambda ids=ids: [have.cached for have in router.known(ids).values()] == [4 * PAGE]
            )
        assert [says(router.url, ids) for ids in turns] == second
        assert router.metric("cached_tokens_total") == 4 * 4 * PAGE


def test_prompts_and_answers_on_different_servers(servers, request):
    """Whole and streamed, one choice and two."""
    name = f"dsv41-test-router-{os.getpid()}"
    request.addfinalizer(lambda: pool_path(name).unlink(missing_ok=True))
    wait_s = 60.0
    pool = PoolOptions("shm", "tiny", 4_000_000, name, lookup_s=wait_s, load_s=wait_s)
    direct = servers.start()
    roles = ["prefill", "decode", "decode"]
    workers = [servers.start(kv_pool=pool, handoff=HandoffOptions(role)) for role in roles]
    urls = [worker.url for worker in workers]
    with RunningRouter(*urls) as router:
        router.await_states("up", "up", "up")
        for ids in PROMPTS:
            assert says(router.url, ids)[0] == says(direct.url, ids)[0]
        assert router.metric("requests_total", worker=urls[0]) == 4
        body = {"prompt": PROMPTS[0][:30], "max_tokens": 5, "temperature": 0, "n": 2, "seed": 4}
        for stream in (False, True):
            asked = {**body, "stream": stream}
            alone = CLIENT.post(f"{direct.url}/v1/completions", json=asked)
            assert texts(router.post(asked)) == texts(alone)
        assert router.metric("lost_handoffs_total") == router.metric("failures_total") == 0


def texts(answer) -> list[str]:
    """The text of each choice."""
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")[:-2] if streamed else [answer.text]
    found: dict[int, str] = {}
    for line in lines:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]
