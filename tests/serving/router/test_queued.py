"""Requests that wait in the router until a rank is about to need them."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from serving.router.announcement import announcement
from serving.router.policy import NoRank, Prompt
from serving.router.queued import QueuedPolicy
from serving.routing.score import Target, Weights
from tests.serving.router.fake import FakeWorker, Running, announced, wait_for
from tests.serving.router.support import RunningRouter

SAID = announcement(json.dumps(announced(data_ranks=1)).encode(), "http://h")
A = Target("A", 0)
PROMPT = Prompt(list(range(40)))


@pytest.fixture
def queued():
    """``queued(test)``: runs it with a policy that has one rank, all of whose books are empty at
    the end.
    """

    def run(test):
        async def body():
            policy = QueuedPolicy(Weights())
            await policy.join([A], SAID, None)
            await test(policy)
            assert policy.waiting == len(policy.queue) == 0
            policy.board.check()
            assert all(load.requests == 0 for load in policy.board.loads.values())
            await policy.close()

        asyncio.run(body())

    return run


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def ask(policy, key, targets=None):
    offered = [A] if targets is None else targets
    return asyncio.ensure_future(policy.place(key, PROMPT, lambda: offered))


def test_some_wait_until_others_have_begun(queued):
    async def test(policy):
        asked = [ask(policy, key) for key in range(8)]
        await settle()
        assert asked[0].done() and asked[0].result().target == A
        assert 1 <= policy.waiting == sum(not task.done() for task in asked) < 8
        for key, task in enumerate(asked):
            await task
            policy.prefilled(key)
        assert policy.waiting == 0
        for key in range(8):
            policy.freed(key)

    queued(test)


def test_the_urgent_one_goes_first(queued):
    async def test(policy):
        asked = [ask(policy, key) for key in range(7)]
        urgent = replace(PROMPT, priority=-1)
        asked.append(asyncio.ensure_future(policy.place(7, urgent, lambda: [A])))
        await settle()
        waited = [key for key, task in enumerate(asked) if not task.done()]
        assert waited[-1] == 7 and len(waited) > 1
        for key in range(7):
            if asked[7].done():
                break
            await asked[key]
            policy.prefilled(key)
            await settle()
        assert any(not task.done() for task in asked[:7])
        await asked[7]
        for key, task in enumerate(asked):
            await task
            policy.prefilled(key)
        for key in range(8):
            policy.freed(key)

    queued(test)


def test_who_gives_up_waits_no_more(queued):
    async def test(policy):
        asked = [ask(policy, key) for key in range(8)]
        await settle()
        sent = [key for key, task in enumerate(asked) if task.done()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert policy.waiting == 0 and 1 <= len(sent) < 8
        for key in sent:
            policy.freed(key)

    queued(test)


def test_without_a_rank_nobody_waits(queued):
    async def test(policy):
        targets = [A]
        asked = [ask(policy, key, targets) for key in range(8)]
        await settle()
        sent = [key for key, task in enumerate(asked) if task.done()]
        targets.clear()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, NoRank) for each in found) == 8 - len(sent) > 0
        with pytest.raises(NoRank):
            await ask(policy, 9, [])
        await policy.leave([A])
        for key in sent:
            policy.freed(key)
        await policy.join([A], SAID, None)
        assert (await ask(policy, 10)).target == A
        policy.freed(10)

    queued(test)


def test_who_is_refused_is_sent_nowhere(queued):
    """Not even before it hears of it."""

    async def test(policy):
        targets = [A]
        asked = [ask(policy, key, targets) for key in range(8)]
        await settle()
        sent = [key for key, task in enumerate(asked) if task.done()]
        targets.clear()
        policy._refuses_at = 0.0
        policy.freed(sent[0])
        assert policy.waiting == len(policy.queue) == 0
        targets.append(A)
        for key in sent:
            policy.freed(key)
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(each, NoRank) for each in found) == 8 - len(sent) > 0

    queued(test)


def test_many_requests_through_a_router():
    """Nobody is lost or stays on the books, and one prompt at a time is sent to each rank."""
    fake, policy = FakeWorker(), QueuedPolicy(Weights())
    fake.go.clear()
    with Running(fake.app()) as worker, RunningRouter(worker.url, policy=policy) as router:
        router.await_states("up")
        body = {"prompt": [[1] * 30], "stream": True}
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(router.post, body) for _ in range(8)]
            wait_for(lambda: router.metric("waiting") == 8 - len(fake.seen) == 8 - fake.running)
            sent = len(fake.seen)
            assert 2 <= sent < 8
            fake.go.set()
            assert [answer.result().status_code for answer in answers] == [200] * 8
        assert router.metric("waiting") == router.metric("in_flight") == 0
        router.on_loop(policy.board.check)
