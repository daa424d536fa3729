"""The process that runs an op's cases: ``python -m pallas_kernels.check.child OP FIRST SEED CASE``.

It writes one JSON object a line: the device, then for each case its number and its checks, at last
an end. An exception ends it; the parent starts another behind the case that failed.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pallas_kernels.check import Check


def selected(op: str, text: str) -> list[Any]:
    """The cases of an op whose name contains ``text``."""
    cases = importlib.import_module(f"pallas_kernels.{op}.cases").CHECKED
    return [case for case in cases if text in str(case)]


def serve(
    cases: list[Any],
    first: int,
    checks: Callable[[Any], Iterable[Check]],
    send: Callable[[dict], None],
) -> None:
    for number in range(first, len(cases)):
        send({"case": number})
        made = 0
        for check in checks(cases[number]):
            send({"check": asdict(check)})
            made += 1
        if not made:
            raise ValueError(f"case {cases[number]} must make a check")
    send({"end": True})


def sender() -> Callable[[dict], None]:
    """Writes to what was the standard output; prints of compilers go to the standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    return send


def main(argv: list[str]) -> int:
    import jax

    from pallas_kernels.dispatch import on_hopper

    op, first, seed, text = argv
    send = sender()
    send({"device": jax.devices()[0].device_kind, "fits": on_hopper()})
    if not on_hopper():
        return 2
    checks = importlib.import_module(f"pallas_kernels.{op}.cases").checks
    serve(selected(op, text), int(first), lambda case: checks(case, int(seed)), send)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
