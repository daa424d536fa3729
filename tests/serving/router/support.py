"""Routers in threads."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from serving.kv_events.hashes import page_hashes
from serving.router.announcement import Announcement
from serving.router.app import create_app
from serving.router.dynamo_policy import DynamoPolicy
from serving.router.health import Checks
from serving.router.policy import OwnPolicy, Policy
from serving.router.router import Router, RouterOptions
from serving.routing.score import NOTHING, Overlap, Target, Weights
from serving.server.limits import ServerOptions
from serving.server.serve import DrainingServer
from tests.serving.router.fake import Running, wait_for

CHECKS = Checks(period_s=0.1, timeout_s=20.0, failures=2)
LIMITS = ServerOptions(names=(), max_body_bytes=100_000)
# One for all: each would read the certificates anew.
CLIENT = httpx.Client(
    verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
)


class RunningRouter(Running):
    """A router in a thread."""

    def __init__(
        self,
        *urls: str,
        policy: Policy | None = None,
        limits: ServerOptions = LIMITS,
        texts: Any = None,
        drain_s: float = 20.0,
        **options: Any,
    ):
        chosen = RouterOptions(urls, **{"checks": CHECKS, **options})
        self.router = Router(chosen, policy or OwnPolicy(Weights()), texts)
        self.drain_s = drain_s
        super().__init__(create_app(self.router, limits))

    def made(self, app: FastAPI) -> uvicorn.Server:
        self.app = app
        return DrainingServer(app, self.drain_s)

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return CLIENT.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return CLIENT.get(self.url + path, **options)

    def states(self) -> dict[str, str]:
        return self.get("/health").json()["workers"]

    def await_states(self, *states: str) -> None:
        """Of the workers, in their order."""
        wait_for(lambda: list(self.states().values()) == list(states))

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """The function's result, run where the router runs."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.server._loop).result(60)

    def known(self, tokens: list[int]) -> dict[Target, Overlap]:
        """What it thinks of the ranks that have anything of a prompt."""
        policy, pattern = self.router._policy, self.router.fleet.pattern
        if pattern is None:
            return {}
        find = _dynamo_knows if isinstance(policy, DynamoPolicy) else _own_knows
        call = find(policy, tokens, pattern)
        found = asyncio.run_coroutine_threadsafe(call, self.server._loop).result(60)
        return {target: overlap for target, overlap in found.items() if overlap != NOTHING}

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over the labels that are not given."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            full, _, value = line.rpartition(" ")
            own, _, rest = full.partition("{")
            wanted = all(f'{label}="{text}"' in rest for label, text in labels.items())
            if own == f"dsv41_router_{name}" and wanted:
                total += float(value)
        return total


async def _own_knows(policy: Any, tokens: list[int], said: Announcement) -> dict[Target, Overlap]:
    hashes = page_hashes(tokens, said.page_size)
    return policy.pages.overlaps(hashes, said.page_size, policy.board.loads)


async def _dynamo_knows(
    policy: Any, tokens: list[int], said: Announcement
) -> dict[Target, Overlap]:
    try:
        asked = {"model_name": said.model, "token_ids": tokens}
        found = await policy._service.overlap_scores(asked)
    except policy._failure:  # nobody has joined
        return {}
    return {
        policy._targets[each["worker_id"]]: Overlap(
            each["device_blocks"] * said.page_size, each["host_pinned_blocks"] * said.page_size
        )
        for each in found["workers"]
    }
