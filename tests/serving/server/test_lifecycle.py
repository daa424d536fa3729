"""Disconnects, a failing engine, the queue limit and the drain."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest

from tests.serving.server.support import OPTIONS, idle_pages, wait_for

LONG = {"prompt": [5] * 40, "max_tokens": 2000, "ignore_eos": True}


def endless(_request):
    return [7] * 4000


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_pages_within_a_step(scripted, stream):
    with scripted(endless, step_s=0.01) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = httpx.Request("POST", served.url, json={**LONG, "n": 2, "stream": stream}).read()

        async def start_and_leave():
            _, writer = await asyncio.open_connection(host, int(port))
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            await asyncio.to_thread(
                wait_for, lambda: served.on_engine(lambda e: len(e.ranks[0].running)) == 2
            )
            writer.close()

        asyncio.run(start_and_leave())
        wait_for(lambda: served.on_engine(lambda e: e.ranks[0].idle))
        assert served.on_engine(idle_pages) == 2048
        assert served.metrics()["vllm:request_success_total:abort"] == 2
        wait_for(lambda: served.app.state.gate.active == 0)


def test_aborts_of_queued_requests(scripted):
    with scripted(endless, step_s=0.005) as served, ThreadPoolExecutor(8) as threads:

        def leave_early(index):
            with pytest.raises(httpx.TimeoutException):
                served.post("/v1/completions", LONG, timeout=0.3 + 0.05 * index)

        list(threads.map(leave_early, range(8)))
        # A request that arrives after its client has left may still be on its way.
        wait_for(lambda: served.on_engine(idle_pages) == 2048)
        assert served.on_engine(lambda e: e.ranks[0].idle)
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200


def test_engine_failure_fails_every_request_and_health(scripted):
    with scripted(endless, step_s=0.01) as served, ThreadPoolExecutor(3) as threads:
        whole = threads.submit(served.post, "/v1/completions", LONG)
        client = served.client()
        streamed = client.completions.create(model="tiny", prompt=[3], max_tokens=2000, stream=True)
        next(iter(streamed))
        wait_for(lambda: served.on_engine(lambda e: len(e.ranks[0].running)) == 2)
        served.engine.executor.fail = True
        answer = whole.result(60)
        assert answer.status_code == 500
        assert "the device is gone" in answer.json()["error"]["message"]
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(streamed)
        assert served.get("/health").status_code == 503
        assert served.get("/metrics").status_code == 200
        assert served.post("/v1/completions", {"prompt": "x"}).status_code == 503


def test_queue_limit(scripted):
    with scripted(endless, options=replace(OPTIONS, max_queue=2), step_s=0.01) as served:
        answers = []
        body = {**LONG, "n": 6, "max_tokens": 100}
        thread = threading.Thread(
            target=lambda: answers.append(served.post("/v1/completions", body))
        )
        thread.start()
        wait_for(lambda: len(served.app.state.worker._open) == 6)
        refused = served.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 429 and refused.headers["retry-after"]
        thread.join()
        assert [len(c["text"]) > 0 for c in answers[0].json()["choices"]] == [True] * 6
        assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_drain_finishes_requests_and_refuses_new_ones(scripted):
    with scripted(endless, step_s=0.02) as served, ThreadPoolExecutor(8) as threads:
        body = {**LONG, "max_tokens": 40}
        answers = [threads.submit(served.post, "/v1/completions", body) for _ in range(6)]
        wait_for(lambda: len(served.app.state.worker._open) == 6)
        served.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: served.app.state.gate.draining)
        assert served.post("/v1/completions", {"prompt": "x"}).status_code == 503
        assert served.get("/health").json() == {"status": "draining"}
        for answer in answers:
            assert answer.result(60).json()["usage"]["completion_tokens"] == 40
        served.thread.join(60)
        assert not served.thread.is_alive()


def test_drain_gives_up_after_its_time(scripted):
    with scripted(endless, step_s=0.02, drain_s=0.3) as served, ThreadPoolExecutor(2) as threads:
        answer = threads.submit(served.post, "/v1/completions", LONG)
        wait_for(lambda: served.app.state.worker._open)
        served.server.handle_exit(signal.SIGTERM, None)
        assert answer.result(60).status_code == 503
        served.thread.join(60)
        assert not served.thread.is_alive()


def test_sigterm_of_a_process_under_load(tiny_dir):
    """Every request that was accepted gets its whole answer, and the process ends with 0."""
    command = [sys.executable, "-m", "tests.serving.server.scripted_main", str(tiny_dir)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stderr is not None
        url = process.stderr.readline().rpartition(" ")[2].strip()
        body = {**LONG, "max_tokens": 30}

        def ask(_):
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

        with ThreadPoolExecutor(12) as threads:
            answers = [threads.submit(ask, index) for index in range(12)]
            # All have arrived: four run, eight wait.
            wait_for(lambda: _running_and_waiting(url) == [4, 8])
            process.send_signal(signal.SIGTERM)
            for answer in answers:
                assert answer.result(60).json()["usage"]["completion_tokens"] == 30
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def _running_and_waiting(url):
    page = httpx.get(f"{url}/metrics", timeout=60).text
    return [
        int(
            float(
                page.partition(f'num_requests_{state}{{engine="0",model_name="tiny"}} ')[2].split()[
                    0
                ]
            )
        )
        for state in ("running", "waiting")
    ]
