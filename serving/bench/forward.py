"""Whole steps of the model at its real width, with random weights.

All layers run as the engine's own programs. A device that cannot hold the model holds some sets of
weights (``--weight-sets``) that the layers take in turn, and Engram tables of fewer rows; the
output says so. Cases that a ``--json`` file already holds are not measured again.

python -m serving.bench forward --preset flash --batch 1,8,32,128 --context 8192,131072
python -m serving.bench forward --phase prefill --rows 1024,8192,32768 --json results.json
python -m serving.bench forward --phase verify,draft --routing balanced,zipf --no-layer-times
python -m serving.bench forward --layout tp8,dep8 --phase verify --json layouts.json
python -m serving.bench forward --case mix=2048,32*1@8192 --routing zipf
python -m serving.bench forward --engram hbm,host-ahead,host-late --batch 1,32 --context 8192
python -m serving.bench forward --batch 1,32 --context 8192 --no-layer-times --profile kernels.json

XLA's own switches come from the environment, for instance graphs whose branches run at once:

XLA_FLAGS=--xla_gpu_command_buffer_scheduling_mode=CONCURRENT python -m serving.bench forward ...
"""

import argparse
import os
from contextlib import ExitStack

import jax

from dsv41_jax.command import output_file
from dsv41_jax.config import PRESETS, Config
from dsv41_jax.errors import UserError
from pallas_kernels.dispatch import KINDS
from pallas_kernels.numerics import MODES
from serving.bench.forward_cases import (
    PHASES,
    Case,
    configurations,
    parse_case,
    phase_cases,
)
from serving.bench.forward_engram import (
    AHEAD,
    ENGRAM_MODES,
    HBM,
    LATE,
    check_host_tables,
    reads_tables,
)
from serving.bench.forward_layout import layout_lines
from serving.bench.forward_model import measured_model
from serving.bench.forward_plan import Plan
from serving.bench.forward_profile import profile_lines
from serving.bench.forward_report import plot, tables
from serving.bench.forward_routing import ROUTINGS
from sharding.all_reduce import HELP as ALL_REDUCE_HELP
from sharding.all_reduce import KINDS as ALL_REDUCES
from sharding.all_reduce import peer_kernels
from sharding.hardware import MACHINES, hardware
from sharding.layouts import layout
from sharding.place import place
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
        help="of a table (4000000; with 8 devices and more and all tables in HBM: all)",
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
        "--engram", default=HBM, metavar="A,B",
        help=f"where tables are, of {', '.join(ENGRAM_MODES)}: rows fetched beside the step before,"
        " or between two steps (hbm)",
    )  # fmt: skip
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


def read_plan(arguments: argparse.Namespace) -> Plan:
    """The checked arguments; UserError for what is not allowed."""
    for option in ("weight_sets", "engram_rows", "chunk", "jobs"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: must be at least 1")
    names = _items("--layout", arguments.layout)
    whole = all(layout(name).devices >= WHOLE for name in names)
    engrams = _chosen("--engram", arguments.engram, ENGRAM_MODES)
    all_rows = whole and engrams == [HBM]
    engram_rows = arguments.engram_rows or (ALL_ROWS if all_rows else 4_000_000)
    cfg = measured_model(Config.preset(arguments.preset), arguments.layers, engram_rows)
    placements = [place(name, cfg) for name in names]
    numerics = MODES[arguments.numerics]
    routings = _chosen("--routing", arguments.routing, ROUTINGS)
    for placement in placements:
        peer_kernels(arguments.all_reduce, placement, numerics, arguments.kernels)
    cases = _cases(cfg, arguments)
    if engrams != [HBM]:
        check_host_tables(cfg)
        if HBM not in engrams and not any(map(reads_tables, cases)):
            raise UserError(f"--engram {arguments.engram}: no case has a layer that reads tables")
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
    if engrams != [HBM]:
        notes.append(
            f"Engram rows from the host are those of uniform tokens, others in each step; {AHEAD}:"
            f" fetched beside the step before, as the engine runs prompts; {LATE}: between steps,"
            " as it decodes"
        )
    return Plan(
        cfg=cfg,
        cases=cases,
        placements=placements,
        weight_sets=arguments.weight_sets or (cfg.num_hidden_layers if whole else 12),
        numerics=numerics,
        kernels=arguments.kernels,
        all_reduce=arguments.all_reduce,
        routings=routings,
        engrams=engrams,
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
    phases = _chosen("--phase", arguments.phase, PHASES)
    batches, contexts, rows = (
        [_number(f"--{name}", text) for text in _items(f"--{name}", getattr(arguments, name))]
        for name in ("batch", "context", "rows")
    )
    return list(phase_cases(cfg, phases, batches, contexts, rows, replay))


def _chosen(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    items = _items(option, text)
    for item in items:
        if item not in allowed:
            raise UserError(f"{option} {item}: must be of {', '.join(allowed)}")
    return items


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UserError(f"{option} {text!r}: must be a list like a,b")
    return list(dict.fromkeys(items))


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise UserError(f"{option} {text!r}: must be a whole number from 1 to 999999999")
    return int(text)
