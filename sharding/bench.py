"""Check and time collectives on the GPUs of this host: ``python -m sharding.bench all_reduce
[--devices N] [--part TEXT] [--json FILE] [--timeout SECONDS]``.

Every part runs in a process of its own, which is killed when it takes too long: the sum of 1, 8 and
64 rows, the same inside the pass over the streams that follows it and made of a gather, and a rank
that does not answer.
Exit status 1 if a bit was wrong or a part failed, 2 for bad arguments or too few Hopper GPUs.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from dsv41_jax.command import exit_status
from dsv41_jax.errors import UserError
from sharding.peer_parts import PARTS, run_part

_NO_DEVICES = 3  # exit status of a part
_TOLD = 4000  # characters of what a failed part said


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sharding.bench", description=__doc__)
    parser.add_argument("op", choices=["all_reduce"])
    parser.add_argument("--devices", type=int, default=2, help="ranks of the sum (default: 2)")
    parser.add_argument("--part", default="", help="only parts whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a part")
    parser.add_argument("--in-process", action="store_true", help="run the one part here")
    args = parser.parse_args(arguments)
    if args.devices < 2:
        parser.error(f"--devices {args.devices} must be at least 2")
    if args.timeout <= 0:
        parser.error(f"--timeout {args.timeout:g} must be positive")
    if args.in_process and args.part not in PARTS:
        parser.error(f"--part {args.part!r} must be one of {', '.join(PARTS)}")
    if not selected(args.part):
        parser.error(f"--part {args.part!r} must be part of one of {', '.join(PARTS)}")
    return args


def selected(text: str) -> list[str]:
    return [name for name in PARTS if text in name]


def gpus(count: int) -> list[Any]:
    """The first sm_90 GPUs of this process; UserError if there are too few."""
    found = [
        d
        for d in jax.local_devices()
        if d.platform == "gpu" and str(getattr(d, "compute_capability", "")) == "9.0"
    ]
    if len(found) < count:
        kind = jax.local_devices()[0].device_kind
        raise UserError(
            f"--devices {count}: needs {count} Hopper GPUs, {len(found)} of"
            f" {jax.local_device_count()} {kind} are"
        )
    return found[:count]


def _here(name: str, count: int) -> int:
    """A part in this process, its row as a line of JSON."""
    try:
        devices = gpus(count)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return _NO_DEVICES
    print(json.dumps(run_part(name, devices)), flush=True)
    return 0


def _part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a part that ran in a child; ``failure`` says why there are no figures."""
    command = [sys.executable, "-m", "sharding.bench", args.op, "--in-process"]
    command += ["--part", name, "--devices", str(args.devices)]
    row = {"op": args.op, "part": name, "devices": args.devices}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=args.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return row | {"failure": f"no end within {args.timeout:g} s"}
    if done.returncode == _NO_DEVICES:
        raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    if done.returncode:
        sys.stderr.write(done.stderr[-_TOLD:])
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return row | {"failure": f"status {done.returncode}: {last}"}
    return row | json.loads(done.stdout.splitlines()[-1])


def _line(row: dict[str, Any]) -> str:
    name = f"{row['part']:28}"
    if "failure" in row:
        return f"{name} FAILED: {row['failure']}"
    if "error" in row:
        return f"{name} {row['error']}"
    text = f"{name} {row['wrong']} wrong bits in {row['executions']} x {row['calls']} calls"
    figures = ", ".join(f"{key} {value:.2f}" for key, value in row["us"].items())
    verdict = "met" if row["cost_us"] <= row["goal_us"] else "MISSED"
    cost = f"costs {row['cost_us']:.2f} us a call (goal {row['goal_us']:g}: {verdict})"
    return f"{text}; {cost}; us a layer: {figures}"


def bench(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    rows: list[dict[str, Any]] = []
    for name in selected(args.part):
        rows.append(_part(name, args))
        say(_line(rows[-1]))
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(any("failure" in row or row.get("wrong") for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    if args.in_process:
        return _here(args.part, args.devices)
    status = 0

    def command() -> None:
        nonlocal status
        status = bench(args, lambda line: print(line, flush=True))

    return exit_status(command) or status


if __name__ == "__main__":
    sys.exit(main())
