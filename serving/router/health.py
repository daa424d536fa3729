"""Whether workers are there and belong to the fleet, checked again and again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from dsv41_jax.errors import UserError
from serving.router.announcement import Announcement, announcement
from serving.router.fleet import Fleet, Member

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checks:
    """period_s: between two of a worker. timeout_s: for an answer. failures: so many in a row
    without an answer, and a worker is given up with what it runs. api_key: of ``/worker``.
    """

    period_s: float = 2.0
    timeout_s: float = 5.0
    failures: int = 3
    api_key: str | None = None


class Monitor:
    """Keeps the state of every member; ``watch`` them in tasks of their own.

    A worker that says no is only left out. One that cannot be reached any more is given up with
    what it runs; it joins again with its next good answer.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: httpx.AsyncClient,
        checks: Checks,
        on_join: Callable[[Member], Awaitable[None]],
        on_leave: Callable[[Member], Awaitable[None]],
    ):
        """on_join: ``said`` is set, ``available`` not yet. on_leave: ``said`` is still set."""
        self._fleet, self._client, self._checks = fleet, client, checks
        self._on_join, self._on_leave = on_join, on_leave

    async def watch(self, member: Member) -> None:
        """Check a worker for ever, at once whenever it is woken."""
        while True:
            try:
                await self.check(member)
            except Exception:
                _log.exception("the check of worker %s failed", member.url)
            member.checks += 1
            try:
                await asyncio.wait_for(member.wake.wait(), self._checks.period_s)
            except TimeoutError:
                continue
            member.wake.clear()

    async def check(self, member: Member) -> None:
        """One check and what follows from it."""
        suspect = member.suspect
        try:
            async with asyncio.timeout(self._checks.timeout_s):
                health = await self._client.get(member.url + "/health")
                said = await self._client.get(member.url + "/worker", headers=self._headers())
        except (httpx.HTTPError, TimeoutError) as error:
            await self._silent(member, error)
            return
        member.failures = 0
        if health.status_code != 200:
            if member.available:
                _log.warning("worker %s takes no requests: %s", member.url, health.text[:200])
            member.available = False
            return
        if said.status_code != 200:
            await self._refuse(member, f"GET /worker was answered with {said.status_code}")
            return
        try:
            await self._accept(member, announcement(said.content, member.url), suspect)
        except UserError as error:
            await self._refuse(member, str(error))

    async def _silent(self, member: Member, error: Exception) -> None:
        member.failures += 1
        gone = member.suspect and isinstance(error, httpx.ConnectError)
        if gone or member.failures >= self._checks.failures:
            if member.said is not None:
                _log.warning("worker %s is down: %s %s", member.url, type(error).__name__, error)
            for hop in list(member.hops):
                hop.cut("it does not answer any more")
            await self._leave(member)

    async def _accept(self, member: Member, said: Announcement, suspect: bool) -> None:
        pattern = self._fleet.pattern
        if pattern is not None and (difference := said.difference(pattern)):
            await self._refuse(member, difference)
            return
        if member.said is not None and member.said != said:
            await self._leave(member)
        member.refused = None
        if member.said is None:
            member.said = said
            self._fleet.pattern = pattern or said
            try:
                await self._on_join(member)
            except BaseException:
                await self._leave(member)
                raise
            ranks = f"{said.data_ranks} data ranks, role {said.role}"
            _log.info("worker %s joins: %s, %s", member.url, said.model, ranks)
            if idle := self._fleet.idle:
                rest = ", ".join(idle)
                _log.warning("prompts and answers are computed apart: %s will get no request", rest)
        if suspect or not member.suspect:
            member.available, member.suspect = True, False

    async def _refuse(self, member: Member, why: str) -> None:
        """It is left out; said once, until the reason is another one."""
        await self._leave(member)
        if member.refused != why:
            _log.warning("worker %s is refused: %s", member.url, why)
        member.refused = why

    async def _leave(self, member: Member) -> None:
        member.available = member.suspect = False
        if member.said is not None:
            try:
                await self._on_leave(member)
            finally:
                member.said = None

    def _headers(self) -> dict[str, str]:
        key = self._checks.api_key
        return {} if key is None else {"Authorization": f"Bearer {key}"}
