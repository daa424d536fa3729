"""Processes that die: workers that stream, and the router itself."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.kv_events.wire import DEVICE, decode
from serving.router.health import Checks
from tests.serving.router.caching import CachingWorker
from tests.serving.router.fake import PAGE, Running, wait_for
from tests.serving.router.support import CLIENT, RunningRouter

STREAM = {"prompt": [1, 2, 3], "stream": True}


class Process:
    """A command that says where it listens."""

    def __init__(self, *command: str):
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for line in self._process.stdout:
            if "http://127.0.0.1:" in line:
                self.url = line[line.index("http://") :].strip()
                return
        raise AssertionError(f"{command} ended before it listened")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end(signal.SIGKILL)

    def end(self, kind: int) -> int:
        """The exit status after a signal, or that of before."""
        self._process.send_signal(kind)
        status = self._process.wait(60)
        self._process.stdout.close()
        return status


def worker(port: int = 0) -> Process:
    return Process("tests.serving.router.fake", str(port))


def read(router: RunningRouter, started: list, stop) -> list[bytes]:
    """The events of an endless answer, until it ends or ``stop`` is set."""
    events = b""
    with CLIENT.stream("POST", router.url + "/v1/completions", json=STREAM) as response:
        assert response.status_code == 200
        for chunk in response.iter_raw():
            if not events:
                started.append(None)
            events += chunk
            if stop():
                break
    return events.removesuffix(b"\n\n").split(b"\n\n")


def test_kill_minus_9_while_it_streams():
    """Its clients get one clear error each, the others nothing; it comes back."""
    with worker() as first, worker() as second, RunningRouter(first.url, second.url) as router:
        router.await_states("up", "up")
        started, ended = [], []
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(read, router, started, lambda: ended) for _ in range(4)]
            wait_for(lambda: len(started) == 4)
            assert router.metric("in_flight", worker=first.url) == 2
            first.end(signal.SIGKILL)
            wait_for(lambda: sum(answer.done() for answer in asked) == 2)
            router.await_states("down", "up")
            assert router.metric("in_flight", worker=second.url) == 2
            ended.append(None)
            answers = [answer.result() for answer in asked]
        failed = [events for events in answers if b"error" in b"".join(events)]
        assert len(failed) == 2 and router.metric("broken_answers_total", worker=first.url) == 2
        for events in failed:
            assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == 503
            assert events[-1] == b"data: [DONE]"
            assert b"error" not in b"".join(events[:-2])
        wait_for(lambda: router.metric("in_flight") == 0)
        with worker(int(first.url.rpartition(":")[2])):
            router.await_states("up", "up")


def test_a_worker_that_hangs_is_given_up():
    """SIGSTOP: nothing breaks off, the checks find it."""
    checks = Checks(period_s=0.05, timeout_s=0.5, failures=2)
    with worker() as hung, RunningRouter(hung.url, checks=checks) as router:
        router.await_states("up")
        started: list[None] = []
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(read, router, started, lambda: False)
            wait_for(lambda: started)
            hung._process.send_signal(signal.SIGSTOP)
            events = asked.result(60)
            assert b"does not answer any more" in events[-2] and events[-1] == b"data: [DONE]"
            assert router.post(STREAM).status_code == 503
            hung._process.send_signal(signal.SIGCONT)
            router.await_states("up")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_router_is_killed_and_begins_anew():
    """What it knew of the caches it learns again; requests go where their pages are."""
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    with contextlib.ExitStack() as stack:
        fakes = [CachingWorker() for _ in range(2)]
        for fake in fakes:
            stack.callback(fake.close)
        urls = [stack.enter_context(Running(fake.app())).url for fake in fakes]
        prompt = list(range(6 * PAGE + 1))
        fakes[1].keep(prompt, 1)
        options = [f"--worker={url}" for url in urls] + [f"--port={free_port()}", "--policy=own"]

        log = fakes[1].publisher._logs[1]
        wait_for(lambda: len(log._held[DEVICE]) == 6)
        logs = fakes[1].publisher._logs
        events = sum(len(decode(payload).events) for log in logs for payload in log._kept)

        def metric(url: str, name: str) -> float:
            page = CLIENT.get(f"{url}/metrics").text
            start = f'dsv41_router_{name}_total{{worker="{urls[1]}"}} '
            return float(page.partition(start)[2].partition("\n")[0] or 0)

        for ending in (signal.SIGKILL, signal.SIGTERM):
            with Process("serving.router", *options) as router:
                url = router.url
                wait_for(lambda url=url: metric(url, "kv_events") == events)
                CLIENT.post(f"{url}/v1/completions", json={"prompt": prompt}).raise_for_status()
                assert metric(url, "cached_tokens") == 6 * PAGE
                status = router.end(ending)
            assert status == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
        assert fakes[1].hits == [6, 6] and fakes[0].seen == []


def test_all_workers_gone_and_one_back():
    with worker() as only, RunningRouter(only.url) as router:
        router.await_states("up")
        only.end(signal.SIGTERM)
        router.await_states("down")
        assert router.post(STREAM).status_code == 503
        with worker(int(only.url.rpartition(":")[2])):
            router.await_states("up")
            assert read(router, [], lambda: True)[0].startswith(b"data: ")
