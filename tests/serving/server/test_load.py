"""Many clients at once: random lengths, some that leave, some that send nonsense."""

import asyncio
import random
import resource
import sys
import time

import httpx
import pytest

from dsv41_jax.process_memory import process_memory
from tests.serving.server.support import idle_pages, wait_for

EXPECTED = {200, 400, 404, 413, 429}
MALFORMED = (
    b"{",
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": [9999]}',
    b'{"prompt": "x", "model": "none"}',
    b'{"prompt": "' + b"x" * 300_000 + b'"}',
    b'{"prompt": "\xff"}',
)


class Load:
    """Clients that send one request after the other until the time is over."""

    def __init__(self, url: str, seconds: float, clients: int):
        self.url, self.clients = url, clients
        self.end = time.monotonic() + seconds
        self.answers: dict[int, int] = {}
        self.aborted = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self.clients)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(self._client(client, seed) for seed in range(self.clients)))

    async def _client(self, client: httpx.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < self.end:
            kind = rng.random()
            if kind < 0.05:
                answer = await client.post("/v1/completions", content=rng.choice(MALFORMED))
                assert 400 <= answer.status_code < 500
                self._count(answer.status_code)
            elif kind < 0.15:
                await self._leave_early(client, self._request(rng), rng.random() * 0.3)
            else:
                await self._whole(client, self._request(rng))

    def _request(self, rng: random.Random) -> dict:
        """Prompts share beginnings; penalties, seeds, prompt_logprobs and choices are mixed."""
        start = rng.randrange(3, 6)
        prompt = [0, *range(start * 50, start * 50 + rng.randrange(1, 90))]
        body = {"prompt": prompt, "max_tokens": rng.randrange(1, 128 - len(prompt) + 1)}
        body["max_tokens"] = min(body["max_tokens"], 24)
        options = {
            "temperature": rng.choice((0, 0.7, 1.3)),
            "frequency_penalty": 0.5,
            "seed": rng.randrange(2**31),
            "n": 2,
            "prompt_logprobs": 1,
            "logprobs": 3,
            "ignore_eos": True,
        }
        return body | {name: options[name] for name in options if rng.random() < 0.3}

    async def _whole(self, client: httpx.AsyncClient, body: dict) -> None:
        answer = await client.post("/v1/completions", json=body)
        self._count(answer.status_code)
        if answer.status_code == 200:
            choices = answer.json()["choices"]
            assert len(choices) == body.get("n", 1)
            assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
            if body.get("ignore_eos"):
                used = answer.json()["usage"]["completion_tokens"]
                assert used == body["max_tokens"] * len(choices)
        else:
            assert answer.status_code == 429
            await asyncio.sleep(0.2)

    async def _leave_early(self, client: httpx.AsyncClient, body: dict, after_s: float) -> None:
        body.pop("prompt_logprobs", None)
        try:
            async with asyncio.timeout(after_s):
                request = client.stream("POST", "/v1/completions", json=body | {"stream": True})
                async with request as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            self.aborted += 1

    def _count(self, status: int) -> None:
        self.answers[status] = self.answers.get(status, 0) + 1


def run_load(tiny, seconds: float, clients: int) -> Load:
    load = Load(tiny.url, seconds, clients)
    asyncio.run(load.run())
    assert set(load.answers) <= EXPECTED, load.answers
    assert load.answers[200] > 0 and load.aborted > 0
    wait_for(lambda: tiny.on_engine(lambda engine: engine.idle))
    wait_for(lambda: tiny.on_engine(idle_pages) == tiny.engine.options.pages)
    values = tiny.metrics()
    assert values["dsv41_compiles_after_warmup"] == 0
    assert values["dsv41_memory_bytes"] > 0 or process_memory() is None
    assert values.get("vllm:request_success_total:error", 0) == 0
    assert not tiny.app.state.worker._open and not tiny.app.state.worker._choices
    wait_for(lambda: tiny.app.state.gate.active == 0)
    return load


def test_load(tiny):
    load = run_load(tiny, 12, 12)
    assert sum(load.answers.values()) > 12


def peak_mib() -> float:
    """Peak resident memory of this process."""
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


@pytest.mark.slow
def test_load_for_five_minutes(tiny):
    """64 clients. Memory: the peak grows by less than 64 MiB after the first half minute, for
    engine, server and clients together.
    """
    run_load(tiny, 30, 64)
    before = peak_mib()
    run_load(tiny, 300, 64)
    assert peak_mib() - before < 64
