"""Processes that die: workers that stream, and the router itself."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from serving.kv_events.log import EventLog
from serving.kv_events.wire import DEVICE, decode
from serving.router.health import Checks
from tests.serving.listening import held_port, named_url
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
        self.url = named_url(self._process)

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


def worker(port: int) -> Process:
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
    with ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(2)]
        first, second = (stack.enter_context(worker(port)) for port in ports)
        router = stack.enter_context(RunningRouter(first.url, second.url))
        router.await_states("up", "up")
        started, ended = [], []
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(read, router, started, lambda: ended) for _ in range(4)]
            try:
                wait_for(lambda: len(started) == 4)
                assert router.metric("in_flight", worker=first.url) == 2
                first.end(signal.SIGKILL)
                wait_for(lambda: sum(answer.done() for answer in asked) == 2)
                router.await_states("down", "up")
                assert router.metric("in_flight", worker=second.url) == 2
            finally:
                ended.append(None)
            answers = [answer.result() for answer in asked]
        failed = [events for events in answers if b"error" in b"".join(events)]
        assert len(failed) == 2 and router.metric("broken_answers_total", worker=first.url) == 2
        for events in failed:
            assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == 503
            assert events[-1] == b"data: [DONE]"
            assert b"error" not in b"".join(events[:-2])
        wait_for(lambda: router.metric("in_flight") == 0)
        with worker(ports[0]):
            router.await_states("up", "up")


def test_a_worker_that_hangs_is_given_up():
    """SIGSTOP: nothing breaks off, the checks find it."""
    checks = Checks(period_s=0.05, timeout_s=5.0, failures=2)
    with (
        held_port() as port,
        worker(port) as hung,
        RunningRouter(hung.url, checks=checks) as router,
    ):
        router.await_states("up")
        started, ended = [], []
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(read, router, started, lambda: ended)
            try:
                wait_for(lambda: started)
                hung._process.send_signal(signal.SIGSTOP)
                events = asked.result(60)
                assert b"does not answer any more" in events[-2] and events[-1] == b"data: [DONE]"
                assert router.post(STREAM).status_code == 503
            finally:
                ended.append(None)
                hung._process.send_signal(signal.SIGCONT)
            router.await_states("up")


def held_pages(log: EventLog) -> int:
    with log._lock:
        return len(log._held[DEVICE])


def told_events(log: EventLog) -> int:
    with log._lock:
        return sum(len(decode(payload).events) for payload in log._kept)


def test_the_router_is_killed_and_begins_anew():
    """What it knew of the caches it learns again; requests go where their pages are."""
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    with ExitStack() as stack:
        fakes = [CachingWorker() for _ in range(2)]
        for fake in fakes:
            stack.callback(fake.close)
        urls = [stack.enter_context(Running(fake.app())).url for fake in fakes]
        prompt = list(range(6 * PAGE + 1))
        fakes[1].keep(prompt, 1)
        options = [f"--worker={url}" for url in urls] + ["--port=0", "--policy=own"]
        logs = fakes[1].publisher._logs
        wait_for(lambda: held_pages(logs[1]) == 6)
        events = sum(map(told_events, logs))

        def metric(url: str, name: str) -> float:
            page = CLIENT.get(f"{url}/metrics").text
            start = f'dsv41_router_{name}_total{{worker="{urls[1]}"}} '
            return float(page.partition(start)[2].partition("\n")[0] or 0)

        for ending in (signal.SIGKILL, signal.SIGTERM):
            with Process("serving.router", *options) as router:
                url = router.url
                wait_for(lambda url=url: metric(url, "kv_events") >= events)
                CLIENT.post(f"{url}/v1/completions", json={"prompt": prompt}).raise_for_status()
                assert metric(url, "cached_tokens") == 6 * PAGE
                status = router.end(ending)
            assert status == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
        assert fakes[1].hits == [6, 6] and fakes[0].seen == []


def test_all_workers_gone_and_one_back():
    with held_port() as port, worker(port) as only, RunningRouter(only.url) as router:
        router.await_states("up")
        only.end(signal.SIGTERM)
        router.await_states("down")
        assert router.post(STREAM).status_code == 503
        with worker(port):
            router.await_states("up")
            assert read(router, [], lambda: True)[0].startswith(b"data: ")
