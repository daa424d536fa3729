"""Time the ops: ``python -m pallas_kernels.bench OP... [--case TEXT] [--impl NAME] [--json FILE]
[--baseline] [--commit HASH] [--lock FILE]``.

An op registers by a module ``pallas_kernels.<op>.cases`` with ``CASES`` (objects whose ``str`` is
the case name) and ``problem(case, impl, seed) -> Problem | None``. Executions run back to back
inside one compiled program, as the layers of a model do; each depends on the one before it and
reads other inputs, so L2 does not flatter. Times are medians.
"""

import argparse
import fcntl
import importlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.dispatch import on_hopper
from pallas_kernels.numerics import SERVING

HBM_GBPS = 4300.0  # device-to-device copy, measured on an H200
BF16_TFLOPS = 790.0  # 8192^3 product, measured on an H200
BASELINES = Path(__file__).parent / "baselines"
IMPLS = ("pallas", "xla", "triton")  # the last for ops whose cases have ``TRITON``


@dataclass(frozen=True)
class Problem:
    """``call(i: int, carry, data) -> carry`` runs the op once; nbytes and flops are what one
    execution needs at least.
    """

    call: Callable[[Any, Any, Any], Any]
    carry: Any
    data: Any
    nbytes: float
    flops: float
    numerics: str = SERVING.name
    executions: int = 16  # in one program
    extra: dict[str, Any] = field(default_factory=dict)  # name -> function of microseconds


@dataclass(frozen=True)
class Row:
    op: str
    case: str
    impl: str
    numerics: str
    us: float
    gbps: float
    tflops: float
    roofline_pct: float
    seed: int
    device: str
    jax: str
    commit: str


def floor_seconds(problem: Problem) -> float:
    return max(problem.nbytes / HBM_GBPS / 1e9, problem.flops / BF16_TFLOPS / 1e12)


def rounds(problem: Problem) -> int:
    """How often a program runs its executions: handing it many arrays costs the host as long as
    dozens of small kernels take.
    """
    return min(8, math.ceil(5e-4 / problem.executions / floor_seconds(problem)))


def compiled(problem: Problem) -> Callable:
    """(carry, data) -> carry: all ``rounds`` of executions in one program, carry donated."""

    @partial(jax.jit, donate_argnums=0)
    def chain(carry: Any, data: Any) -> Any:
        def once(_: Any, carry: Any) -> Any:
            for i in range(problem.executions):
                carry = problem.call(i, carry, data)
            return carry

        return jax.lax.fori_loop(0, rounds(problem), once, carry)

    return chain.lower(problem.carry, problem.data).compile()


def seconds(problem: Problem, chain: Callable, repeats: int = 7, budget_s: float = 2.0) -> float:
    """Median seconds of one execution over ``repeats`` measurements, fewer (at least 3) past
    ``budget_s``.
    """
    carry = jax.tree.map(lambda a: a.copy(), problem.carry)
    for _ in range(3):
        start = time.perf_counter()
        carry = jax.block_until_ready(chain(carry, problem.data))
        once = time.perf_counter() - start
    runs = max(1, min(20, int(0.05 / once)))  # the first begins on an idle device
    times = []
    for _ in range(max(3, min(repeats, int(budget_s / once / runs)))):
        start = time.perf_counter()
        for _ in range(runs):
            carry = chain(carry, problem.data)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - start) / runs)
    return statistics.median(times) / problem.executions / rounds(problem)


def measure(
    op: str, case: Any, impl: str, seed: int, commit: str, alone: Callable
) -> tuple[Row, dict[str, float]] | None:
    module = importlib.import_module(f"pallas_kernels.{op}.cases")
    if impl == "triton" and not hasattr(module, "TRITON"):
        return None
    with alone():
        problem = module.problem(case, impl, seed)
    if problem is None:
        return None
    chain = compiled(problem)
    with alone():
        s = seconds(problem, chain)
    row = Row(
        op=op,
        case=str(case),
        impl=impl,
        numerics=problem.numerics,
        us=round(s * 1e6, 2),
        gbps=round(problem.nbytes / s / 1e9, 1),
        tflops=round(problem.flops / s / 1e12, 3),
        roofline_pct=round(100 * floor_seconds(problem) / s, 1),
        seed=seed,
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        commit=commit,
    )
    return row, {name: round(f(row.us), 1) for name, f in problem.extra.items()}


@contextmanager
def _holding(path: Path | None) -> Iterator[None]:
    """Hold the lock of a file, so that processes that compile side by side time one by one."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _head() -> str:
    """The commit of the working tree, or "unknown" in a copy that has no repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def run(
    ops: list[str], case: str, impls: list[str], seed: int, commit: str, alone: Callable
) -> Iterator[tuple[Row, dict[str, float]]]:
    for op in ops:
        module = importlib.import_module(f"pallas_kernels.{op}.cases")
        for one in module.CASES:
            if case not in str(one):
                continue
            for impl in impls:
                result = measure(op, one, impl, seed, commit, alone)
                if result is not None:
                    yield result


def has_triton() -> bool:
    return importlib.util.find_spec("jax_triton") is not None


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("ops", nargs="+", metavar="OP")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--impl", choices=IMPLS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="append the rows to the device's committed baselines",
    )
    parser.add_argument(
        "--lock",
        type=Path,
        help="hold this file's lock while the GPU works, but not while compiling (which may use it"
        " too, to choose kernels)",
    )
    parser.add_argument("--commit", help="of what is measured; default: the repository's head")
    args = parser.parse_args(argv)
    for op in args.ops:
        if importlib.util.find_spec(f"pallas_kernels.{op}") is None:
            parser.error(f"op {op!r} must be a folder of pallas_kernels")
        if importlib.util.find_spec(f"pallas_kernels.{op}.cases") is None or not hasattr(
            importlib.import_module(f"pallas_kernels.{op}.cases"), "problem"
        ):
            parser.error(f"op {op!r} has no cases to time")
    named, hopper, triton = args.impl or (), on_hopper(), has_triton()
    if not hopper and {"pallas", "triton"} & {*named}:
        parser.error(f"--impl {' '.join(named)} needs an sm_90 GPU")
    if "triton" in named and not triton:
        parser.error("--impl triton needs jax-triton, which the extra cuda13 installs")
    every = {"xla": True, "pallas": hopper, "triton": hopper and triton}
    args.impl = named or [impl for impl, runs in every.items() if runs]
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    commit, rows, reference = args.commit or _head(), [], {}
    print(
        f"{'op':12} {'case':34} {'impl':7} {'us':>10} {'GB/s':>8} {'TFLOP/s':>8}"
        f" {'roofline':>8} {'x xla':>7}"
    )
    alone = partial(_holding, args.lock)
    for row, extra in run(args.ops, args.case, args.impl, args.seed, commit, alone):
        if row.impl == "xla":
            reference[row.op, row.case] = row.us
        ratio = reference.get((row.op, row.case), float("nan")) / row.us
        print(
            f"{row.op:12} {row.case:34} {row.impl:7} {row.us:10.1f} {row.gbps:8.0f}"
            f" {row.tflops:8.1f} {row.roofline_pct:7.1f}% {ratio:7.2f}",
            *(f" {name} {value:.0f}" for name, value in extra.items()),
            flush=True,
        )
        rows.append({**asdict(row), **extra})
        if args.json:
            args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(f"device {jax.devices()[0].device_kind}, jax {jax.__version__}, seed {args.seed}")
    if args.baseline:
        name = "-".join(jax.devices()[0].device_kind.lower().split()) + ".jsonl"
        BASELINES.mkdir(exist_ok=True)
        with (BASELINES / name).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
