"""Runs an application under uvicorn, with a drain when the process is told to end."""

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from dsv41_jax.command import progress_line
from dsv41_jax.errors import UserError
from serving.server.errors import ApiError

# For the last bytes of finished answers to leave, after the drain.
_LAST_BYTES_S = 5


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket on host and port that does not listen yet; UserError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise UserError(f"--host {host} --port {port}: {error}") from None
    return sock


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT it answers new requests with 503, finishes those on their way
    for up to ``drain_s`` seconds and ends; on the second one it ends at once.
    """

    def __init__(self, app: FastAPI, drain_s: float):
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_LAST_BYTES_S
        )
        super().__init__(config)
        self._gate, self._worker, self._drain_s = app.state.gate, app.state.worker, drain_s
        self._drain_task: asyncio.Task | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            progress_line(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Start to end; on the event loop."""
        self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        progress_line(f"shutting down: {self._gate.active} requests on their way")
        if not await self._gate.drained(self._drain_s):
            progress_line(f"{self._gate.active} requests did not end in {self._drain_s:g} s")
            self._worker.fail_open(ApiError(503, "the server is shutting down"))
        self.should_exit = True


def serve(app: FastAPI, sock: socket.socket, drain_s: float) -> None:
    """Serve until a signal ends it."""
    DrainingServer(app, drain_s).run(sockets=[sock])
