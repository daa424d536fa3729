"""The parts of ``sharding.bench all_reduce``."""

from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.all_reduce.cases import CASES, Case
from sharding.gather_bench import gathers
from sharding.peer_bench import Bench, norms, silent, sums

SILENT = "silent rank"
PARTS = (*map(str, CASES), SILENT)


def run_part(name: str, devices: Sequence[Any]) -> dict[str, Any]:
    """The row of one of ``PARTS``."""
    shown = {"device": devices[0].device_kind, "jax": jax.__version__}
    if name == SILENT:
        return silent(Bench(tuple(devices), Case(8), timeout_s=1.0)) | shown
    case = next(case for case in CASES if str(case) == name)
    bench = Bench(tuple(devices), case)
    part = {"sum": sums, "norm": norms, "gather": gathers}[case.part]
    return part(bench) | shown
