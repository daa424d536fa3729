"""Whole steps of the model at its real width, with random weights.

All layers run as the engine's own programs. A device that cannot hold the model holds some sets of
weights (``--weight-sets``) that the layers take in turn, and Engram tables of fewer rows; the
output says so. Cases that a ``--json`` file already holds are not measured again.

python -m serving.bench forward --preset flash --batch 1,8,32,128 --context 8192,131072
python -m serving.bench forward --phase prefill --rows 1024,8192,32768 --json results.json
python -m serving.bench forward --layout tp8,dep8 --phase verify --json layouts.json
python -m serving.bench forward --case mix=2048,32*1@8192 --routing zipf
"""

import argparse
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass

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
    parser.add_argument("--routing", choices=ROUTINGS, default="random")
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
            plot(rows, f"{device}, {plan.routing} routing", picture)
        print("\n".join([f"{device}, jax {jax.__version__}", *plan.notes, ""]))
        shown = [*tables(rows, hardware(arguments.hardware).label), *layout_lines(rows)]
        print("\n".join(shown))


@dataclass
class Plan:
    """What to measure. notes: what a reader of the figures has to know."""

    cfg: Config
    cases: list[Case]
    placements: list[Placement]
    weight_sets: int
    numerics: Numerics
    kernels: str
    all_reduce: str
    routing: str
    machine: str
    chunk: int
    jobs: int
    layer_times: bool
    json: str | None
    notes: list[str]

    def measured(self) -> list[Row]:
        """Rows of all cases, those of an earlier run first."""
        rows = read_rows(self.json)
        done = {(row["layout"], row["routing"], row["case"]) for row in rows}
        for placement in self.placements:
            name = placement.division.layout.name
            left = [c for c in self.cases if (name, self.routing, c.key) not in done]
            if left:
                self._measure(placement, left, rows)
        return rows

    def _measure(self, placement: Placement, cases: list[Case], rows: list[Row]) -> None:
        count, draft = min(self.weight_sets, self.cfg.num_hidden_layers), _drafts(cases)
        began = time.perf_counter()
        sets = weight_sets(self.cfg, self.numerics, placement, count, self.kernels, draft=draft)
        weights = jax.block_until_ready(random_sets(sets, self.kernels))
        load_s = time.perf_counter() - began
        self._note_weights(sets, nbytes(weights), load_s)
        tables = new_tables(self.cfg, self.routing, count, draft=draft)
        params = {"weights": weights, "routing": placement.put(tables, REPLICATED)}
        name = placement.division.layout.name
        bench_of = LayoutBench(sets, self.kernels, self.all_reduce)
        floors = Floors(sets, hardware(self.machine), self.routing)
        for drafting in (False, True):
            ours = [case for case in cases if _drafts([case]) is drafting]
            if not ours:
                continue
            speculation = Speculation() if drafting else None
            programs = bench_of.programs(cache_shape(ours), tables, speculation)
            # A layer by itself has no memory for peer-to-peer sums.
            single = self.layer_times and not bench_of.peers
            if single != self.layer_times:
                self.notes.append(f"{name}: no single layers beside peer-to-peer sums")
            bench = Bench(programs, params, floors, self.chunk, single)
            began = time.perf_counter()
            bench.compile(ours, self.jobs)
            times = {"load_s": load_s, "compile_s": time.perf_counter() - began}
            for case in ours:
                row = row_of(bench.run(case), name, self.routing)
                check_sums(bench.compiled)
                row |= {key: round(seconds, 1) for key, seconds in times.items()}
                row |= bench_of.columns(row, bench.dispatches(case)[0].bucket)
                rows.append(row | {"bytes_per_device": bench_of.memory(programs)})
                progress_line(case_line(rows[-1]))
                write_rows(self.json, rows, self.notes)

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
        routing=arguments.routing,
        machine=arguments.hardware,
        chunk=arguments.chunk,
        jobs=arguments.jobs,
        layer_times=arguments.layer_times,
        json=arguments.json,
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
