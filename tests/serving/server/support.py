"""Servers in a thread: over the tiny model, or over an engine whose tokens a test writes."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import numpy as np
import openai
from fastapi import FastAPI

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from serving.engine import Engine
from serving.executor import EngineOptions, InFlight
from serving.request import Request
from serving.sampler import Sampled
from serving.sequence import Sequence, Stage
from serving.server.limits import ServerOptions
from serving.server.serve import DrainingServer, bound_socket

NAME = "tiny"
EOS = 1
OPTIONS = ServerOptions(names=(NAME, "alias"), max_queue=256, max_body_bytes=200_000)
Script = Callable[[Request], list[int]]


@dataclass
class Served:
    """A server in a thread of its own."""

    app: FastAPI
    engine: Engine
    drain_s: float = 10.0
    url: str = ""

    def __enter__(self) -> "Served":
        self._socket = bound_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = DrainingServer(self.app, self.drain_s)
        self.thread = threading.Thread(target=self.server.run, args=([self._socket],), daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, **sent, **{"timeout": 60, **options})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def on_engine(self, function: Callable[[Engine], Any]) -> Any:
        """The function's result, run between two steps of the engine."""
        call = self.app.state.worker.call(function)
        return asyncio.run_coroutine_threadsafe(call, self.server._loop).result(60)

    def metrics(self) -> dict[str, float]:
        """Values by name, labels left out but for the reason of an end; summed over data ranks."""
        values: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                reason = name.partition('finished_reason="')[2].partition('"')[0]
                name = name.partition("{")[0] + (f":{reason}" if reason else "")
                values[name] = values.get(name, 0) + float(value)
        return values


def wait_for(done: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def idle_pages(engine: Engine) -> int:
    """Pages that are free once the prefix cache lets go of its own; checks the invariants."""
    engine.check()
    engine.ranks[0].cache.clear()
    return engine.ranks[0].pool.free


@dataclass
class FakeExecutor:
    """In place of the device: the tokens that ``script`` gives for a request, then EOS.

    step_s: how long a step takes. fail: raise in the next step. ranks: data ranks.
    """

    model: Any
    ops: Any
    options: EngineOptions
    placement: Any = None
    peers: str = ""
    script: Script = field(default=lambda request: [])
    step_s: float = 0.0
    fail: bool = False
    ranks: int = 1
    programs: Any = field(default_factory=lambda: SimpleNamespace(host=None))
    table_rows: Any = field(default_factory=lambda: SimpleNamespace(close=lambda: None))

    def run(self, plan: Any) -> InFlight:
        time.sleep(self.step_s)
        if self.fail:
            raise RuntimeError("the device is gone")
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.stop
        owners = [chunk.sequence for chunk in plan.chunks if chunk.last] + plan.decode
        tokens = [self._next(sequence) for sequence in owners]
        top = np.array([[token, 5] for token in tokens], np.int32).reshape(-1, 2)
        values = np.tile(np.array([[-0.5, -2.0]], np.float32), (len(tokens), 1))
        sampled = Sampled(np.array(tokens, np.int32), values[:, 0], top, values)
        return InFlight(sampled=[(sampled, owners)])

    def _next(self, sequence: Sequence) -> int:
        tokens = self.script(sequence.request)
        index, sequence.dispatched = sequence.dispatched, sequence.dispatched + 1
        sequence.stage = Stage.DECODE
        return tokens[index] if index < len(tokens) else EOS


def scripted_engine(cfg: Config, tokenizer: Tokenizer, script: Script, **executor: Any) -> Engine:
    """An engine with all its host parts and a FakeExecutor; 4 slots and long contexts."""
    options = EngineOptions(slots=4, pages=2048, page_size=16, max_tokens=8192, decode=(4,))
    model = SimpleNamespace(cfg=replace(cfg, max_position_embeddings=8192))

    def make(*inputs: Any) -> FakeExecutor:
        return FakeExecutor(*inputs, script=script, **executor)

    with mock.patch("serving.engine.Executor", make):
        return Engine(model, None, options, tokenizer)


def v41_tokenizer_json(plain: str) -> str:
    """The tiny tokenizer with V4.1's special tokens in place of its last ordinary ones."""
    data = json.loads(plain)
    vocabulary = data["model"]["vocab"]
    names = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "｜DSML｜")
    for token_id, name in enumerate(names, 508 - len(names)):
        old = next(text for text, number in vocabulary.items() if number == token_id)
        del vocabulary[old]
        vocabulary[name] = token_id
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        data["added_tokens"].append({"id": token_id, "content": name, "special": False, **flags})
    data["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(data)
