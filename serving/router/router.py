"""Sends requests to workers, to another one if the first does not take them, and answers back."""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import httpx
import msgspec
from starlette.types import Send

from serving.handoff.ticket import LOST
from serving.kv_events.wire import Cleared, Event
from serving.router.announcement import Role
from serving.router.ask import Ask
from serving.router.feed import Feed
from serving.router.fleet import Fleet, Member
from serving.router.health import Checks, Monitor
from serving.router.hop import Broken, Hop
from serving.router.metrics import Metrics
from serving.router.placer import Placer
from serving.router.policy import UNKNOWN, NoRank, Policy, Prompt
from serving.router.prompts import RemoteTexts, Texts, Unreadable, read_prompt
from serving.router.split import decode_body, handed_over, prefill_body
from serving.routing.score import Target
from serving.server.errors import ApiError

_log = logging.getLogger(__name__)
# Answers that another worker might not give. What is wrong with a request is not among them.
_ELSEWHERE = (429, 500, 502, 503, 504)
# Those of them that tell of the worker, not of the request.
_DOUBTFUL = (502, 503, 504)
_CONNECT_S = 5.0
# Below the time after which a worker closes a connection that nobody uses.
_KEEP_S = 2.0
# For answers that are no text.
_SHORT_S = 10.0


@dataclass(frozen=True)
class RouterOptions:
    """workers: their URLs. retries: other workers that a request is offered to before its first
    byte is there. sticky: a header; requests with one value of it stay on their rank.
    """

    workers: tuple[str, ...]
    retries: int = 2
    sticky: str | None = None
    checks: Checks = field(default_factory=Checks)


class Router:
    """Everything between an application and the workers; ``start`` and ``stop`` it."""

    def __init__(self, options: RouterOptions, policy: Policy, texts: Texts | None = None):
        """texts: None for those of the workers."""
        self.options = options
        self.fleet = Fleet(options.workers)
        self.metrics = Metrics(self.fleet)
        self._policy = policy
        self._placer = Placer(policy, sticky=options.sticky is not None)
        self._texts = texts or RemoteTexts(self._remote_ids)
        self._feed = Feed(self._events)
        self._closing: str | None = None
        self._turn = 0

    @property
    def waiting(self) -> int:
        """Requests that have no rank yet."""
        return self._policy.waiting

    async def start(self) -> None:
        """Begin to watch the workers; does not wait for any."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_S)
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        monitor = Monitor(self.fleet, self._client, self.options.checks, self._joined, self._leaves)
        self._watching = [asyncio.create_task(monitor.watch(member)) for member in self.fleet]

    async def stop(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for member in self.fleet:
            await self._feed.stop(member)
        await self._policy.close()
        await self._client.aclose()

    def fail_open(self, error: Exception) -> None:
        """Give up what is on its way, with a clear end."""
        self._closing = str(error)
        for member in self.fleet:
            for hop in list(member.hops):
                hop.cut(self._closing)

    async def route(self, ask: Ask, send: Send) -> None:
        """Answer a request for text. ApiError if no worker could take it."""
        prompt = await self._prompt(ask)
        if self.fleet.split:
            await self._in_two(ask, prompt, send)
        else:
            await self._relay(await self._obtain(ask, ask.body, prompt, "both"), send)

    async def pass_on(self, ask: Ask) -> httpx.Response:
        """The answer of any worker to a request that is none for text; ApiError 503 if there is
        none. Workers take turns.
        """
        members = self.fleet.open
        self._turn += 1
        for index in range(len(members)):
            member = members[(self._turn + index) % len(members)]
            try:
                return await self._ask(member, ask)
            except httpx.HTTPError:
                member.doubt()
            except TimeoutError:
                continue
        raise ApiError(503, "no worker can be reached")

    async def ask_all(self, ask: Ask) -> list[httpx.Response]:
        """The answers of all open workers that give one."""
        asked = [self._ask(member, ask) for member in self.fleet.open]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in found if isinstance(answer, httpx.Response)]

    async def _ask(self, member: Member, ask: Ask) -> httpx.Response:
        request = httpx.Request(
            ask.method, member.url + ask.path, headers=ask.headers, content=ask.body
        )
        async with asyncio.timeout(_SHORT_S):
            return await self._client.send(request)

    async def _prompt(self, ask: Ask) -> Prompt:
        pattern = self.fleet.pattern
        if pattern is None or not self._policy.looks:
            return UNKNOWN
        return await read_prompt(ask, self._texts, pattern.page_size)

    async def _remote_ids(self, ask: Ask, body: dict) -> list[int]:
        if ask.model is not None:
            body = {**body, "model": ask.model}
        try:
            answer = await self.pass_on(
                Ask("POST", "/tokenize", ask.headers, msgspec.json.encode(body))
            )
            return msgspec.json.decode(answer.content)["tokens"]
        except (ApiError, msgspec.MsgspecError, LookupError, TypeError) as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from None

    async def _in_two(self, ask: Ask, prompt: Prompt, send: Send) -> None:
        """The prompt on one worker, the answer on another; again if what was handed over is lost
        on the way.
        """
        for left in reversed(range(1 + self.options.retries)):
            first = await self._obtain(ask, prefill_body(ask), prompt, "prefill")
            await first.close()
            if first.status != 200:
                await first.relay(send)
                return
            if parameters := handed_over(first):
                second = await self._obtain(ask, decode_body(ask, parameters), prompt, "decode")
                if second.error_code != LOST or not left:
                    await self._relay(second, send)
                    return
                await second.close()
            self.metrics.lost.inc()
        raise ApiError(503, "what was computed of the prompt could not be handed over", code=LOST)

    async def _obtain(self, ask: Ask, body: bytes, prompt: Prompt, role: Role) -> Hop:
        """An open hop; the last refusal if every worker that was asked refuses. ApiError 503 if
        there is none, or none that answers.
        """
        tried: list[Member] = []
        refused: Hop | None = None
        for _ in range(1 + self.options.retries):
            hop = await self._next_hop(ask, prompt, role, tried)
            if hop is None:
                break
            if tried:
                self.metrics.retries.labels(hop.member.url).inc()
            tried.append(hop.member)
            try:
                await hop.open(self._client, ask, body)
            except Broken as error:
                hop.member.doubt()
                await self._failed(hop, "broken")
                _log.warning("worker %s: %s", hop.member.url, error)
                continue
            except BaseException:
                await hop.close()
                raise
            if hop.whole is None or hop.status not in _ELSEWHERE or hop.error_code == LOST:
                return hop
            if hop.status in _DOUBTFUL:
                hop.member.doubt()
            await self._failed(hop, str(hop.status))
            refused = hop
        if refused is not None:
            return refused
        raise ApiError(503, self._closing or _nobody(tried))

    async def _failed(self, hop: Hop, reason: str) -> None:
        self.metrics.failures.labels(hop.member.url, reason).inc()
        await hop.close()

    async def _next_hop(
        self, ask: Ask, prompt: Prompt, role: Role, tried: Collection[Member]
    ) -> Hop | None:
        """A hop to the best worker that was not tried; None if there is none."""
        session = ask.header(self.options.sticky) if self.options.sticky else None
        if session is not None:
            session = f"{role} {session}"

        def offer() -> list[Target]:
            return [] if self._closing else self.fleet.targets(role, ask.model, tried)

        tells = role != "both" or ask.fields.get("stream") is True
        try:
            placed = await self._placer.place(prompt, offer, session, tells=tells)
        except NoRank:
            return None
        if role == "decode":
            self._placer.prefilled(placed)
        member = self.fleet.members[placed.target.worker]
        return Hop(member, placed, self._placer, self.metrics)

    async def _relay(self, hop: Hop, send: Send) -> None:
        try:
            await hop.relay(send)
        finally:
            await hop.close()

    async def _joined(self, member: Member) -> None:
        said = member.said
        assert said is not None
        await self._policy.join(member.targets, said, pool_of(member))
        if self._policy.looks:
            self._feed.start(member)

    async def _leaves(self, member: Member) -> None:
        try:
            await self._feed.stop(member)
        finally:
            await self._policy.leave(member.targets)

    def _events(self, target: Target, events: list[Event]) -> None:
        self.metrics.events.labels(target.worker).inc(len(events))
        resets = sum(isinstance(event, Cleared) for event in events)
        self.metrics.cleared.labels(target.worker).inc(resets)
        self._placer.events(target, events)


def pool_of(member: Member) -> str | None:
    """A name for what a worker loads pages from, the same for all that load from it; shared memory
    is that of one host.
    """
    assert member.said is not None
    pool = member.said.pool
    if pool is None or not pool.startswith("shm"):
        return pool
    return f"{pool} of {httpx.URL(member.url).host}"


def _nobody(tried: list[Member]) -> str:
    if not tried:
        return "no worker takes requests"
    return f"no worker took the request, {len(tried)} were asked"
