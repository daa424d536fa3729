"""What routers are told of a worker, and the data rank that they may ask for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from serving.kv_events.hashes import page_hashes
from serving.kv_events.subscriber import Subscriber
from serving.kv_events.wire import DEVICE, POOL
from serving.server.__main__ import main
from serving.server.limits import RANK_HEADER
from tests.serving.kv_events.support import Mirror
from tests.serving.kv_events.worker import publishing_server
from tests.serving.server.support import NAME, OPTIONS, Served, wait_for

LONG = {"model": NAME, "prompt": [3, 4, 5], "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture
def two_ranks(scripted) -> Served:
    return scripted(lambda request: [7] * request.max_new_tokens, step_s=0.01, ranks=2)


@pytest.fixture
def idle_ranks(two_ranks) -> Iterator[Served]:
    with two_ranks as served:
        yield served


def test_a_worker_says_what_it_is(scripted):
    options = replace(OPTIONS, fingerprint="f00d", api_key="secret")
    with scripted(options=options, ranks=2) as served:
        assert served.get("/worker").status_code == 401
        answer = served.get("/worker", headers={"Authorization": "Bearer secret"})
        assert answer.json() == {
            "model": NAME,
            "names": [NAME, "alias"],
            "fingerprint": "f00d",
            "page_size": 16,
            "data_ranks": 2,
            "role": "both",
            "slots": 4,
            "pages": 2048,
            "chunk": max(rows for _, rows in served.engine.options.prefill),
            "context": 8192,
            "kv_events": [],
            "kv_replay": [],
            "pool": None,
            "handoff": None,
        }


def test_a_request_goes_to_the_rank_that_it_names_and_waits_there(two_ranks):
    """Six on the second rank of four slots, beside one that may go anywhere."""
    with two_ranks as served, ThreadPoolExecutor(2) as threads:

        def now() -> list[tuple[int, int]]:
            """Running and waiting requests of each rank."""
            return served.on_engine(lambda e: [(len(r.running), len(r.waiting)) for r in e.ranks])

        answers = [threads.submit(send, served, {**LONG, "n": 6}, "1")]
        wait_for(lambda: now() == [(0, 0), (4, 2)])
        answers.append(threads.submit(send, served, LONG, None))
        wait_for(lambda: now() == [(1, 0), (4, 2)])
        assert send(served, {**LONG, "max_tokens": 2}, "0") == 200
        assert now() == [(1, 0), (4, 2)]
        served.on_engine(lambda engine: setattr(engine.executor, "fail", True))
        assert [answer.result(60) for answer in answers] == [500, 500]


def send(served: Served, body: dict, rank: str | None) -> int:
    headers = {} if rank is None else {RANK_HEADER: rank}
    return served.post("/v1/completions", body, headers=headers, timeout=60).status_code


@pytest.mark.parametrize("rank", ["2", "-1", "", "1.0", "one", "²", "9" * 300])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_rank_that_is_none_is_refused(idle_ranks, rank, path):
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "x"}
    headers = {RANK_HEADER.lower(): rank.encode()}
    answer = idle_ranks.post(f"/v1/{path}", {**body, "max_tokens": 2}, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == RANK_HEADER and "must be a data rank, 0 to 1" in error["message"]


def test_prompts_are_rendered_as_they_would_run(idle_ranks):
    """The ids that a request reports of its prompt, without running it."""
    messages = {"messages": [{"role": "user", "content": "Hello there"}], "stream": True}
    chat = idle_ranks.post("/v1/chat/completions/render", messages).json()
    tokens = idle_ranks.post("/tokenize", {"messages": messages["messages"]}).json()["tokens"]
    assert chat["token_ids"] == tokens and chat["model"] == NAME and chat["request_id"]
    for prompt in ("some text", [4, 5, 6], ["some", "texts"], [[4, 5], [6]]):
        texts = idle_ranks.post("/v1/completions/render", {"prompt": prompt}).json()
        body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
        ran = idle_ranks.post("/v1/completions", body).json()["choices"]
        assert [one["token_ids"] for one in texts] == [one["prompt_token_ids"] for one in ran]
    refused = idle_ranks.post("/v1/completions/render", {"prompt": []})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_routers_spell_out_is_taken_as_long_as_it_is_true(idle_ranks, path):
    true = {"skip_special_tokens": True, "return_hidden_states": False, "no_stop_trim": False}
    body = {"prompt": "x", "max_tokens": 1}
    if "chat" in path:
        true |= {"include_reasoning": True, "separate_reasoning": True, "stream_reasoning": True}
        true |= {"continue_final_message": False}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert idle_ranks.post(path, body | true).status_code == 200
    for name, value in true.items():
        answer = idle_ranks.post(path, body | {name: not value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.fixture
def publishing(tiny_dir) -> Iterator[Served]:
    """Two data ranks that publish; every answer is eight tokens, then the end."""
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    with publishing_server(tiny_dir, lambda request: [7] * 8, ranks=2) as served:
        yield served


def test_what_a_rank_has_cached_is_told_as_requests_come(publishing):
    """Prompt and answer, less the last token: its page is not complete."""
    said = publishing.get("/worker").json()
    mirrors = [Mirror(), Mirror()]
    subscribers = [
        Subscriber(events, replay, mirror.deliver, page_size=said["page_size"], rank=rank)
        for rank, (events, replay, mirror) in enumerate(
            zip(said["kv_events"], said["kv_replay"], mirrors, strict=True)
        )
    ]
    for subscriber in subscribers:
        subscriber.start()
    prompt = [9 + i % 50 for i in range(70)]
    tokens = [*prompt, *[7] * 8, 1]
    body = {"model": NAME, "prompt": prompt, "max_tokens": 20}
    held = {DEVICE: set(page_hashes(tokens, 16)), POOL: set()}
    nothing = {DEVICE: set(), POOL: set()}
    assert len(held[DEVICE]) == 4
    assert send(publishing, body, "1") == 200
    wait_for(lambda: [mirror.state for mirror in mirrors] == [nothing, held])
    assert send(publishing, body, "0") == 200
    wait_for(lambda: [mirror.state for mirror in mirrors] == [held, held])
    publishing.on_engine(lambda engine: engine.ranks[1].cache.clear())
    wait_for(lambda: [mirror.state for mirror in mirrors] == [held, nothing])
    for subscriber in subscribers:
        assert subscriber.progress.malformed == 0
        subscriber.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-events=nowhere"], "--kv-events 'nowhere': must be tcp://HOST:PORT"),
        (["--kv-events=tcp://h:1", "--no-prefix-cache"], "--kv-events: needs --prefix-cache"),
    ],
)
def test_events_that_cannot_be_published(tiny_dir, capsys, options, message):
    pytest.importorskip("zmq", reason="the extra [route] is not installed")
    assert main(["--checkpoint", str(tiny_dir), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
