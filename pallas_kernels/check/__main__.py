"""Compare kernels with their references on a Hopper GPU: ``python -m pallas_kernels.check OP...
[--case TEXT] [--seed N] [--json FILE] [--timeout SECONDS]``.

Each op's cases run in a process of their own. One line a check: op, case, what was compared, error
and bound. Exit status 1 if any failed, 2 for bad arguments or without an sm_90 GPU.
"""

import argparse
import importlib
import importlib.util
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from pallas_kernels.check.child import selected
from pallas_kernels.check.parent import NoDevice, Outcome, outcomes


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.check", description=__doc__)
    parser.add_argument("ops", nargs="+", metavar="OP")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the checks to this file")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a case")
    args = parser.parse_args(argv)
    for op in args.ops:
        if importlib.util.find_spec(f"pallas_kernels.{op}") is None:
            parser.error(f"op {op!r} must be a folder of pallas_kernels")
        if importlib.util.find_spec(f"pallas_kernels.{op}.cases") is None or not hasattr(
            importlib.import_module(f"pallas_kernels.{op}.cases"), "checks"
        ):
            parser.error(f"op {op!r} has no kernel to check")
    if not any(selected(op, args.case) for op in args.ops):
        parser.error(f"--case {args.case!r} must be part of a case's name")
    if args.timeout <= 0:
        parser.error(f"--timeout {args.timeout:g} must be positive")
    if args.seed < 0:
        parser.error(f"--seed {args.seed} must not be negative")
    return args


def _line(one: Outcome) -> str:
    figures = f"{one.error:10.3g} {one.bound:10.3g}"
    return f"{one.op:16} {one.case:56} {one.check:52} {figures} {'ok' if one.ok else 'FAILED'}"


def _row(one: Outcome, seed: int) -> dict:
    """JSON has no NaN and no infinity: those are null."""
    row = asdict(one) | {"seed": seed}
    return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    rows, failed = [], 0
    for op in args.ops:
        names = [str(case) for case in selected(op, args.case)]

        def command(first: int, op: str = op) -> list[str]:
            module = "pallas_kernels.check.child"
            return [sys.executable, "-m", module, op, str(first), str(args.seed), args.case]

        try:
            for one in outcomes(op, names, command, args.timeout):
                print(_line(one), flush=True)
                failed += not one.ok
                rows.append(_row(one, args.seed))
                if args.json:
                    args.json.write_text(json.dumps({"checks": rows}, indent=1) + "\n")
        except NoDevice as device:
            print(f"error: the kernels need an sm_90 GPU, this is {device}", file=sys.stderr)
            return 2
    print(f"{len(rows)} checks, {failed} FAILED, seed {args.seed}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
