"""Time every launch that fits a matrix: ``python -m pallas_kernels.linear.sweep MATRIX...
[--rows 1,32] [--early]``; needs an sm_90 GPU.

Up to 32 rows: strips of weight rows a block, K splits, blocks that share x. With ``--early`` or up
to 128 rows: rows of x a block, tiles of weight rows a warp, K splits, units of weights in flight.
The fastest is printed as an entry ``linear_streamed`` or ``linear_few_rows`` of ``tuned/*.json``.
Many rows: groups of rows of x a tile and K splits. ``*`` marks what the op takes.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pallas_kernels.bench import compiled, seconds
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.linear import broad_shape, kernel_sm90, skinny_shape, stream_shape
from pallas_kernels.linear.broad_shape import Broad
from pallas_kernels.linear.cases import MATRICES, Case, chained, timed
from pallas_kernels.linear.skinny_shape import (
    ROWS,
    SMEM_BYTES,
    SPLITS,
    UNIT,
    Skinny,
)
from pallas_kernels.linear.stream_shape import Stream

DEPTHS = (4, 6, 8, 12, 16)
SETTINGS = {
    Stream: stream_shape.SETTINGS,
    Skinny: skinny_shape.SETTINGS,
    Broad: ("width", "splits"),
}


def launches(case: Case) -> list[Stream | Skinny | Broad]:
    """The op's own first."""
    if case.rows > ROWS:
        own = broad_shape.tuned(case.rows, case.k, case.outputs, False)
        others = broad_shape.launches(case.rows, case.k, case.outputs, False)
        return [own, *(s for s in others if s != own)]
    own = kernel_sm90.few(case.rows, case.k, case.outputs, early=case.early)
    if isinstance(own, Stream):
        others = stream_shape.launches(case.rows, case.k, case.outputs)
    else:
        others = _few(own)
    return [own, *(s for s in dict.fromkeys(others) if s != own)]


def _few(own: Skinny) -> Iterator[Skinny]:
    for tiles, splits, depth in product((1, 2), SPLITS, DEPTHS):
        units = -(-own.k // (UNIT * splits))
        fits = units * UNIT * own.tokens * 2 <= SMEM_BYTES and units <= 2 * skinny_shape.UNITS
        registers = 8 * tiles * min(depth, units) + tiles * own.tokens // 2
        if fits and registers <= 160 and (depth <= units or depth == DEPTHS[0]):
            yield replace(own, tiles=tiles, splits=splits, depth=depth)


def microseconds(case: Case, s: Stream | Skinny | Broad) -> float:
    make = kernel_sm90.broad_launcher if isinstance(s, Broad) else kernel_sm90.few_launcher
    problem = timed(case, chained(make(s, after=True)), 0)
    return 1e6 * seconds(problem, compiled(problem), budget_s=0.2)


def settings(s: Stream | Skinny | Broad) -> dict[str, int]:
    return {name: getattr(s, name) for name in SETTINGS[type(s)]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.linear.sweep", description=__doc__
    )
    parser.add_argument("matrices", nargs="+", choices=MATRICES, metavar="MATRIX")
    parser.add_argument("--rows", default="1,32", help="comma-separated")
    parser.add_argument("--early", action="store_true", help="weights before the kernel ahead ends")
    args = parser.parse_args(argv)
    if not on_hopper():
        parser.error("a sweep needs an sm_90 GPU")
    for name, rows in product(args.matrices, map(int, args.rows.split(","))):
        case = Case(name, rows, *MATRICES[name], early=args.early and rows <= ROWS)
        times = {}
        for s in launches(case):
            times[s] = us = microseconds(case, s)
            gbps, tflops = case.nbytes / us / 1e3, 2 * rows * case.n * case.k / us / 1e6
            print(
                f"{case!s:34} {us:9.2f} us {gbps:7.0f} GB/s {tflops:6.0f} TFLOP/s",
                *(f"{key}={value}" for key, value in settings(s).items()),
                "*" if len(times) == 1 else "",
                flush=True,
            )
        if rows <= ROWS:
            best = settings(min(times, key=lambda s: times[s]))
            print(json.dumps({"rows": rows, "k": case.k, "outputs": case.outputs, **best}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
