"""Two workers of ours, of two data ranks each, behind vLLM's router: a process that we know nothing
of but its command line.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import httpx
import pytest

from tests.serving.kv_events.support import WAIT_S, wait_for
from tests.serving.kv_events.worker import publishing_server
from tests.serving.listening import held_port
from tests.serving.server.support import NAME, Served

pytest.importorskip("zmq", reason="the extra [route] is not installed")
pytest.importorskip("vllm_router", reason="vllm-router is not installed")

PAGE = 16
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def workers(tiny_dir) -> Iterator[list[Served]]:
    made = [publishing_server(tiny_dir, lambda request: [7] * 8, ranks=2) for _ in range(2)]
    with made[0], made[1]:
        yield made


class Router:
    """The process."""

    def __init__(self, url: str, metrics_url: str):
        self.url, self._metrics_url = url, metrics_url

    def post(self, path: str, body: dict) -> dict:
        body = {"model": NAME, "max_tokens": 3} | body
        answer = httpx.post(self.url + path, json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cached_tokens(self, prompt: list[int]) -> int:
        usage = self.post(COMPLETIONS, {"prompt": prompt})["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self._metrics_url}/metrics", timeout=WAIT_S).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@contextmanager
def routed(workers: list[Served], log, *options: str) -> Iterator[Router]:
    """The router in front of workers, once it finds them healthy."""
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host=127.0.0.1"]
    command += ["--worker-urls", *(worker.url for worker in workers), *options]
    with held_port() as port, held_port() as metrics_port, log.open("w") as output:
        command += [
            f"--port={port}",
            "--prometheus-host=127.0.0.1",
            f"--prometheus-port={metrics_port}",
        ]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        router = Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}")

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                ready = httpx.get(f"{router.url}/readiness").json()
                return ready["healthy_workers"] == ready["total_workers"] > 0
            except (httpx.HTTPError, KeyError):
                return False

        try:
            wait_for(healthy)
            yield router
        finally:
            process.kill()
            process.wait()


def test_what_it_sends_on_is_answered(workers, tmp_path):
    """It spells out fields of other servers. With its own idea of caches a prompt comes back to
    where it was.
    """
    with routed(workers, tmp_path / "log", "--policy=cache_aware") as router:
        prompts = [[20 + number] * (4 + number) * PAGE for number in range(6)]
        assert [router.cached_tokens(prompt) for prompt in prompts] == [0] * 6
        again = [router.cached_tokens(prompt) for prompt in prompts]
        assert again == [len(prompt) - PAGE for prompt in prompts]
        assert router.post(COMPLETIONS, {"prompt": "some text"})["usage"]["completion_tokens"] == 3
        messages = [{"role": "user", "content": "Hi"}]
        answer = router.post(CHAT, {"messages": messages, "max_tokens": 2})
        assert answer["choices"][0]["finish_reason"] == "length"
        body = {"model": NAME, "messages": messages, "max_tokens": 4, "stream": True}
        with httpx.stream("POST", router.url + CHAT, json=body, timeout=WAIT_S) as streamed:
            lines = [line for line in streamed.iter_lines() if line]
        assert streamed.status_code == 200 and lines[-1] == "data: [DONE]"


def test_it_finds_what_a_rank_has_cached_by_our_events(workers, tmp_path):
    """Prompts that it has not seen, cached on one data rank of one worker; a worker turns texts
    into tokens.
    """
    options = ["--policy=kv_aware", "--intra-node-data-parallel-size=2", f"--kv-event-model={NAME}"]
    options += [f"--kv-event-block-size={PAGE}"]
    for worker in workers:
        said = worker.get("/worker").json()
        options += ["--kv-event-source", f"{worker.url}={','.join(said['kv_events'])}"]
        options += ["--kv-event-replay-source", f"{worker.url}={','.join(said['kv_replay'])}"]
    hits = 'vllm_router_kv_placement_lookups_total{result="hit"}'
    numbers = count()

    def found(router: Router, worker: Served, rank: int, path: str) -> bool:
        """Whether its index knew where a new prompt lies; events take a while."""
        body = new_prompt(path, next(numbers)) | {"model": NAME, "max_tokens": 3}
        headers, before = {"X-data-parallel-rank": str(rank)}, router.metric(hits)
        assert worker.post(path, body, headers=headers, timeout=WAIT_S).status_code == 200
        usage = router.post(path, body)["usage"]
        if router.metric(hits) == before:
            return False
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == (usage["prompt_tokens"] - 1) // PAGE * PAGE > 3 * PAGE
        return True

    with routed(workers, tmp_path / "log", *options) as router:
        for path in (COMPLETIONS, CHAT):
            for worker in workers:
                for rank in range(2):
                    wait_for(partial(found, router, worker, rank, path))


def new_prompt(path: str, number: int) -> dict:
    """The number-th of prompts that differ from their first page on."""
    if path == CHAT:
        return {"messages": [{"role": "user", "content": f"{number} " * 100}]}
    first, other = divmod(number, 400)
    return {"prompt": [20 + first, *[20 + other] * (6 * PAGE)]}
