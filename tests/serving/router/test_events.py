"""Requests follow the pages that workers tell of, whatever happens to router and workers."""

import contextlib
import importlib.util

import pytest

from serving.kv_events.wire import sequence_bytes
from serving.router.__main__ import make_policy
from serving.routing.score import Overlap
from tests.serving.router.caching import CachingWorker
from tests.serving.router.fake import PAGE, Running, wait_for
from tests.serving.router.support import RunningRouter

pytest.importorskip("zmq", reason="the extra [route] is not installed")
needs_dynamo = pytest.mark.skipif(
    importlib.util.find_spec("dynamo") is None, reason="ai-dynamo-runtime is not installed"
)
POLICIES = ["own", pytest.param("dynamo", marks=needs_dynamo)]


def prompt(number, pages=6):
    """One of many that have no page in common."""
    return [1000 * number + index for index in range(pages * PAGE + 1)]


class Workers:
    """Two workers of two ranks, their servers, and routers before them."""

    def __init__(self, stack: contextlib.ExitStack, policy: str, **changes):
        self.stack, self.policy = stack, policy
        self.fakes = [CachingWorker(**changes) for _ in range(2)]
        for fake in self.fakes:
            stack.callback(fake.close)
        self.urls = [stack.enter_context(Running(fake.app())).url for fake in self.fakes]

    def new_router(self) -> RunningRouter:
        return RunningRouter(*self.urls, policy=make_policy(self.policy, 0.75))

    def router(self) -> RunningRouter:
        return self.stack.enter_context(self.new_router())

    def hits(self) -> list[int]:
        return sorted(hit for fake in self.fakes for hit in fake.hits)

    def known(self, router: RunningRouter, tokens: list[int]) -> dict[tuple[int, int], Overlap]:
        """What the router thinks of the ranks that have anything of a prompt."""
        found = router.known(tokens).items()
        return {(self.urls.index(target.worker), target.rank): have for target, have in found}

    def await_known(self, router: RunningRouter, tokens: list[int], *where) -> None:
        """Wait until it knows that these ranks and no others have all of a prompt."""
        wait_for(
            lambda: (
                {rank: overlap.cached for rank, overlap in self.known(router, tokens).items()}
                == dict.fromkeys(where, len(tokens) - 1)
            )
        )


@pytest.fixture(params=POLICIES)
def workers(request):
    with contextlib.ExitStack() as stack:
        yield Workers(stack, request.param)


def test_second_turns_go_where_the_first_went(workers):
    router = workers.router()
    router.await_states("up", "up")
    prompts = [prompt(number) for number in range(4)]
    for tokens in prompts:
        assert router.post({"prompt": tokens}).status_code == 200
    assert workers.hits() == [0] * 4
    ranks = [
        (number, int(seen.rank))
        for tokens in prompts
        for number, fake in enumerate(workers.fakes)
        for seen in fake.seen
        if seen.fields["prompt"] == tokens
    ]
    for tokens, rank in zip(prompts, ranks, strict=True):
        workers.await_known(router, tokens, rank)
    for fake in workers.fakes:
        fake.hits.clear()
    for tokens in prompts:
        router.post({"prompt": [*tokens, *range(50, 60)]})
    assert workers.hits() == [6] * 4


def test_a_router_that_begins_anew_learns_everything(workers):
    ranks = [(number, rank) for number in (0, 1) for rank in (0, 1)]
    for index, (number, rank) in enumerate(ranks):
        workers.fakes[number].keep(prompt(index), rank)
    for _ in range(2):
        with workers.new_router() as router:
            for index, rank in enumerate(ranks):
                workers.await_known(router, prompt(index), rank)
            for index in range(4):
                router.post({"prompt": prompt(index)})
    assert workers.hits() == [6] * 8


def test_evicted_pages_are_forgotten(workers):
    router = workers.router()
    workers.fakes[0].keep(prompt(1), 1)
    workers.await_known(router, prompt(1), (0, 1))
    workers.fakes[0].drop(1)
    workers.await_known(router, prompt(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_in_a_pool_are_found_by_all(policy):
    """Also by a worker that joins later; not for longer than the one that has put them."""
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, policy, pool="mooncake")
        router = workers.router()
        workers.fakes[0].pool(prompt(1), 0)
        ranks = [(number, rank) for number in (0, 1) for rank in (0, 1)]
        everywhere = dict.fromkeys(ranks, Overlap(0, 6 * PAGE))
        wait_for(lambda: workers.known(router, prompt(1)) == everywhere)
        router.post({"prompt": prompt(1)})
        assert router.metric("pooled_tokens_total") == 6 * PAGE
        joined = router.router.fleet.members[workers.urls[1]].said
        workers.fakes[1].said["context"] += 1
        wait_for(lambda: router.router.fleet.members[workers.urls[1]].said not in (joined, None))
        for fake in workers.fakes:
            fake.drop(0)
            fake.drop(1)
        wait_for(lambda: workers.known(router, prompt(1)) == everywhere)
        workers.fakes[0].said["context"] += 1
        workers.fakes[0].publisher.close()
        wait_for(lambda: workers.known(router, prompt(1)) == {})


def test_malformed_events_have_no_effect(workers, caplog):
    router = workers.router()
    workers.fakes[0].keep(prompt(1), 0)
    workers.await_known(router, prompt(1), (0, 0))
    live, log = workers.fakes[0].publisher._live[0], workers.fakes[0].publisher._logs[0]
    with log._lock:
        live.send_multipart([b"", sequence_bytes(log.next), b"\xc1"])
        log._kept.append(b"\xc1")
        log.next += 1
    workers.fakes[0].keep(prompt(2), 0)
    for number in (1, 2):
        workers.await_known(router, prompt(number), (0, 0))
    assert caplog.text.count("such messages are ignored") == 1


def test_a_foreign_worker_has_no_effect(caplog):
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, "own")
        workers.fakes[1].said["fingerprint"] = "other"
        router = workers.router()
        wait_for(lambda: sorted(router.states().values()) == ["refused", "up"])
        for fake in workers.fakes:
            fake.keep(prompt(1), 0)
        states = [router.states()[url] for url in workers.urls]
        workers.await_known(router, prompt(1), (states.index("up"), 0))
        refused = workers.urls[states.index("refused")]
        assert router.metric("kv_events_total", worker=refused) == 0
        assert caplog.text.count("is refused: fingerprint") == 1
