"""One request on its way through one worker, and the answer on its way back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from starlette.types import Send

from serving.router.ask import Ask, Headers, passed
from serving.router.fleet import Member
from serving.router.metrics import Metrics
from serving.router.placer import Placer
from serving.router.policy import Placed
from serving.server.errors import ApiError
from serving.server.limits import RANK_HEADER

_EVENTS = "text/event-stream"
_DONE = b"data: [DONE]\n\n"
_ENDS = b"\n\n", b"\r\n\r\n"


class Broken(Exception):
    """The worker is gone, or was given up: there will be no answer, or no more of it."""


class Hop:
    """Has ``status`` and ``headers`` once it is open; ``whole`` is the body unless it is a stream
    of events, whose first bytes are there then. ``close`` it in any case.
    """

    def __init__(self, member: Member, placed: Placed, placer: Placer, metrics: Metrics):
        self.member, self.placed = member, placed
        self._placer, self._metrics = placer, metrics
        self.status, self.headers = 0, Headers()
        self.whole: bytes | None = None
        self._first = b""
        self._response: httpx.Response | None = None
        self._limit: asyncio.Timeout | None = None
        self._why = ""
        member.hops.add(self)
        metrics.sent(placed)

    def cut(self, why: str) -> None:
        """Give the worker up; from whatever task."""
        self._why = self._why or why
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def open(self, client: httpx.AsyncClient, ask: Ask, body: bytes) -> None:
        """Send the request and wait for its whole answer, or for the first bytes of a stream.
        Broken if there is none.
        """
        rank = str(self.placed.target.rank).encode()
        headers = [*ask.headers, (RANK_HEADER.encode(), rank)]
        url = self.member.url + ask.path
        request = httpx.Request(ask.method, url, headers=headers, content=body)
        async with self._unless_broken():
            response = self._response = await client.send(request, stream=True)
            self._chunks = response.aiter_raw()
            self.status, self.headers = response.status_code, passed(response.headers.raw)
            if response.headers.get("content-type", "").startswith(_EVENTS):
                self._first = await anext(self._chunks, b"")
            else:
                self.whole = b"".join([chunk async for chunk in self._chunks])
        self._placer.prefilled(self.placed)

    @property
    def error_code(self) -> Any:
        """What stands for ``code`` in an error's object, None if there is none."""
        try:
            return msgspec.json.decode(self.whole or b"")["error"]["code"]
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
            return None

    async def relay(self, send: Send) -> None:
        """The answer to the client. A stream that breaks off ends with an error event."""
        if self.whole is not None:
            length = (b"content-length", str(len(self.whole)).encode())
            await _start(send, self.status, [*self.headers, length])
            await _body(send, self.whole, last=True)
            return
        await _start(send, self.status, self.headers)
        events = _Events()
        try:
            async with self._unless_broken():
                chunk = self._first
                while chunk:
                    if whole := events.push(chunk):
                        self._placer.grown(self.placed, whole.count(b"data: "))
                        await _body(send, whole)
                    chunk = await anext(self._chunks, b"")
            rest = events.left
        except Broken as error:
            rest = b"" if events.done else _error_event(error)
            self._metrics.broken.labels(self.member.url).inc(not events.done)
            self.member.doubt()
        await _body(send, rest, last=True)

    async def close(self) -> None:
        """The worker need not go on, and the request is off the books."""
        self.member.hops.discard(self)
        self._placer.freed(self.placed)
        if self._response is not None:
            await self._response.aclose()

    @asynccontextmanager
    async def _unless_broken(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as self._limit:
                if self._why:
                    raise Broken(self._why)
                yield
        except httpx.HTTPError as error:
            raise Broken(f"{type(error).__name__} {error}".strip()) from None
        except TimeoutError:
            raise Broken(self._why) from None
        finally:
            self._limit = None


class _Events:
    """Cuts a stream of bytes behind whole events. left: bytes of one that is not whole. done: the
    last one was passed on.
    """

    def __init__(self) -> None:
        self.left = b""
        self.done = False

    def push(self, chunk: bytes) -> bytes:
        data = self.left + chunk
        ends = [data.rfind(mark) + len(mark) for mark in _ENDS if mark in data]
        end = max(ends, default=0)
        whole, self.left = data[:end], data[end:]
        self.done |= whole.endswith(_DONE)
        return whole


def _error_event(error: Broken) -> bytes:
    message = f"the worker broke off, the answer is not complete: {error}"
    return b"data: " + msgspec.json.encode(ApiError(503, message).body) + b"\n\n" + _DONE


async def _start(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _body(send: Send, data: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not last})
