"""A model through the kernels and through the reference path.

Both run the engine's own programs on the same weights, inputs and filled caches: decoding,
verification, drafts, prompts through all layers at once, and through the encoder with a replay.
Compared are the inputs of the LM head, its logits and every row that either wrote to a cache. Exit
status 1 if something is outside its limits.

The model is one of real width and random weights, whose rows reach the same random experts in both.
Up to ``index_topk`` tokens every entry is selected; beyond them a small difference of a score
exchanges entries of weights that mean nothing, so the limits are wider there. Or, with
``--checkpoint``, it is a checkpoint as serving loads it; the kernels' run then follows what routers
and indexers of the reference chose, and the picks of its own are counted. ``--goldens`` also
compares that checkpoint's logits with what DeepSeek's reference computed: in reference numerics
within bounds, in serving numerics, which round less, for the eye.

Which operations ran a kernel is found in the compiled programs; for the others the reason is shown.
Without an sm_90 GPU none does: then the reference is compared with itself, and the output says so.

python -m serving.bench check
python -m serving.bench check --checkpoint tests/goldens/tiny_ckpt --goldens tests/goldens
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
from pallas_kernels.numerics import REFERENCE, SERVING
from serving.bench.check_compare import Value, compared, compared_caches, compared_picks
from serving.bench.check_goldens import GOLDEN, GoldenRun
from serving.bench.check_models import (
    RANDOM_CASES,
    CheckpointModels,
    Models,
    RandomModels,
    checked_cases,
)
from serving.bench.check_programs import Kept, Key
from serving.bench.check_report import Report
from serving.bench.forward_cache import filled_cache
from serving.bench.forward_cases import Case, Dispatch, cache_shape, dispatches, parse_case
from serving.bench.forward_inputs import lengths_of, program_inputs
from serving.bench.forward_launches import kernels as launched
from serving.bench.forward_model import kinds, measured_model
from serving.buckets import Bucket
from sharding.build import build_ops

EACH_KIND = "0,1,2,3,20,21,24"  # layers of preset flash
# XLA times alternatives of its own products by default, which takes longer than all else here.
OPTIONS = {**COMPILER_OPTIONS, "xla_gpu_autotune_level": 0}
CHUNK = 8192


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="kernels against the reference path, of a model of real width or of a checkpoint",
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
    parser.add_argument("--checkpoint", metavar="DIR", help="in the place of a preset's layers")
    parser.add_argument(
        "--goldens", metavar="DIR", help="with --checkpoint: e2e_quant.npz of it is there"
    )
    parser.add_argument(
        "--kernels", choices=KINDS, default="auto",
        help="what is compared with the reference; a checkpoint's are auto",
    )  # fmt: skip
    parser.add_argument(
        "--case", action="append", metavar="NAME=[N*]Q[@K][c][:D],...",
        help=f"as of forward, NAME draft drafts; default: {' '.join(RANDOM_CASES)}, and by a"
        " checkpoint's own sizes",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="programs compiled at a time"
    )
    parser.add_argument("--json", metavar="FILE", help="the same values, written after each case")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints a line a value; exit status 1 if one is outside its limits."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    for option in ("weight_sets", "engram_rows", "jobs"):
        if getattr(arguments, option) < 1:
            flag = option.replace("_", "-")
            raise UserError(f"--{flag} {getattr(arguments, option)}: must be at least 1")
    models, what = _models(arguments)
    cases, kernels = tuple(arguments.case or models.cases), arguments.kernels
    check = Check(models, cases, arguments.jobs)
    golden = _golden(arguments, models)
    device = jax.devices()[0].device_kind
    heading = f"{device}, jax {jax.__version__}, {what}, serving numerics, kernels {kernels}"
    report = Report(arguments.json, f"{heading} against the reference", kernels)
    for case, values, used in check.compared(kernels):
        report.case(case, check.models.limit(case), values)
        for (name, bucket), programs in used:
            report.program(name, bucket, programs.implementations(name, bucket))
    if golden is not None:
        _compare_goldens(golden, models, arguments, report)
    if report.finish():
        raise SystemExit(1)


def _golden(arguments: argparse.Namespace, models: Models) -> GoldenRun | None:
    return GoldenRun(arguments.goldens, models.cfg) if arguments.goldens is not None else None


def _compare_goldens(
    golden: GoldenRun, models: Models, arguments: argparse.Namespace, report: Report
) -> None:
    """The reference's own numerics under its bounds, and what serving's make of them."""
    assert isinstance(models, CheckpointModels)
    bounds = {"reference": GOLDEN, "serving": None}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for each in (CheckpointModels(arguments.checkpoint, REFERENCE), models):
            golden.compile(each, pool, OPTIONS)
        for numerics, bound in bounds.items():
            report.golden(numerics, golden.values(numerics), bound)


def _models(arguments: argparse.Namespace) -> tuple[Models, str]:
    """What is checked, and what it is called."""
    if arguments.checkpoint is None:
        if arguments.goldens is not None:
            raise UserError("--goldens: needs --checkpoint, whose goldens they are")
        preset = Config.preset(arguments.preset)
        cfg = measured_model(preset, arguments.layers, arguments.engram_rows)
        models = RandomModels(cfg, arguments.weight_sets)
        what = f"preset {arguments.preset}, layers {arguments.layers} ({', '.join(kinds(cfg))})"
        return models, f"{what}, {models.sets} weight sets"
    if arguments.kernels != "auto":
        raise UserError(f"--kernels {arguments.kernels}: must be auto with --checkpoint")
    models = CheckpointModels(arguments.checkpoint)
    what = f"checkpoint {arguments.checkpoint} ({', '.join(kinds(models.cfg))})"
    return models, what if models.drafts else f"{what}, without draft stages"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Result:
    """Of a case: what its dispatches kept and chose, and the cache behind the last."""

    kept: list[dict[str, Array]]
    choices: list[dict[str, list]]
    cache: Cache


@dataclass
class Side:
    """Programs of one kind of kernels, compiled in the background."""

    kernels: str
    programs: Kept
    params: Any
    pool: ThreadPoolExecutor
    compiled: dict[Key, Future[Any]] = field(default_factory=dict)

    def compile(self, dispatches: list[Dispatch]) -> None:
        for dispatch in dispatches:
            key = dispatch.program, dispatch.bucket
            if key not in self.compiled:
                self.compiled[key] = self.pool.submit(self._compiled, *key)

    def _compiled(self, name: str, bucket: Bucket) -> Any:
        began = time.perf_counter()
        made = self.programs.executable(name, bucket, OPTIONS)
        shape = f"{name} {bucket.requests} x {bucket.rows}"
        progress_line(f"{self.kernels}: compiled {shape}: {time.perf_counter() - began:.1f} s")
        return made

    def executable(self, dispatch: Dispatch) -> Any:
        return self.compiled[dispatch.program, dispatch.bucket].result()

    def launched(self) -> dict[str, int]:
        return launched("".join(made.result().as_text() for made in self.compiled.values()))


class Check:
    """Cases through the programs of two kinds of kernels. UserError for cases that do not read."""

    def __init__(self, models: Models, cases: tuple[str, ...], jobs: int):
        parsed = [parse_case(text) for text in cases]
        self.cases = [each for case in parsed for each in _configurations(case)]
        checked_cases(models, self.cases)
        self.models, self.cfg, self.jobs = models, models.cfg, jobs
        self.shape: CacheShape = cache_shape(self.cases)
        self._fill: Any = None

    def dispatches(self, case: Case) -> list[Dispatch]:
        return dispatches(self.cfg, case, CHUNK)

    def filled(self, case: Case) -> Cache:
        """The cache in front of a case's first dispatch."""
        return self._fill(jnp.asarray(lengths_of(self.shape.slots, self.dispatches(case))))

    def compared(
        self, kernels: str
    ) -> Iterator[tuple[Case, Iterator[Value], list[tuple[Key, Kept]]]]:
        """Case by case, as soon as its programs are compiled: values, and the programs that no case
        before it had. Both kinds of weights are held.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            reference = self.side(build_ops("tp1", SERVING, "reference"), "reference", pool)
            ops = build_ops("tp1", SERVING, kernels)
            ours = self.side(ops, kernels, pool, reference.programs)
            for case in self.cases:
                for side in (reference, ours):
                    side.compile(self.dispatches(case))
            shown: set[Key] = set()
            for case in self.cases:
                want = self.result(reference, case)
                keys = dict.fromkeys((d.program, d.bucket) for d in self.dispatches(case))
                used = [(key, ours.programs) for key in keys if key not in shown]
                shown.update(keys)
                yield case, self.values(case, self.result(ours, case, want), want), used
            progress_line(f"{kernels}: Mosaic kernels {ours.launched() or 'none'}")

    def side(
        self, ops: Ops, kernels: str, pool: ThreadPoolExecutor, leader: Kept | None = None
    ) -> Side:
        """Weights as ``kernels`` reads them, and the programs of given operations."""
        programs, params = self.models.programs(kernels, ops, self.shape, leader)
        self._fill = self._fill or filled_cache(programs)
        return Side(kernels, programs, params, pool)

    def result(self, side: Side, case: Case, followed: Result | None = None) -> Result:
        cache, kept, choices = self.filled(case), [], []
        for i, dispatch in enumerate(self.dispatches(case)):
            inputs = jax.device_put(program_inputs(self.cfg, dispatch, case.replay))
            # Programs without a leader have no choices to follow.
            given = followed.choices[i] if followed and side.programs.leader else None
            run = side.executable(dispatch)
            cache, values, made = run(side.params, cache, *inputs, given)
            kept.append(values)
            choices.append(made)
        return jax.block_until_ready(Result(kept, choices, cache))

    def values(self, case: Case, got: Result, want: Result) -> Iterator[Value]:
        for i, dispatch in enumerate(self.dispatches(case)):
            for name, value in want.kept[i].items():
                yield compared(f"{dispatch.program}, {name}", got.kept[i][name], value)
            for op, chosen in want.choices[i].items():
                yield compared_picks(f"{dispatch.program}, {op}", got.choices[i][op], chosen)
        yield from compared_caches(self.filled(case), got.cache, want.cache)


def _configurations(case: Case) -> list[Case]:
    """Prompts run whole and with replay; decoding that is called so drafts."""
    if case.phase == "decode" and case.name == "draft":
        return [replace(case, phase="draft")]
    if case.phase != "prefill":
        return [case]
    return [replace(case, replay=on) for on in (False, True)]
