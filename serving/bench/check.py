"""A model of the real width through the kernels and through the reference path.

Both run the engine's own programs on the same random weights, inputs and filled caches: decoding,
verification, drafts, prompts through all layers at once, and through the encoder with a replay.
Compared are the inputs of the LM head, its logits and every row that either wrote to a cache; rows
reach the same random experts in both. Up to ``index_topk`` tokens every entry is selected; beyond
them a small difference of a score exchanges entries of weights that mean nothing, so the limits are
wider there. Exit status 1 if something is outside its limits.

python -m serving.bench check
"""

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dsv41_jax.cache import Cache, CacheShape
from dsv41_jax.command import progress_line
from dsv41_jax.compiling import COMPILER_OPTIONS
from dsv41_jax.config import PRESETS, Config
from dsv41_jax.errors import UserError
from dsv41_jax.ops import Ops
from pallas_kernels.dispatch import KINDS
from pallas_kernels.numerics import SERVING
from serving.bench.check_compare import Compared, Tolerance, compared, compared_caches
from serving.bench.check_programs import KeptPrograms
from serving.bench.forward_cache import filled_cache
from serving.bench.forward_cases import Case, Dispatch, cache_shape, dispatches, parse_case
from serving.bench.forward_inputs import lengths_of, program_inputs
from serving.bench.forward_launches import kernels as launched
from serving.bench.forward_model import kinds, measured_model
from serving.bench.forward_routing import new_tables
from serving.bench.forward_weights import random_sets, weight_sets
from serving.buckets import Bucket
from serving.speculative import Speculation
from sharding.build import build_ops
from sharding.place import REPLICATED, place

EACH_KIND = "0,1,2,3,20,21,24"  # layers of preset flash
CASES = (
    "decode=1*1@500",
    "decode=32*1@450",
    "verify=4*6@500:5",
    "draft=4*1@500",
    "prompt=2*150@500c",
    "long decode=8*1@20000",
)
NEAR = Tolerance(rel=0.08, cosine=0.997, stored_rel=0.15)
FAR = Tolerance(rel=0.5, cosine=0.9, stored_rel=0.5)
# XLA times alternatives of its own products by default, which takes longer than all else here.
OPTIONS = {**COMPILER_OPTIONS, "xla_gpu_autotune_level": 0}
CHUNK = 8192


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="kernels against the reference path at real width",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="flash")
    parser.add_argument(
        "--layers", default=EACH_KIND, metavar="all|N,N", help=f"of the preset ({EACH_KIND})"
    )
    parser.add_argument("--weight-sets", type=int, default=2, metavar="N", help="resident (2)")
    parser.add_argument(
        "--engram-rows", type=int, default=1_000_000, metavar="N", help="of a table (1000000)"
    )
    parser.add_argument(
        "--kernels", choices=KINDS, default="auto", help="what is compared with the reference"
    )
    parser.add_argument(
        "--case", action="append", metavar="NAME=[N*]Q[@K][c][:D],...",
        help=f"as of forward, NAME draft drafts; default: {' '.join(CASES)}",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="programs compiled at a time"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints a line a value; exit status 1 if one is outside its limits."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    for option in ("weight_sets", "engram_rows", "jobs"):
        if getattr(arguments, option) < 1:
            flag = option.replace("_", "-")
            raise UserError(f"--{flag} {getattr(arguments, option)}: must be at least 1")
    cfg = measured_model(Config.preset(arguments.preset), arguments.layers, arguments.engram_rows)
    check = Check(cfg, arguments.weight_sets, tuple(arguments.case or CASES), arguments.jobs)
    device = jax.devices()[0].device_kind
    print(
        f"{device}, jax {jax.__version__}, preset {arguments.preset}, layers {arguments.layers}"
        f" ({', '.join(kinds(cfg))}), {check.sets} weight sets, serving numerics,"
        f" kernels {arguments.kernels} against the reference"
    )
    failed = 0
    for case, values in check.compared(arguments.kernels):
        limit = check.limit(case)
        print(f"{case.key}: {limit}", flush=True)
        for value in values:
            ok = value.within(limit)
            failed += not ok
            print(f"  {'ok  ' if ok else 'FAIL'} {value}", flush=True)
    print(f"{failed} values are outside their limits")
    if failed:
        raise SystemExit(1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Result:
    """Of a case: what its dispatches kept, and the cache behind the last."""

    kept: list[dict[str, Array]]
    cache: Cache


@dataclass
class Side:
    """Programs of one kind of kernels, compiled in the background."""

    kernels: str
    programs: KeptPrograms
    params: Any
    pool: ThreadPoolExecutor
    compiled: dict[tuple, Future[Any]] = field(default_factory=dict)

    def compile(self, dispatches: list[Dispatch]) -> None:
        for dispatch in dispatches:
            key = dispatch.program, dispatch.bucket
            if key not in self.compiled:
                self.compiled[key] = self.pool.submit(self._compiled, *key)

    def _compiled(self, name: str, bucket: Bucket) -> Any:
        began = time.perf_counter()
        made = self.programs.traced(name, bucket).lower().compile(OPTIONS)
        shape = f"{name} {bucket.requests} x {bucket.rows}"
        progress_line(f"{self.kernels}: compiled {shape}: {time.perf_counter() - began:.1f} s")
        return made

    def executable(self, dispatch: Dispatch) -> Any:
        return self.compiled[dispatch.program, dispatch.bucket].result()

    def launched(self) -> dict[str, int]:
        return launched("".join(made.result().as_text() for made in self.compiled.values()))


class Check:
    """Cases through the programs of two kinds of kernels. UserError for cases that do not read."""

    def __init__(self, cfg: Config, sets: int, cases: tuple[str, ...], jobs: int):
        parsed = [parse_case(text) for text in cases]
        self.cases = [each for case in parsed for each in _configurations(case)]
        longest = max(group.tokens for case in self.cases for group in case.groups)
        if longest > cfg.max_position_embeddings:
            limit = f"{cfg.max_position_embeddings} (max_position_embeddings)"
            raise UserError(f"--case of {longest} tokens: must be at most {limit}")
        self.cfg, self.jobs, self.sets = cfg, jobs, min(sets, cfg.num_hidden_layers)
        self.placement = place("tp1", cfg)
        self.shape: CacheShape = cache_shape(self.cases)
        self.tables = new_tables(cfg, "random", self.sets, draft=True)
        self._fill: Any = None

    def limit(self, case: Case) -> Tolerance:
        tokens = max(group.tokens for group in case.groups)
        return NEAR if tokens <= self.cfg.index_topk else FAR

    def dispatches(self, case: Case) -> list[Dispatch]:
        return dispatches(self.cfg, case, CHUNK)

    def filled(self, case: Case) -> Cache:
        """The cache in front of a case's first dispatch."""
        return self._fill(jnp.asarray(lengths_of(self.shape.slots, self.dispatches(case))))

    def compared(self, kernels: str) -> Iterator[tuple[Case, Iterator[Compared]]]:
        """Case by case, as soon as its programs are compiled; both kinds of weights are held."""
        with ThreadPoolExecutor(self.jobs) as pool:
            reference, ours = sides = [
                self.side(build_ops("tp1", SERVING, kind), kind, pool)
                for kind in ("reference", kernels)
            ]
            for case in self.cases:
                for side in sides:
                    side.compile(self.dispatches(case))
            for case in self.cases:
                want = self.result(reference, case)
                yield case, self.values(case, self.result(ours, case), want)
            progress_line(f"{kernels}: Mosaic kernels {ours.launched() or 'none'}")

    def side(self, ops: Ops, kernels: str, pool: ThreadPoolExecutor) -> Side:
        """Weights as ``kernels`` reads them, and the programs of given operations."""
        began = time.perf_counter()
        sets = weight_sets(self.cfg, SERVING, self.placement, self.sets, kernels, draft=True)
        params = {
            "weights": jax.block_until_ready(random_sets(sets, kernels)),
            "routing": self.placement.put(self.tables, REPLICATED),
        }
        programs = KeptPrograms(sets, ops, self.shape, self.tables, Speculation())
        self._fill = self._fill or filled_cache(programs)
        progress_line(f"{kernels}: weights in {time.perf_counter() - began:.0f} s")
        return Side(kernels, programs, params, pool)

    def result(self, side: Side, case: Case) -> Result:
        cache, kept = self.filled(case), []
        for dispatch in self.dispatches(case):
            inputs = side.programs.put(program_inputs(self.cfg, dispatch, case.replay))
            cache, values = side.executable(dispatch)(side.params, cache, *inputs)
            kept.append(values)
        return jax.block_until_ready(Result(kept, cache))

    def values(self, case: Case, got: Result, want: Result) -> Iterator[Compared]:
        for dispatch, one, two in zip(self.dispatches(case), got.kept, want.kept, strict=True):
            for name in two:
                yield compared(f"{dispatch.program}, {name}", one[name], two[name])
        yield from compared_caches(self.filled(case), got.cache, want.cache)


def _configurations(case: Case) -> list[Case]:
    """Prompts run whole and with replay; decoding that is called so drafts."""
    if case.phase == "decode" and case.name == "draft":
        return [replace(case, phase="draft")]
    if case.phase != "prefill":
        return [case]
    return [replace(case, replay=on) for on in (False, True)]
