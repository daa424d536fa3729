"""What keeps a client from hurting the server: key, body size, queue length, and the drain."""

import asyncio
import hmac
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.server.errors import ApiError

OPEN_PATHS = ("/health", "/metrics")
# Asks for a data rank of a worker.
RANK_HEADER = "X-data-parallel-rank"
# How much of a body over the limit is still read, so that the client sees the answer.
_DISCARDED = 64 * 2**20


@dataclass(frozen=True)
class ServerOptions:
    """names: model names that requests may give, the first is the one reported. max_queue: requests
    that may wait beside the running ones. body_timeout_s: for the whole body to arrive.
    fingerprint: of what engines must have in common to share pages.
    """

    names: tuple[str, ...]
    api_key: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0
    fingerprint: str = ""


class Gate:
    """Counts requests on their way; refuses new ones while the server drains or without the key."""

    def __init__(self, api_key: str | None):
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self.draining = False
        self.active = 0

    async def drained(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those on their way; False if some are left."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        return not self.active

    def check(self, scope: Scope) -> None:
        """ApiError 401 or 503 for a request that may not enter."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._key is not None and not hmac.compare_digest(given, self._key):
            raise ApiError(401, "the API key is missing or wrong", "Authorization")
        if self.draining:
            raise ApiError(503, "the server is shutting down")


class GateMiddleware:
    """The gate in front of every path but ``OPEN_PATHS``."""

    def __init__(self, app: ASGIApp, gate: Gate):
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            self.gate.check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        self.gate.active += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.gate.active -= 1


def error_response(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers)


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """The whole body; ApiError 413 if it is too large, 408 if it takes too long."""
    try:
        async with asyncio.timeout(options.body_timeout_s):
            return await _read(request, options.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive") from None


async def _read(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > _DISCARDED:
            break
        else:
            parts.clear()
    if size > limit:
        raise ApiError(413, f"the body must be at most {limit} bytes")
    return b"".join(parts)
