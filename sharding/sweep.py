"""`python -m sharding.sweep`: which layouts fit, how fast a step would be, and the Pareto front.

python -m sharding.sweep --preset flash --devices 8 --phase decode,prefill --batch 1,32
python -m sharding.sweep --hardware gb300 --set launch_us=1.5 --set collective_us=5
python -m sharding.sweep --checkpoint DIR --hardware this --measure
python -m sharding.sweep ... --measure --coordinator HOST:PORT --processes 2 --process-id 0
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dsv41_jax.checkpoint.fit import kv_bytes_per_token
from dsv41_jax.checkpoint.read import read_config
from dsv41_jax.command import exit_status, output_file
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from sharding.collectives import ALL_REDUCES
from sharding.dispatch import DISPATCHES
from sharding.estimate import Estimate, ShardedModel, slot_bytes
from sharding.hardware import MEANINGS, Hardware, hardware
from sharding.layouts import LAYOUTS, Layout, layout
from sharding.measure import Meter
from sharding.mesh import make_mesh
from sharding.plot import pareto, plot_front, plotting
from sharding.probe import this_machine
from sharding.processes import add_options as add_process_options
from sharding.processes import join
from sharding.roofline import PHASES, Step, require_figures

Row = dict[str, Any]
_SHOWN_PARTS = 3


@dataclass(frozen=True)
class Sweep:
    """What to estimate: every layout with every step. left_out: layout name -> why it cannot run.
    meter: what also measures them.
    """

    cfg: Config
    machine: Hardware
    models: tuple[ShardedModel, ...]
    left_out: dict[str, str]
    steps: tuple[Step, ...]
    meter: Meter | None = None

    def rows(self) -> list[Row]:
        """One row for each layout and step, those of the Pareto front marked."""
        rows = [
            _row(model.estimate(self.machine, step), self.machine)
            for step in self.steps
            for model in self.models
        ]
        if self.meter:
            self.meter.fill(rows, self.models, self.steps)
        front = {id(row) for row in pareto(rows)}
        return [row | {"pareto": id(row) in front} for row in rows]


def main(argv: list[str] | None = None) -> int:
    """Run a sweep; returns the exit status (0, or 2 for bad input)."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: (join(arguments), _run(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--preset", default="flash", help="flash (the default) or tiny")
    source.add_argument("--config", metavar="FILE", help="take a config.json alone")
    source.add_argument("--checkpoint", metavar="DIR", help="take a checkpoint and its config")
    parser.add_argument("--devices", metavar="N", default="8", help="GPUs at hand (8)")
    parser.add_argument("--layouts", metavar="A,B", default="all", help="all, or names")
    parser.add_argument("--phase", default="decode", help=f"of {', '.join(PHASES)} (decode)")
    parser.add_argument("--batch", metavar="N,N", default="1,8,32,128", help="requests in all")
    parser.add_argument("--context", metavar="N,N", default="8192", help="tokens of a request")
    parser.add_argument(
        "--hardware", default="h200", help="h200 (the default), gb300, rubin or this machine: this"
    )
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], dest="settings",
        help=f"a figure of the hardware: {', '.join(MEANINGS)}",
    )  # fmt: skip
    parser.add_argument(
        "--swa-bounded-replay", action=argparse.BooleanOptionalAction, default=True,
        help="prefill runs the last layers on the last rows only",
    )  # fmt: skip
    parser.add_argument(
        "--index-split", action="store_true", help="a tensor group shares the scan of index keys"
    )
    parser.add_argument(
        "--measure", action="store_true",
        help="also run every step on the devices at hand; without a checkpoint: random weights",
    )  # fmt: skip
    parser.add_argument(
        "--all-reduce", choices=list(ALL_REDUCES), default="psum",
        help="of a measured step of up to 64 rows (default: psum; peer needs Hopper GPUs)",
    )  # fmt: skip
    parser.add_argument(
        "--dispatch", choices=DISPATCHES, default="gather",
        help="of a measured step's rows to experts of other data ranks (default: gather)",
    )  # fmt: skip
    add_process_options(parser)
    parser.add_argument("--json", metavar="FILE", help="the same numbers for programs")
    parser.add_argument("--plot", metavar="FILE.png", help="tokens/s a user against tokens/s a GPU")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    sweep = read_sweep(arguments)
    with ExitStack() as files:
        plot, out, first = None, None, arguments.process_id == 0
        if arguments.plot and first:
            plotting(arguments.plot)
            plot = files.enter_context(output_file(arguments.plot))
        if arguments.json and first:
            out = files.enter_context(output_file(arguments.json))
        rows = sweep.rows()
        if not first:  # of several that measure the same steps together
            return
        if plot:
            plot_front(rows, sweep.machine.label, plot)
        if out:
            _write_json(sweep, rows, out)
        print("\n".join(table(sweep, rows)))


def read_sweep(arguments: argparse.Namespace) -> Sweep:
    """The checked arguments; UserError for what is not allowed."""
    cfg = _config(arguments)
    this = arguments.hardware == "this"
    machine = this_machine() if this else hardware(arguments.hardware)
    machine = machine.with_settings(arguments.settings)
    layouts = _layouts(arguments.layouts, _count("--devices", arguments.devices))
    require_figures(machine, max(layouts, key=lambda each: each.devices))
    phases = _items("--phase", arguments.phase)
    for phase in phases:
        _check_phase(cfg, phase)
    contexts = [_count("--context", text) for text in _items("--context", arguments.context)]
    for context in contexts:
        if context > cfg.max_position_embeddings:
            raise UserError(
                f"--context {context}: must be at most {cfg.max_position_embeddings}"
                " (max_position_embeddings)"
            )
    batches = [_count("--batch", text) for text in _items("--batch", arguments.batch)]
    models, left_out = _divide(
        cfg, layouts, keep_going=arguments.layouts == "all", here=arguments.measure
    )
    steps = tuple(
        Step(phase, batch, context, arguments.swa_bounded_replay, arguments.index_split)
        for phase in phases
        for context in contexts
        for batch in batches
    )
    meter = None
    if arguments.measure:
        meter = Meter(
            arguments.checkpoint, all_reduce=arguments.all_reduce, dispatch=arguments.dispatch
        )
    elif arguments.processes > 1:
        raise UserError(f"--processes {arguments.processes}: only --measure needs several")
    return Sweep(cfg, machine, models, left_out, steps, meter)


def _config(arguments: argparse.Namespace) -> Config:
    if arguments.checkpoint:
        return read_config(arguments.checkpoint)
    if arguments.config:
        return Config.from_json(Path(arguments.config))
    return Config.preset(arguments.preset)


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UserError(f"{option} {text!r}: must be a list like a,b")
    return list(dict.fromkeys(items))


def _count(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise UserError(f"{option} {text!r}: must be a whole number from 1 to 999999999")
    return int(text)


def _check_phase(cfg: Config, phase: str) -> None:
    if phase not in PHASES:
        raise UserError(f"--phase {phase!r}: must be of {', '.join(PHASES)}")
    if phase == "verify" and not cfg.num_nextn_predict_layers:
        raise UserError("--phase verify: the model has no draft stages")


def _layouts(text: str, devices: int) -> list[Layout]:
    if text == "all":
        return [each for each in LAYOUTS.values() if each.devices <= devices]
    found = [layout(name) for name in _items("--layouts", text)]
    for each in found:
        if each.devices > devices:
            raise UserError(
                f"layout {each.name}: needs {each.devices} devices, --devices is {devices}"
            )
    return found


def _divide(
    cfg: Config, layouts: Iterable[Layout], *, keep_going: bool, here: bool
) -> tuple[tuple[ShardedModel, ...], dict[str, str]]:
    """The models that the layouts divide (here: and the devices at hand can hold), and why others
    are left out.
    """
    models, left_out = [], {}
    for each in layouts:
        try:
            models.append(ShardedModel(cfg, each))
            if here:
                make_mesh(each)
        except UserError as error:
            if not keep_going:
                raise
            models = [model for model in models if model.layout is not each]
            left_out[each.name] = "; ".join(error.problems)
    return tuple(models), left_out


def _row(estimate: Estimate, machine: Hardware) -> Row:
    step, held = estimate.step, estimate.footprint
    gpu, watts = estimate.tokens_per_s_gpu, machine.known("watts")
    return {
        "layout": estimate.layout.name,
        "devices": estimate.layout.devices,
        "phase": step.phase,
        "batch": step.batch,
        "context": step.context,
        "fits": held.fits,
        "bytes_per_device": held.total,
        "bytes_by_kind": held.by_kind,
        "kv_tokens_per_device": held.kv_tokens,
        "step_us_estimated": estimate.step_us,
        "step_us_measured": None,
        "estimate_error": None,
        "collectives": None,
        "parts_us": dict(estimate.parts),
        "tokens_per_s_user": estimate.tokens_per_s_user,
        "tokens_per_s_gpu": gpu,
        "tokens_per_s_watt": gpu / watts if gpu and watts else None,
        "projection": not machine.measured,
    }


def _write_json(sweep: Sweep, rows: list[Row], file: BinaryIO) -> None:
    machine = sweep.machine
    figures = {name: figure and asdict(figure) for name, figure in machine.figures.items()}
    document = {
        "rows": rows,
        "left_out": sweep.left_out,
        "hardware": {"name": machine.name, "label": machine.label, "figures": figures},
        "swa_bounded_replay": sweep.steps[0].bounded_replay,
        "index_split": sweep.steps[0].index_split,
        "kv_bytes_per_token": kv_bytes_per_token(sweep.cfg),
        "slot_bytes": slot_bytes(sweep.cfg),
    }
    file.write(json.dumps(document, indent=1).encode() + b"\n")


def table(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """The lines that people read: weights by layout, then the estimates."""
    slot = sum(slot_bytes(sweep.cfg).values())
    replay = "with" if sweep.steps[0].bounded_replay else "without"
    lines = [f"{sweep.machine.label}; times are estimates"]
    lines[0] += "" if sweep.meter else ", nothing was measured"
    if any(step.phase == "prefill" for step in sweep.steps):
        lines.append(f"prefill {replay} bounded replay")
    lines.append("")
    lines += _columns(_weight_lines(sweep.models))
    lines.append(
        f"and {kv_bytes_per_token(sweep.cfg):g} B a token of global cache, {slot / 1e6:.2f} MB a"
        f" request of private state, {sweep.machine['reserved_fraction']:.0%} of the memory"
        " reserved for temporaries"
    )
    lines += [f"left out: {name}: {why}" for name, why in sweep.left_out.items()]
    lines += [
        f"{model.layout.name}: {note}" for model in sweep.models for note in model.division.notes
    ]
    lines += ["", *_columns(_step_lines(rows)), "* on the Pareto front of its phase and context"]
    if sweep.meter:
        lines += ["", *_columns(_measured_lines(rows))]
    return lines


def _weight_lines(models: Iterable[ShardedModel]) -> list[list[str]]:
    kinds = ("experts", "dense", "engram_tables", "embedding", "head", "draft")
    lines = [["GB a device", *(kind.replace("_", " ") for kind in kinds), "weights"]]
    for model in models:
        held = model.bytes_by_kind
        sizes = [getattr(held, kind) for kind in kinds]
        lines.append([model.layout.name, *(_gb(size) for size in (*sizes, held.loaded))])
    return lines


def _step_lines(rows: Iterable[Row]) -> list[list[str]]:
    head = ["layout", "phase", "batch", "context", "fits", "GB", "step ms", "tok/s/user"]
    lines = [[*head, "tok/s/GPU", "", "longest parts"]]
    for row in rows:
        parts = sorted(row["parts_us"].items(), key=lambda part: -part[1])[:_SHOWN_PARTS]
        shares = [f"{name} {us / row['step_us_estimated']:.0%}" for name, us in parts]
        lines.append([
            row["layout"], row["phase"], str(row["batch"]), str(row["context"]),
            "yes" if row["fits"] else "no", _gb(row["bytes_per_device"]),
            f"{row['step_us_estimated'] / 1e3:.3g}", _rate(row["tokens_per_s_user"]),
            _rate(row["tokens_per_s_gpu"]), "*" if row["pareto"] else "", ", ".join(shares),
        ])  # fmt: skip
    return lines


def _measured_lines(rows: Iterable[Row]) -> list[list[str]]:
    lines = [["layout", "phase", "batch", "context", "measured ms", "error", "collectives"]]
    for row in rows:
        kinds = [
            f"{kind} {found['count']} ({found['nbytes'] / 1e3:.3g} kB)"
            for kind, found in row["collectives"].items()
        ]
        lines.append([
            row["layout"], row["phase"], str(row["batch"]), str(row["context"]),
            f"{row['step_us_measured'] / 1e3:.3g}", f"{row['estimate_error']:+.0%}",
            ", ".join(kinds) or "none",
        ])  # fmt: skip
    return lines


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}" if size >= 10**8 else f"{size / 1e9:.2g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _columns(lines: list[list[str]]) -> list[str]:
    """Columns of equal width, names to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(widths) - 1

    def place(i: int) -> Callable[[str, int], str]:
        return str.ljust if i in (0, last) else str.rjust

    return [
        "  ".join(place(i)(text, widths[i]) for i, text in enumerate(line)).rstrip()
        for line in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
