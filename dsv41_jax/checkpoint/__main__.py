"""`python -m dsv41_jax.checkpoint inspect | convert | random`."""

import argparse
import json
import logging
import sys
from importlib import resources
from pathlib import Path

from dsv41_jax.checkpoint.orbax import is_orbax, orbax_to_released, released_to_orbax
from dsv41_jax.checkpoint.random_model import RandomModel
from dsv41_jax.checkpoint.report import as_text, report_directory, report_preset
from dsv41_jax.checkpoint.save import save_released
from dsv41_jax.config import PRESETS, Config
from dsv41_jax.errors import UserError, raise_problems


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status (0, or 2 for bad input)."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="what a checkpoint holds, and what fits where")
    source = inspect.add_mutually_exclusive_group(required=True)
    source.add_argument("directory", nargs="?", metavar="DIR")
    source.add_argument("--preset", choices=PRESETS, help="the inventory a released config implies")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser("convert", help="released -> Orbax, or Orbax -> released")
    convert.add_argument("directory", metavar="DIR")
    convert.add_argument("output", metavar="OUT")
    convert.set_defaults(run=_convert)

    random = commands.add_parser("random", help="a random model in the released format")
    random.add_argument("output", metavar="OUT")
    random.add_argument("--preset", choices=PRESETS, required=True)
    random.add_argument("--seed", type=int, default=0)
    random.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to copy beside it")
    random.set_defaults(run=_random)
    return parser


def _inspect(arguments: argparse.Namespace) -> None:
    if arguments.preset:
        report = report_preset(arguments.preset)
    else:
        report = report_directory(arguments.directory)
    print(json.dumps(report, indent=1) if arguments.json else as_text(report))
    if report["problems"]:
        raise_problems(report["subject"], report["problems"])


def _convert(arguments: argparse.Namespace) -> None:
    convert = orbax_to_released if is_orbax(arguments.directory) else released_to_orbax
    convert(arguments.directory, arguments.output, progress=_Progress())
    print(f"wrote {arguments.output}", file=sys.stderr)


def _random(arguments: argparse.Namespace) -> None:
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: must be 0 or above")
    cfg = Config.preset(arguments.preset)
    presets = resources.files("dsv41_jax").joinpath("presets")
    with resources.as_file(presets.joinpath(f"{arguments.preset}.tokenizer.json")) as own:
        tokenizer = arguments.tokenizer or (own if own.is_file() else None)
        save_released(
            RandomModel(cfg, arguments.seed),
            cfg,
            Path(arguments.output),
            tokenizer_file=tokenizer,
            progress=_Progress(),
        )
    print(f"wrote {arguments.output}", file=sys.stderr)


class _Progress:
    """Percent on stderr: one changing line on a terminal, else a line per tenth."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int, name: str) -> None:
        terminal = sys.stderr.isatty()
        step = 100 * done // max(total, 1) // (1 if terminal else 10)
        if step == self._shown:
            return
        self._shown = step
        text = (
            f"{100 * done // max(total, 1):3d} %  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {name}"
        )
        end = "\n" if done == total or not terminal else ""
        print(("\r\033[K" if terminal else "") + text, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
