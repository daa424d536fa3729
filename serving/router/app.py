"""The FastAPI application of a router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serving.router.ask import CHAT, COMPLETIONS, Ask, passed
from serving.router.fleet import Member
from serving.router.router import Router
from serving.server.disconnect import unless_gone
from serving.server.errors import ApiError
from serving.server.limits import Gate, GateMiddleware, ServerOptions, error_response, read_body

# The status that nobody reads: the client went first.
_GONE = 499


def create_app(router: Router, options: ServerOptions) -> FastAPI:
    """The application of a router that is not started. options: of the names nothing is used.
    Its state: ``gate`` for the drain, ``worker`` for what is given up then.
    """
    front = Front(router, options)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await router.start()
        yield
        await router.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gate, app.state.worker = front.gate, router
    app.add_middleware(GateMiddleware, gate=front.gate)
    for kind in (ApiError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    for path, handler, method in (
        (CHAT, front.generate, "POST"),
        (COMPLETIONS, front.generate, "POST"),
        ("/v1/models", front.models, "GET"),
        ("/v1/models/{name:path}", front.any_worker, "GET"),
        ("/tokenize", front.any_worker, "POST"),
        ("/detokenize", front.any_worker, "POST"),
        ("/health", front.health, "GET"),
        ("/metrics", front.metrics_page, "GET"),
        ("/admin/workers", front.workers, "GET"),
        ("/admin/drain", front.drain, "POST"),
        ("/admin/undrain", front.undrain, "POST"),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return app


async def _on_error(_request: Request, error: Exception) -> Response:
    """Every refusal and fault as OpenAI's error object."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    if not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    return error_response(error)


class Front:
    """The handlers and what they share."""

    def __init__(self, router: Router, options: ServerOptions):
        self.router, self.options = router, options
        self.gate = Gate(options.api_key)

    async def generate(self, request: Request) -> Response:
        return _Routed(self.router, await self._ask(request))

    async def any_worker(self, request: Request) -> Response:
        answer = await self.router.pass_on(await self._ask(request))
        return _copied(answer)

    async def models(self, request: Request) -> Response:
        """What each worker lists, a name once; if none lists any, what one of them says."""
        answers = await self.router.ask_all(await self._ask(request))
        if not answers:
            raise ApiError(503, "no worker can be reached")
        cards: dict[str, Any] = {}
        for answer in answers:
            if answer.status_code == 200:
                for card in msgspec.json.decode(answer.content)["data"]:
                    cards.setdefault(card["id"], card)
        if not cards:
            return _copied(answers[0])
        return JSONResponse({"object": "list", "data": list(cards.values())})

    async def health(self) -> Response:
        """200 while requests can be served, else 503 with the reason."""
        workers = {member.url: member.state for member in self.router.fleet}
        if self.gate.draining:
            return JSONResponse({"status": "draining", "workers": workers}, 503)
        if not self.router.fleet.ready:
            return JSONResponse({"status": "no workers", "workers": workers}, 503)
        return JSONResponse({"status": "ok", "workers": workers})

    async def metrics_page(self) -> Response:
        return Response(
            self.router.metrics.render(self.router.waiting), media_type=CONTENT_TYPE_LATEST
        )

    async def workers(self) -> Response:
        return JSONResponse([_row(member) for member in self.router.fleet])

    async def drain(self, worker: str = "") -> Response:
        """It gets no more requests and finishes those that it has."""
        return self._set_draining(worker, True)

    async def undrain(self, worker: str = "") -> Response:
        return self._set_draining(worker, False)

    def _set_draining(self, worker: str, draining: bool) -> Response:
        member = self.router.fleet.members.get(worker.rstrip("/"))
        if member is None:
            known = ", ".join(self.router.fleet.members)
            raise ApiError(404, f"worker: {worker[:200]!r} must be one of {known}", "worker")
        member.draining = draining
        return JSONResponse(_row(member))

    async def _ask(self, request: Request) -> Ask:
        path = _passed_path(request.scope)
        body = await read_body(request, self.options)
        return Ask.parse(request.method, path, request.headers.raw, body)


class _Routed(Response):
    """Finds a worker and answers as it does; gives it up as soon as the client goes."""

    def __init__(self, router: Router, ask: Ask):
        super().__init__()
        self._router, self._ask = router, ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._router.route(self._ask, send))


def _passed_path(scope: Scope) -> str:
    """Path and query as they came. ApiError 404 for a path that would lead to another host or to
    what of a worker is not for clients, once it stands behind the worker's URL.
    """
    path, query = scope["raw_path"], scope["query_string"]
    if not path.startswith(b"/") or {b".", b".."} & set(unquote_to_bytes(path).split(b"/")):
        raise ApiError(404, "Not Found")
    return (path + b"?" * bool(query) + query).decode("latin-1")


def _copied(answer) -> Response:
    copy = Response(answer.content, answer.status_code)
    copy.raw_headers = [*passed(answer.headers.raw), *copy.raw_headers]
    return copy


def _row(member: Member) -> dict[str, Any]:
    said = member.said
    return {
        "worker": member.url,
        "state": member.state,
        "requests": len(member.hops),
        "model": said and said.model,
        "role": said and said.role,
        "data_ranks": said and said.data_ranks,
        "reason": member.refused,
    }
