"""The router before two workers that answer as the tests say."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from tests.serving.router.fake import FakeWorker, Running, wait_for
from tests.serving.router.support import CHECKS, CLIENT, LIMITS, RunningRouter

ASK = {"prompt": [1, 2, 3], "max_tokens": 5}
STREAM = {**ASK, "stream": True}


class Pair:
    """Two workers, named 0 and 1, and a router before them."""

    def __init__(self, **options):
        self.fakes = [FakeWorker(), FakeWorker()]
        self.workers = [Running(fake.app()) for fake in self.fakes]
        self.options = options

    def __enter__(self):
        for worker in self.workers:
            worker.__enter__()
        self.urls = [worker.url for worker in self.workers]
        self.router = RunningRouter(*self.urls, **self.options).__enter__()
        self.router.await_states("up", "up")
        return self

    def __exit__(self, *_):
        for fake in self.fakes:
            fake.go.set()
            fake.step.set()
        self.router.__exit__()
        for worker in self.workers:
            worker.__exit__()

    def used(self) -> list[int]:
        return [len(fake.seen) for fake in self.fakes]

    def settled(self) -> None:
        """Nothing is on its way and nothing on the books."""
        self.router.on_loop(self.router.router._policy.board.check)
        loads = self.router.on_loop(lambda: list(self.router.router._policy.board.loads.values()))
        assert [(load.prefill, load.active, load.requests) for load in loads] == [(0, 0, 0)] * 4
        assert self.router.metric("in_flight") == 0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as made:
        yield made
        wait_for(lambda: made.router.metric("in_flight") == 0)
        made.settled()


def test_answers_go_through_byte_for_byte(pair):
    whole = pair.router.post(ASK, headers={"X-Mine": "1", "Authorization": "Bearer k"})
    assert (whole.status_code, whole.content) == (200, pair.fakes[0].whole)
    assert whole.headers["x-own"] == "kept" and whole.headers["content-type"] == "application/json"
    streamed = pair.router.post(STREAM)
    assert streamed.content == b"".join(pair.fakes[0].events)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    [seen] = [seen for fake in pair.fakes for seen in fake.seen if "x-mine" in seen.headers]
    assert seen.headers["authorization"] == "Bearer k" and seen.rank in ("0", "1")
    assert json.loads(seen.body) == ASK


def test_the_bytes_of_a_request_are_not_changed(pair):
    body = b'{ "prompt":[1,2] ,"unknown":\t1e2}'
    CLIENT.post(pair.router.url + "/v1/completions?x=%2F", content=body)
    assert [seen.body for fake in pair.fakes for seen in fake.seen] == [body]


@pytest.mark.parametrize(
    "target",
    [
        "%2Fv1%2Fmodels%2F@127.0.0.1:1/x",
        "/v1/models/../../worker",
        "/v1/models/%2e%2E/..%2F..%2Fworker",
        "/v1/models/./m",
    ],
)
def test_targets_that_lead_elsewhere(pair, target):
    """As they stand in the request's first line, which clients would tidy up."""
    with socket.create_connection(("127.0.0.1", pair.router.port), timeout=60) as connection:
        head = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ") and b'"message":"Not Found"' in answer
    assert pair.router.states() == dict.fromkeys(pair.urls, "up")


def test_requests_spread_over_all_ranks(pair):
    for fake in pair.fakes:
        fake.go.clear()
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(pair.router.post, ASK) for _ in range(8)]
        wait_for(lambda: pair.used() == [4, 4])
        ranks = [sorted(seen.rank for seen in fake.seen) for fake in pair.fakes]
        assert ranks == [["0", "0", "1", "1"]] * 2
        assert pair.router.metric("in_flight", worker=pair.urls[0], rank="1") == 2
        for fake in pair.fakes:
            fake.go.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert pair.router.metric("requests_total") == 8


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "streamed"])
def test_another_worker_is_asked(pair, status, body):
    pair.fakes[0].status = status
    for _ in range(2):
        assert pair.router.post(body).status_code == 200
        pair.router.await_states("up", "up")
    assert pair.used()[0] >= 1 and pair.used()[1] == 2
    failed = pair.router.metric("failures_total", worker=pair.urls[0], reason=str(status))
    assert failed == pair.used()[0] == pair.router.metric("retries_total", worker=pair.urls[1])


def test_the_last_refusal_is_the_answer(pair):
    for fake in pair.fakes:
        fake.status, fake.error = 429, {"error": {"message": "full", "code": 429}}
    answer = pair.router.post(ASK)
    assert (answer.status_code, answer.json()) == (429, pair.fakes[0].error)
    assert pair.used() == [1, 1]


def test_what_is_wrong_with_a_request_is_not_asked_twice(pair):
    for fake in pair.fakes:
        fake.status = 400
    assert pair.router.post({"prompt": 7}).json() == pair.fakes[0].error
    assert sum(pair.used()) == 1


def test_a_worker_that_breaks_before_the_first_byte_is_replaced(pair):
    broken = pair.fakes[0]
    broken.breaks_after = 0
    broken.events[0] = b""
    for _ in range(2):
        answer = pair.router.post(STREAM)
        assert answer.content == b"".join(pair.fakes[1].events)
        pair.router.await_states("up", "up")


def test_a_worker_that_breaks_later_gives_one_error(pair):
    for fake in pair.fakes:
        fake.breaks_after = 2
    answer = pair.router.post(STREAM)
    events = answer.content.removesuffix(b"\n\n").split(b"\n\n")
    assert events[:2] == [event.strip() for event in pair.fakes[0].events[:2]]
    error = json.loads(events[2].removeprefix(b"data: "))["error"]
    assert error["type"] == "unavailable_error" and "broke off" in error["message"]
    assert events[3:] == [b"data: [DONE]"]
    assert sum(pair.used()) == 1 and pair.router.metric("broken_answers_total") == 1


def test_openai_client_sees_the_error(pair):
    for fake in pair.fakes:
        fake.breaks_after = 1
    with openai.OpenAI(base_url=pair.router.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model="m", prompt="a", stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="broke off"):
            texts.extend(chunk.choices[0].text for chunk in stream)
    assert texts in ([], ["a"])


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["before", "within"])
def test_a_client_that_goes_is_gone_for_the_worker(pair, body):
    for fake in pair.fakes:
        fake.step.clear()
        if body is ASK:
            fake.go.clear()
    if body is ASK:
        with socket.create_connection(("127.0.0.1", pair.router.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n"
            connection.sendall(head + b'{"prompt":[]}')
            wait_for(lambda: sum(pair.used()) == 1)
    else:
        with CLIENT.stream("POST", pair.router.url + "/v1/completions", json=body) as response:
            assert next(response.iter_raw()) == pair.fakes[0].events[0]
    wait_for(lambda: sum(fake.gone for fake in pair.fakes) == 1)


def test_draining_one_worker(pair):
    pair.fakes[0].go.clear()
    pair.fakes[1].go.clear()
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(pair.router.post, ASK) for _ in range(4)]
        wait_for(lambda: pair.used() == [2, 2])
        drained = pair.router.post(None, f"/admin/drain?worker={pair.urls[0]}")
        assert (drained.json()["state"], drained.json()["requests"]) == ("draining", 2)
        pair.fakes[0].go.set()
        pair.fakes[1].go.set()
        assert [answer.result().status_code for answer in answers] == [200] * 4
    for _ in range(3):
        pair.router.post(ASK)
    assert pair.used() == [2, 5]
    pair.router.post(None, f"/admin/drain?worker={pair.urls[1]}")
    assert pair.router.post(ASK).status_code == 503
    assert pair.router.get("/health").status_code == 503
    assert pair.router.post(None, f"/admin/undrain?worker={pair.urls[0]}").json()["state"] == "up"
    assert pair.router.post(ASK).status_code == 200
    assert pair.router.post(None, "/admin/drain?worker=http://other").status_code == 404


def test_sessions_stay_on_their_rank():
    with Pair(sticky="X-Session") as pair:
        for number in range(12):
            pair.router.post(ASK, headers={"x-session": f"s{number % 3}"})
        homes = [{}, {}]
        for fake, ranks in zip(pair.fakes, homes, strict=True):
            for seen in fake.seen:
                ranks.setdefault(seen.rank, set()).add(seen.headers["x-session"])
        sessions = [names for ranks in homes for names in ranks.values()]
        assert sorted(map(sorted, sessions)) == [["s0"], ["s1"], ["s2"]]


def test_the_key_is_asked_for_and_passed_on():
    fake = FakeWorker(key="k")
    limits, checks = replace(LIMITS, api_key="k"), replace(CHECKS, api_key="k")
    with Running(fake.app()) as worker:
        with RunningRouter(worker.url) as router:
            router.await_states("refused")
        with RunningRouter(worker.url, limits=limits, checks=checks) as router:
            router.await_states("up")
            for path in ("/v1/completions", f"/admin/drain?worker={worker.url}"):
                assert router.post(ASK, path).status_code == 401
            key = {"Authorization": "Bearer k"}
            assert router.post(ASK, headers=key).status_code == 200
            assert fake.seen[0].headers["authorization"] == "Bearer k"


@contextlib.contextmanager
def told_to_end(drain_s: float):
    """A router that got SIGTERM while two streams had begun, its worker, and their answers."""
    fake = FakeWorker()
    fake.step.clear()
    with (
        Running(fake.app()) as worker,
        ThreadPoolExecutor(2) as threads,
        RunningRouter(worker.url, drain_s=drain_s) as router,
    ):
        router.await_states("up")
        answers = [threads.submit(router.post, STREAM) for _ in range(2)]
        wait_for(lambda: fake.running == 2)
        router.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: router.app.state.gate.draining)
        yield router, fake, answers
        router.thread.join(60)
        assert not router.thread.is_alive()


def test_sigterm_finishes_what_runs():
    with told_to_end(drain_s=60) as (router, fake, answers):
        assert router.post(ASK).status_code == 503
        assert router.get("/health").json()["status"] == "draining"
        fake.step.set()
        for answer in answers:
            assert answer.result().content == b"".join(fake.events)


def test_what_does_not_end_in_time_ends_with_an_error():
    with told_to_end(drain_s=0.1) as (_, fake, answers):
        for answer in answers:
            events = answer.result().content.removesuffix(b"\n\n").split(b"\n\n")
            assert b"the server is shutting down" in events[-2] and events[-1] == b"data: [DONE]"
        fake.step.set()
