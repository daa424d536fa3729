"""An engine in a process of its own, for measurements of several at once."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dsv41_jax.errors import UserError


@dataclass(frozen=True)
class Served:
    """What the process runs: an answer to each message. vocabulary: ids of the model."""

    vocabulary: int
    answer: Callable[[Any], Any]
    close: Callable[[], None]


class EngineProcess:
    """Messages go there one after the other. ``make`` is called there, with ``setting``; it must be
    a function of a module.
    """

    def __init__(self, make: Callable[[Any], Served], setting: Any):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, setting), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> int:
        """Wait until it has compiled: the size of its vocabulary. UserError if it cannot start."""
        return self._receive()

    def ask(self, message: Any) -> Any:
        """The answer to a message; UserError if that is one."""
        self._connection.send(message)
        return self._receive()

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise UserError("an engine has ended; what it wrote is above") from None
        if isinstance(answer, UserError):
            raise answer
        return answer


def _serve(connection: Connection, make: Callable[[Any], Served], setting: Any) -> None:
    """The process: messages in, answers out."""
    try:
        served = make(setting)
    except UserError as error:
        connection.send(error)
        return
    connection.send(served.vocabulary)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            served.close()
            return
        try:
            connection.send(served.answer(message))
        except UserError as error:
            connection.send(error)
