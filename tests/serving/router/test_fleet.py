"""Who belongs to the fleet: announcements, checks, coming and going."""

import json
import logging
from contextlib import ExitStack

import pytest

from dsv41_jax.errors import UserError
from serving.router.announcement import announcement
from serving.router.fleet import Fleet
from tests.serving.listening import held_port
from tests.serving.router.fake import FakeWorker, Running, announced, wait_for
from tests.serving.router.support import RunningRouter

ASK = {"prompt": [1, 2, 3]}
URL = "http://h:1"


def said(**changes):
    return announcement(json.dumps(announced(**changes)).encode(), URL)


def test_announcements():
    endpoints = {
        "kv_events": ["tcp://0.0.0.0:5", "tcp://[::1]:7"],
        "kv_replay": ["tcp://*:6", "tcp://k:8"],
    }
    assert said(**endpoints, later="ignored").endpoints("http://[::2]:80") == [
        ("tcp://[::2]:5", "tcp://[::2]:6"),
        ("tcp://[::1]:7", "tcp://k:8"),
    ]
    assert said().difference(said(role="decode", slots=9, names=["m", "n"])) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 0}, "page_size"),
        ({"data_ranks": "2"}, "data_ranks"),
        ({"role": "x"}, "role"),
        ({"names": []}, "names"),
        ({"names": ["other"]}, "its model 'm' is not the first of"),
        ({"kv_events": ["tcp://h:1"]}, r"\(1, 0\) endpoints of events and replay for 2"),
        ({"kv_events": ["x", "tcp://h:1"], "kv_replay": ["tcp://h:1"] * 2}, "must be tcp"),
    ],
)
def test_malformed_announcements(changes, reason):
    with pytest.raises(UserError, match=reason):
        said(**changes)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"model": "m"}'])
def test_announcements_that_are_none(body):
    with pytest.raises(UserError, match="its announcement is malformed"):
        announcement(body, URL)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "n", "names": ["n"]}, "model 'n' is not the others' 'm'"),
        ({"fingerprint": "f1"}, "fingerprint 'f1' is not the others' 'f0'"),
        ({"page_size": 8}, "page_size 8 is not the others' 4"),
    ],
)
def test_a_foreign_worker_is_refused_with_one_line(caplog, changes, field):
    good, foreign = FakeWorker(), FakeWorker(health=500)
    caplog.set_level(logging.INFO, "serving")
    with Running(good.app()) as first, Running(foreign.app()) as second:
        urls = first.url, second.url
        with RunningRouter(*urls) as router:
            router.await_states("up", "down")
            foreign.said, foreign.health = announced(**changes), 200
            router.await_states("up", "refused")
            checks = router.router.fleet.members[second.url].checks
            wait_for(lambda: router.router.fleet.members[second.url].checks > checks + 3)
            lines = [line for line in caplog.messages if second.url in line]
            assert lines == [f"worker {second.url} is refused: {field}"]
            assert router.get("/health").status_code == 200
            assert [router.post(ASK).status_code for _ in range(4)] == [200] * 4
            assert (len(good.seen), len(foreign.seen)) == (4, 0)
            foreign.said = announced()
            router.await_states("up", "up")


def test_a_worker_that_announces_nothing(caplog):
    foreign = FakeWorker()
    app = foreign.app()
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") != "/worker"]
    with Running(app) as worker, RunningRouter(worker.url) as router:
        router.await_states("refused")
        assert router.post(ASK).status_code == 503
        assert f"worker {worker.url} is refused: GET /worker was answered with 404" in caplog.text
        [row] = router.get("/admin/workers").json()
        assert row["reason"] == "GET /worker was answered with 404" and row["model"] is None


def test_all_workers_gone_and_back():
    fakes = [FakeWorker(), FakeWorker()]
    with ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in fakes]
        first, second = (Running(f.app(), port) for f, port in zip(fakes, ports, strict=True))
        router = stack.enter_context(RunningRouter(first.url, second.url))
        refused = router.post(ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "no worker takes requests"
        assert router.get("/v1/models").status_code == 503
        with first, second:
            router.await_states("up", "up")
            assert router.post(ASK).status_code == 200
        router.await_states("down", "down")
        assert router.get("/health").status_code == 503
        assert router.post(ASK).status_code == 503
        with Running(fakes[0].app(), ports[0]):
            router.await_states("up", "down")
            assert router.post(ASK).status_code == 200
            assert router.get("/health").json()["status"] == "ok"


def test_a_worker_that_says_no_is_left_out_but_keeps_what_it_runs(caplog):
    fake = FakeWorker()
    with Running(fake.app()) as worker, RunningRouter(worker.url) as router:
        router.await_states("up")
        fake.health = 503
        router.await_states("down")
        assert router.post(ASK).status_code == 503
        assert caplog.text.count("takes no requests") == 1
        assert router.router.fleet.members[worker.url].said is not None
        fake.health = 200
        router.await_states("up")


def test_a_worker_that_changes_joins_anew(caplog):
    fake = FakeWorker()
    caplog.set_level(logging.INFO, "serving")
    with Running(fake.app()) as worker, RunningRouter(worker.url) as router:
        router.await_states("up")
        fake.said = announced(data_ranks=3)
        wait_for(lambda: caplog.text.count("joins: m, 3 data ranks") == 1)
        router.await_states("up")
        assert {router.post(ASK).status_code for _ in range(3)} == {200}
        assert {seen.rank for seen in fake.seen} == {"0", "1", "2"}


def test_names():
    fleet = Fleet(["a", "b"])
    for member, names in zip(fleet, (["m", "x"], ["m"]), strict=True):
        member.said, member.available = said(names=names), True
    workers = [[target.worker for target in fleet.targets("both", name)] for name in ("m", "x")]
    assert workers == [["a", "a", "b", "b"], ["a", "a"]]
    assert len(fleet.targets("both", None)) == len(fleet.targets("both", "unknown")) == 4
    assert fleet.targets("prefill", "m") == []
    assert len(fleet.targets("both", "m", [fleet.members["a"]])) == 2
    assert fleet.targets("both", "x", [fleet.members["a"]]) == []


def test_models_are_merged():
    fakes = [FakeWorker(announced(names=["m", "x"])), FakeWorker(announced(names=["m", "y"]))]
    with Running(fakes[0].app()) as first, Running(fakes[1].app()) as second:
        urls = first.url, second.url
        with RunningRouter(*urls) as router:
            router.await_states("up", "up")
            cards = router.get("/v1/models").json()
            assert [card["id"] for card in cards["data"]] == ["m", "x", "y"]
            assert router.post({**ASK, "model": "y"}).status_code == 200
            assert (len(fakes[0].seen), len(fakes[1].seen)) == (0, 1)
            tokens = router.post({"prompt": "ab"}, "/tokenize").json()["tokens"]
            assert tokens == [97, 98]


def test_bad_urls():
    with pytest.raises(ValueError, match="none twice"):
        Fleet(["a", "a"])
    with pytest.raises(ValueError, match="at least one worker"):
        Fleet([])
