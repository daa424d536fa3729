"""Whole steps of the model at its real width, with random weights.

All layers run as the engine's own programs. A device that cannot hold the model holds some sets of
weights (``--weight-sets``) that the layers take in turn, and Engram tables of fewer rows; the
output says so. Cases that a ``--json`` file already holds are not measured again.

python -m serving.bench forward --preset flash --batch 1,8,32,128 --context 8192,131072
python -m serving.bench forward --phase prefill --rows 1024,8192,32768 --json results.json
python -m serving.bench forward --phase verify,draft --routing balanced,zipf --no-layer-times
python -m serving.bench forward --layout tp8,dep8 --phase verify --json layouts.json
python -m serving.bench forward --case mix=2048,32*1@8192 --routing zipf
python -m serving.bench forward --batch 1,32 --context 8192 --no-layer-times --profile kernels.json

XLA's own switches come from the environment, for instance graphs whose branches run at once:

XLA_FLAGS=--xla_gpu_command_buffer_scheduling_mode=CONCURRENT python -m serving.bench forward ...
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import jax

from dsv41_jax.command import output_file, progress_line
from dsv41_jax.config import PRESETS, Config
from dsv41_jax.errors import UserError
from pallas_kernels.dispatch import KINDS
from pallas_kernels.numerics import MODES, Numerics
from serving.bench.forward_cases import (
    PHASES,
    Case,
    cache_shape,
    configurations,
    parse_case,
    phase_cases,
)
from serving.bench.forward_floor import Floors
from serving.bench.forward_layout import LayoutBench, check_sums, layout_lines
from serving.bench.forward_measure import Bench
from serving.bench.forward_model import measured_model
from serving.bench.forward_profile import profile_lines
from serving.bench.forward_report import (
    Row,
    case_line,
    plot,
    read_rows,
    row_of,
    tables,
    write_rows,
)
from serving.bench.forward_routing import ROUTINGS, new_tables
from serving.bench.forward_weights import WeightSets, nbytes, random_sets, weight_sets
from serving.speculative import Speculation
from sharding.all_reduce import HELP as ALL_REDUCE_HELP
from sharding.all_reduce import KINDS as ALL_REDUCES
from sharding.all_reduce import peer_kernels
from sharding.hardware import MACHINES, hardware
from sharding.layouts import layout
from sharding.place import REPLICATED, Placement, place
from sharding.plot import plotting

# JAX leaves a quarter of a GPU to others by default; here the weights need it.
_MEMORY_FRACTION = "0.95"
WHOLE = 8  # devices that hold the released model
ALL_ROWS = 10**9
_WAVE = 8  # executables; those of a prompt in all its configurations are five


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "forward",
        help="whole steps at real width, random weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="flash")
    parser.add_argument("--layers", default="all", metavar="all|N,N", help="default: all")
    parser.add_argument(
        "--weight-sets", type=int, metavar="N",
        help="resident, for layers (12; with 8 devices and more: all)",
    )  # fmt: skip
    parser.add_argument(
        "--engram-rows", type=int, metavar="N",
        help="of a table (4000000; with 8 devices and more: all)",
    )  # fmt: skip
    parser.add_argument("--phase", default="decode", help=f"of {', '.join(PHASES)} (decode)")
    parser.add_argument("--batch", default="1,8,32,128", metavar="N,N", help="requests a data rank")
    parser.add_argument("--context", default="8192,131072", metavar="N,N", help="their tokens")
    parser.add_argument(
        "--rows", default="1024,8192,32768", metavar="N,N", help="prompt tokens of prefill"
    )
    parser.add_argument("--chunk", type=int, default=8192, help="rows a prompt's dispatch (8192)")
    parser.add_argument("--replay", choices=("on", "off"), help="of prompts; default: both")
    parser.add_argument(
        "--routing", default="random", metavar="A,B", help=f"of {', '.join(ROUTINGS)} (random)"
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="NAME=[N*]Q[@K][c][:D],...",
        help="instead of --phase: N requests of Q tokens that reach position K, chunked, D drafts",
    )  # fmt: skip
    parser.add_argument("--layout", default="tp1", metavar="A,B", help="tp1 (default), tp8, dep8")
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default="auto", help=ALL_REDUCE_HELP)
    parser.add_argument("--numerics", choices=("serving", "reference"), default="serving")
    parser.add_argument("--kernels", choices=KINDS, default="auto")
    parser.add_argument("--hardware", choices=MACHINES, default="h200", help="of the floors (h200)")
    parser.add_argument(
        "--layer-times", action=argparse.BooleanOptionalAction, default=True,
        help="also time single layers",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="programs compiled at a time"
    )
    parser.add_argument("--json", metavar="FILE", help="the same numbers; read first if it exists")
    parser.add_argument("--plot", metavar="FILE.png", help="times beside their floors")
    parser.add_argument(
        "--profile", metavar="FILE", help="also trace each case: kernels by name, layers by kind"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Medians over repeats; every figure with its floor."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _MEMORY_FRACTION)
    plan = read_plan(arguments)
    with ExitStack() as files:
        picture = None
        if arguments.plot:
            plotting(arguments.plot)
            picture = files.enter_context(output_file(arguments.plot))
        rows = plan.measured()
        device = jax.devices()[0].device_kind
        if picture:
            plot(rows, f"{device}, {arguments.routing} routing", picture)
        print("\n".join([f"{device}, jax {jax.__version__}", *plan.notes, ""]))
        shown = [*tables(rows, hardware(arguments.hardware).label), *layout_lines(rows)]
        shown += profile_lines(plan.profiles)
        print("\n".join(shown))


@dataclass
class Plan:
    """What to measure. notes: what a reader of the figures has to know. profiles: of the cases,
    if a file for them is given.
    """

    cfg: Config
    cases: list[Case]
    placements: list[Placement]
    weight_sets: int
    numerics: Numerics
    kernels: str
    all_reduce: str
    routings: list[str]
    machine: str
    chunk: int
    jobs: int
    layer_times: bool
    json: str | None
    profile: str | None
    notes: list[str]
    profiles: list[Row] = field(default_factory=list)

    def measured(self) -> list[Row]:
        """Rows of all cases, those of an earlier run first."""
        rows = read_rows(self.json)
        for placement in self.placements:
            if left := [case for case in self.cases if self._left(rows, placement, case)]:
                self._measure(placement, left, rows)
        return rows

    def _left(self, rows: list[Row], placement: Placement, case: Case) -> list[str]:
        """The routings for which no row has this case."""
        name = placement.division.layout.name
        done = [row["routing"] for row in rows if (row["layout"], row["case"]) == (name, case.key)]
        return [routing for routing in self.routings if routing not in done]

    def _measure(self, placement: Placement, cases: list[Case], rows: list[Row]) -> None:
        count, draft = min(self.weight_sets, self.cfg.num_hidden_layers), _drafts(cases)
        began = time.perf_counter()
        sets = weight_sets(self.cfg, self.numerics, placement, count, self.kernels, draft=draft)
        weights = jax.block_until_ready(random_sets(sets, self.kernels))
        load_s = time.perf_counter() - began
        self._note_weights(sets, nbytes(weights), load_s)
        runs = []
        for routing in self.routings:
            tables = new_tables(self.cfg, routing, count, draft=draft)
            params = {"weights": weights, "routing": placement.put(tables, REPLICATED)}
            runs.append((params, Floors(sets, hardware(self.machine), routing)))
        bench_of = LayoutBench(sets, self.kernels, self.all_reduce)
        # A layer by itself has no memory for peer-to-peer sums.
        single = self.layer_times and not bench_of.peers
        if single != self.layer_times:
            self.notes.append(f"{bench_of.name}: no single layers beside peer-to-peer sums")
        for drafting in (False, True):
            ours = [case for case in cases if _drafts([case]) is drafting]
            if not ours:
                continue
            speculation = Speculation() if drafting else None
            programs = bench_of.programs(cache_shape(ours), tables, speculation)
            (params, floors), traces = runs[0], self.profile is not None
            bench = Bench(programs, params, floors, self.chunk, single, traces)
            for wave in _waves(bench, ours):
                began = time.perf_counter()
                bench.compile(wave, self.jobs)
                times = {"load_s": load_s, "compile_s": time.perf_counter() - began}
                for run in runs:
                    bench.route(*run)
                    self._run(bench, bench_of, wave, rows, times)

    def _run(
        self,
        bench: Bench,
        bench_of: LayoutBench,
        cases: list[Case],
        rows: list[Row],
        times: dict[str, float],
    ) -> None:
        """Adds the rows of cases that are compiled, and writes all rows after each."""
        routing = bench.floors.routing
        for case in cases:
            if routing not in self._left(rows, bench_of.sets.placement, case):
                continue
            rows.append(self._row(bench, bench_of, case, times))
            progress_line(f"{routing} routing, {case_line(rows[-1])}")
            write_rows(self.json, rows, self.notes)
            self._add_profile(bench, case, rows[-1])

    def _row(self, bench: Bench, bench_of: LayoutBench, case: Case, times: dict[str, float]) -> Row:
        row = row_of(bench.run(case), bench_of.name, bench.floors.routing)
        check_sums(bench.compiled)
        row |= {key: round(seconds, 1) for key, seconds in times.items()}
        row |= bench_of.columns(row, bench.dispatches(case)[0].bucket)
        return row | {"bytes_per_device": bench_of.memory(bench.programs)}

    def _add_profile(self, bench: Bench, case: Case, row: Row) -> None:
        if self.profile is None or not row["measured"]:
            return
        place = {name: row[name] for name in ("case", "layout", "routing")}
        for found in bench.profiled(case, row["us"]):
            self.profiles.append(place | found)
            write_rows(self.profile, self.profiles, self.notes)
        progress_line(f"{row['case']}: traced")

    def _note_weights(self, sets: WeightSets, held: int, seconds: float) -> None:
        layers, tables = self.cfg.num_hidden_layers, self.cfg.engram_num_embeddings
        shared = f"layer i uses set i mod {sets.count}" if sets.count < layers else "none shared"
        name = sets.placement.division.layout.name
        order = "packed for Hopper" if sets.packed else "in the released order"
        note = (
            f"{name}: {layers} layers, {sets.count} weight sets resident ({shared}),"
            f" {held / 1e9:.1f} GB on all devices, experts {order}; Engram tables of"
            f" {', '.join(map(str, tables)) or 'no'} rows; made in {seconds:.0f} s"
        )
        self.notes.append(note)
        progress_line(note)


def read_plan(arguments: argparse.Namespace) -> Plan:
    """The checked arguments; UserError for what is not allowed."""
    for option in ("weight_sets", "engram_rows", "chunk", "jobs"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: must be at least 1")
    names = _items("--layout", arguments.layout)
    whole = all(layout(name).devices >= WHOLE for name in names)
    engram_rows = arguments.engram_rows or (ALL_ROWS if whole else 4_000_000)
    cfg = measured_model(Config.preset(arguments.preset), arguments.layers, engram_rows)
    placements = [place(name, cfg) for name in names]
    numerics = MODES[arguments.numerics]
    routings = _items("--routing", arguments.routing)
    for routing in routings:
        if routing not in ROUTINGS:
            raise UserError(f"--routing {routing}: must be of {', '.join(ROUTINGS)}")
    for placement in placements:
        peer_kernels(arguments.all_reduce, placement, numerics, arguments.kernels)
    cases = _cases(cfg, arguments)
    for case in cases:
        for group in case.groups:
            if group.tokens > cfg.max_position_embeddings:
                limit = f"{cfg.max_position_embeddings} (max_position_embeddings)"
                raise UserError(f"{case.name}: {group.tokens} tokens must be at most {limit}")
    notes = [
        f"preset {arguments.preset}, layers {arguments.layers}, numerics {arguments.numerics},"
        f" kernels {arguments.kernels}, {arguments.routing} routing",
        "random weights, greedy sampling without logit rules, inputs on the device; medians, spread"
        " from the fastest to the slowest",
    ]
    return Plan(
        cfg=cfg,
        cases=cases,
        placements=placements,
        weight_sets=arguments.weight_sets or (cfg.num_hidden_layers if whole else 12),
        numerics=numerics,
        kernels=arguments.kernels,
        all_reduce=arguments.all_reduce,
        routings=routings,
        machine=arguments.hardware,
        chunk=arguments.chunk,
        jobs=arguments.jobs,
        layer_times=arguments.layer_times,
        json=arguments.json,
        profile=arguments.profile,
        notes=notes,
    )


def _cases(cfg: Config, arguments: argparse.Namespace) -> list[Case]:
    replay = {"on": [True], "off": [False], None: [False, True]}[arguments.replay]
    if arguments.case:
        found = [parse_case(text) for text in arguments.case]
        prompts = ("prefill", "mixed")
        return [
            each
            for case in found
            for each in (configurations(case, replay) if case.phase in prompts else [case])
        ]
    phases = _items("--phase", arguments.phase)
    for phase in phases:
        if phase not in PHASES:
            raise UserError(f"--phase {phase}: must be of {', '.join(PHASES)}")
    batches, contexts, rows = (
        [_number(f"--{name}", text) for text in _items(f"--{name}", getattr(arguments, name))]
        for name in ("batch", "context", "rows")
    )
    return list(phase_cases(cfg, phases, batches, contexts, rows, replay))


def _waves(bench: Bench, cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that are compiled together: each wave needs a few executables, so that there are
    results early and nothing compiles while something is timed.
    """
    wave: list[Case] = []
    for case in cases:
        if wave and len(bench.wanted([*wave, case])) > _WAVE:
            yield wave
            wave = []
        wave.append(case)
    yield wave


def _drafts(cases: list[Case]) -> bool:
    """Whether some of them need the draft stages."""
    return any(c.phase == "draft" or any(g.drafts for g in c.groups) for c in cases)


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UserError(f"{option} {text!r}: must be a list like a,b")
    return list(dict.fromkeys(items))


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise UserError(f"{option} {text!r}: must be a whole number from 1 to 999999999")
    return int(text)
