"""What the approximations of serving cost in quality, on held-out text and tasks.

``python -m serving.quality --checkpoint DIR`` compares bounded replay, cache formats, the FP8
output projection, the candidate limit and numerics with the exact model, token by token, hides
needles and counts accepted drafts.
"""

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

from dsv41_jax.command import exit_status, output_file, progress_line
from dsv41_jax.errors import UserError
from dsv41_jax.score import default_numerics
from pallas_kernels.dispatch import KINDS
from serving.generate import load
from serving.quality.measure import FULL, QUICK, STUDIES, Sizes, Subject, measure
from serving.quality.picture import plot
from serving.quality.report import as_text
from serving.quality.tasks import read_tasks
from serving.quality.text import HELD_OUT, text_file
from sharding.plot import plotting


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _measure(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.quality", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="UTF-8; a line that begins with a form feed opens a document "
        f"(default: {HELD_OUT} of the checkpoint)",
    )
    parser.add_argument(
        "--tasks", metavar="FILE.jsonl", help="prompt and answer, or GSM8K's question and answer"
    )
    parser.add_argument(
        "--task-tokens", type=int, metavar="N", help="most tokens generated for a task"
    )
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"of {', '.join(STUDIES)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="few and short texts: a smoke test")
    parser.add_argument("--pieces", type=int, metavar="N", help="pieces of text")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of the longest prompt")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="at a time")
    parser.add_argument(
        "--numerics",
        choices=("reference", "serving"),
        help="of the exact model (default: reference on a CPU, serving on a GPU)",
    )
    parser.add_argument("--kernels", choices=KINDS, default="auto")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib (extra: bench)")
    return parser


def _measure(arguments: argparse.Namespace) -> None:
    studies = _studies(arguments)
    if arguments.kernels not in ("auto", "reference") and "variants" in studies:
        raise UserError(f"--kernels {arguments.kernels}: variants round as no kernel does")
    sizes = _sizes(arguments)
    if arguments.plot:
        plotting(arguments.plot)
    tasks = read_tasks(arguments.tasks) if arguments.tasks else []
    text = text_file(arguments.checkpoint, arguments.text)
    with ExitStack() as files:
        drawn = files.enter_context(output_file(arguments.plot)) if arguments.plot else None
        written = files.enter_context(output_file(arguments.json)) if arguments.json else None
        numerics = default_numerics(arguments.numerics)
        loaded = load(arguments.checkpoint, numerics, kernels=arguments.kernels)
        subject = Subject(
            arguments.checkpoint, loaded, numerics, arguments.kernels, text, sizes, tasks
        )
        report = measure(subject, studies, _Progress())
        print(as_text(report))
        if written:
            written.write(json.dumps(report.document(), indent=1).encode() + b"\n")
        if drawn:
            plot(report, arguments.checkpoint, drawn)


def _studies(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.only is None:
        return STUDIES
    wanted = tuple(arguments.only.split(","))
    for name in wanted:
        if name not in STUDIES:
            raise UserError(f"--only {name}: must be one of {', '.join(STUDIES)}")
    if "tasks" in wanted and not arguments.tasks:
        raise UserError("--only tasks: needs --tasks FILE.jsonl")
    return wanted


def _sizes(arguments: argparse.Namespace) -> Sizes:
    sizes = QUICK if arguments.quick else FULL
    given = {name: getattr(arguments, name) for name in ("pieces", "context", "task_tokens")}
    for name, value in {**given, "requests": arguments.requests}.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
    given = {name: value for name, value in given.items() if value is not None}
    return replace(sizes, requests=arguments.requests, **given)


class _Progress:
    """A line on standard error for whatever begins, with the seconds so far."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self, text: str) -> None:
        progress_line(f"[{time.perf_counter() - self._began:4.0f} s] {text}")


if __name__ == "__main__":
    sys.exit(main())
