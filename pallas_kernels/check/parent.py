"""Runs the cases of an op in child processes, so that a hang or a crash is one failed line."""

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pallas_kernels.check import Check

START_SECONDS = 120  # imports and the device
EXIT_SECONDS = 10


@dataclass(frozen=True)
class Outcome:
    op: str
    case: str
    check: str
    error: float
    bound: float
    ok: bool


class NoDevice(Exception):
    """The device has no such kernels."""


@contextmanager
def _child(command: list[str]) -> Iterator[subprocess.Popen]:
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        yield process
    finally:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may hold on to a hung kernel
            process.wait(EXIT_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def _messages(process: subprocess.Popen, timeout: float) -> Iterator[dict]:
    """What the child writes, until it ends or, as {"late": seconds}, takes longer for a case."""
    assert process.stdout is not None
    file, rest = process.stdout.fileno(), b""
    limit = max(timeout, START_SECONDS)
    deadline = time.monotonic() + limit
    while True:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([file], [], [], left)[0]:
            yield {"late": limit}
            return
        data = os.read(file, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "case" in message:
                limit = timeout
                deadline = time.monotonic() + limit
            yield message


def outcomes(
    op: str, cases: list[str], command: Callable[[int], list[str]], timeout: float
) -> Iterator[Outcome]:
    """Every check of the named cases. command(first): a child that runs the cases from there.

    A case that kills its child or takes longer than ``timeout`` seconds is one failed outcome; the
    next child begins behind it. ``NoDevice`` if the child finds none that fits.
    """
    first = 0
    while first < len(cases):
        number, failure = None, ""
        with _child(command(first)) as process:
            for message in _messages(process, timeout):
                if not message.get("fits", True):
                    raise NoDevice(message["device"])
                if "end" in message:
                    return
                if "late" in message:
                    failure = f"no end within {message['late']:g} s"
                number = message.get("case", number)
                if "check" in message and number is not None:
                    one = Check(**message["check"])
                    yield Outcome(op, cases[number], one.name, one.error, one.bound, one.ok)
            if not failure:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(EXIT_SECONDS)
                failure = f"died with exit status {process.returncode}"
        nan = float("nan")
        if number is None:
            yield Outcome(op, "start", failure, nan, nan, False)
            return
        yield Outcome(op, cases[number], failure, nan, nan, False)
        first = number + 1
