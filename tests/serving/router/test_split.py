"""Prompts on one worker, answers on another."""

import json
import threading

import pytest
from fastapi import Request
from starlette.responses import Response

from serving.router.ask import COMPLETIONS, Ask
from serving.router.split import prefill_body
from tests.serving.router.fake import FakeWorker, Running, announced, wait_for
from tests.serving.router.support import RunningRouter

ASK = {"prompt": list(range(30)), "max_tokens": 5, "stream": True, "seed": 3}
LOST = {"error": {"message": "gone", "code": "handoff_lost"}}
HANDED = {"do_remote_prefill": True, "opaque": [1, {"a": None}]}
PREFILLED = json.dumps({"choices": [], "kv_transfer_params": HANDED}).encode()


class Prefill(FakeWorker):
    """Hands something over."""

    def __init__(self):
        super().__init__(said=announced(role="prefill"), whole=PREFILLED)


class Decode(FakeWorker):
    """loses: that many hand-offs."""

    def __init__(self, loses=0):
        super().__init__(said=announced(role="decode"), error=LOST)
        self.loses, self._lock = loses, threading.Lock()

    async def _generate(self, request: Request) -> Response:
        with self._lock:
            self.status = 503 if self.loses > 0 else 200
            self.loses -= 1
        return await super()._generate(request)


@pytest.fixture
def split(request):
    prefills, decodes = [Prefill(), Prefill()], [Decode(), Decode()]
    servers = [Running(fake.app()) for fake in (*prefills, *decodes)]
    for server in servers:
        server.__enter__()
    options = getattr(request, "param", {})
    with RunningRouter(*(server.url for server in servers), **options) as router:
        router.await_states(*["up"] * 4)
        yield router, prefills, decodes
        wait_for(lambda: router.metric("in_flight") == 0)
        router.on_loop(router.router._policy.board.check)
        loads = router.on_loop(lambda: list(router.router._policy.board.loads.values()))
        assert {(load.prefill, load.active, load.requests) for load in loads} == {(0, 0, 0)}
    for server in servers:
        server.__exit__()


def all_seen(fakes):
    return [seen for fake in fakes for seen in fake.seen]


def test_two_hops(split):
    router, prefills, decodes = split
    answer = router.post(ASK, headers={"Authorization": "Bearer k"})
    assert answer.content == b"".join(decodes[0].events)
    [first], [second] = all_seen(prefills), all_seen(decodes)
    assert first.fields == {
        "prompt": ASK["prompt"],
        "max_tokens": 1,
        "stream": False,
        "seed": 3,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert second.fields == {**ASK, "kv_transfer_params": HANDED}
    for seen in (first, second):
        assert seen.headers["authorization"] == "Bearer k" and seen.rank in ("0", "1")


@pytest.mark.parametrize("split", [{"sticky": "X-Session"}], indirect=True)
def test_a_session_stays_on_a_rank_of_each_role(split):
    router, prefills, decodes = split
    for number in range(9):
        router.post(ASK, headers={"x-session": f"s{number % 3}"})
    for fakes in (prefills, decodes):
        homes: dict = {}
        for index, fake in enumerate(fakes):
            for seen in fake.seen:
                homes.setdefault((index, seen.rank), []).append(seen.headers["x-session"])
        assert sorted(homes.values()) == [["s0"] * 3, ["s1"] * 3, ["s2"] * 3]


def test_a_lost_hand_off_is_computed_again(split):
    router, prefills, decodes = split
    for decode in decodes:
        decode.loses = 1
    answers = [router.post(ASK) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    lost = router.metric("lost_handoffs_total")
    assert lost >= 1 and len(all_seen(prefills)) == len(all_seen(decodes)) == 2 + lost
    assert router.metric("failures_total") == 0


def test_lost_again_and_again(split):
    router, prefills, decodes = split
    for decode in decodes:
        decode.loses = 1000
    answer = router.post(ASK)
    assert (answer.status_code, answer.json()) == (503, LOST)
    assert len(all_seen(prefills)) == len(all_seen(decodes)) == 3


def test_refusals_of_the_first_worker_are_the_answer(split):
    router, prefills, decodes = split
    for prefill in prefills:
        prefill.status = 400
    assert router.post(ASK).json() == prefills[0].error
    for prefill in prefills:
        prefill.status, prefill.whole = 200, b'{"choices": []}'
    answer = router.post(ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "handoff_lost")
    assert all_seen(decodes) == [] and router.metric("lost_handoffs_total") == 3


def test_a_prefill_worker_that_fails_is_replaced(split):
    router, prefills, decodes = split
    prefills[0].status = 500
    for _ in range(2):
        assert router.post(ASK).status_code == 200
        router.await_states(*["up"] * 4)
    assert len(prefills[1].seen) == len(all_seen(decodes)) == 2


def test_it_needs_both(split):
    router, _, decodes = split
    for decode in decodes:
        decode.health = 503
    router.await_states("up", "up", "down", "down")
    assert router.get("/health").status_code == 503
    assert router.post(ASK).status_code == 503


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"stream_options": {"include_usage": True}, "stream": True}, {"stream": False}),
        ({"max_tokens": 9, "max_completion_tokens": 9}, {"max_completion_tokens": 1}),
        ({"max_completion_tokens": None}, {"max_completion_tokens": None}),
        ({"min_tokens": 7, "n": 2}, {"min_tokens": 1, "n": 2}),
        ({"min_tokens": 0}, {"min_tokens": 0}),
    ],
)
def test_the_first_body(given, sent):
    common = {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    ask = Ask.parse("POST", COMPLETIONS, [], json.dumps(given).encode())
    assert json.loads(prefill_body(ask)) == common | sent
