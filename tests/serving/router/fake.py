"""Workers that answer as a test says, in a thread or as a process of their own."""

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from serving.server.serve import bound_socket

PAGE = 4


def announced(**changes: Any) -> dict[str, Any]:
    """What a worker says of itself, with changes."""
    said = {
        "model": "m",
        "names": ["m"],
        "fingerprint": "f0",
        "page_size": PAGE,
        "data_ranks": 2,
        "role": "both",
        "slots": 4,
        "pages": 64,
        "chunk": 16,
        "context": 1024,
        "kv_events": [],
        "kv_replay": [],
        "pool": None,
    }
    return said | changes


def wait_for(done: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@dataclass
class Seen:
    """A request as it came to a worker."""

    headers: dict[str, str]
    body: bytes

    @property
    def rank(self) -> str | None:
        return self.headers.get("x-data-parallel-rank")

    @property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class FakeWorker:
    """Answers with ``events`` if a stream is asked for, else with ``whole``.

    status: of all answers to requests for text. error: the body of those over 200. breaks_after:
    events, then the connection is lost. go: nothing is answered before it is set. step: nothing
    behind the first event before it is set. step_s: between two events. gone: requests that were
    given up. key: without it nobody learns what the worker is.
    """

    said: dict[str, Any] = field(default_factory=announced)
    events: list[bytes] = field(default_factory=list)
    whole: bytes = b'{"choices": [{"text": "ab"}],  "odd": "\xc3\xa9"}'
    status: int = 200
    error: dict[str, Any] = field(default_factory=lambda: {"error": {"message": "no", "code": 1}})
    health: int = 200
    key: str | None = None
    step_s: float = 0.0
    breaks_after: int | None = None
    go: threading.Event = field(default_factory=threading.Event)
    step: threading.Event = field(default_factory=threading.Event)
    seen: list[Seen] = field(default_factory=list)
    running: int = 0
    gone: int = 0

    def __post_init__(self) -> None:
        self.go.set()
        self.step.set()
        if not self.events:
            pieces = [f'data: {{"choices": [{{"text": "{c}"}}]}}\n\n'.encode() for c in "abc"]
            self.events = [*pieces, b"data: [DONE]\n\n"]

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/worker", self._worker, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_api_route("/tokenize", self._tokenize, methods=["POST"], response_model=None)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.add_api_route(path, self._generate, methods=["POST"], response_model=None)
        return app

    def _health(self) -> JSONResponse:
        return JSONResponse({"status": "x"}, self.health)

    def _worker(self, request: Request) -> JSONResponse:
        given = request.headers.get("authorization")
        if self.key is not None and given != f"Bearer {self.key}":
            return JSONResponse({}, 401)
        return JSONResponse(self.said)

    def _models(self) -> JSONResponse:
        return JSONResponse({"data": [{"id": name} for name in self.said["names"]]})

    async def _tokenize(self, request: Request) -> JSONResponse:
        text = (await request.json()).get("prompt") or "chat"
        return JSONResponse({"tokens": list(text.encode())})

    async def _generate(self, request: Request) -> Response:
        body = await request.body()
        self.seen.append(Seen(dict(request.headers), body))
        self.running += 1
        try:
            while not self.go.is_set():
                if await request.is_disconnected():
                    self.gone += 1
                    return Response()
                await asyncio.sleep(0.005)
        finally:
            self.running -= 1
        if self.status != 200:
            return JSONResponse(self.error, self.status)
        if json.loads(body).get("stream"):
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        headers = {"X-Own": "kept"}
        return Response(self.answer(body), media_type="application/json", headers=headers)

    def answer(self, body: bytes) -> bytes:
        """The body of an answer that is no stream."""
        return self.whole

    async def _stream(self) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            for index, event in enumerate(self.events):
                if index == self.breaks_after:
                    yield event[: len(event) // 2]
                    raise ConnectionAbortedError("as the test wants it")
                yield event
                await asyncio.sleep(self.step_s)
                while not self.step.is_set():
                    await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.running -= 1


class Running:
    """An application in a thread of its own; ``url`` is its address, also again after a stop."""

    def __init__(self, app: FastAPI, port: int = 0):
        self._socket = bound_socket("127.0.0.1", port)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = self.made(app)
        arguments = ([self._socket],)
        self.thread = threading.Thread(target=self.server.run, args=arguments, daemon=True)

    def made(self, app: FastAPI) -> uvicorn.Server:
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        return uvicorn.Server(config)

    def __enter__(self):
        self.thread.start()
        wait_for(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()
        self._socket.close()


def main() -> None:
    """A worker that streams for ever, a piece every 20 ms, on the port that is given."""
    fake = FakeWorker(events=[b'data: {"choices": [{"text": "x"}]}\n\n'] * 10**6, step_s=0.02)
    running = Running(fake.app(), int(sys.argv[1]))
    print(running.url, flush=True)
    running.server.run([running._socket])


if __name__ == "__main__":
    main()
