"""Benchmarks: ``python -m serving.bench generate --checkpoint DIR``."""

import argparse
import json
import sys
import time
from typing import Any

import jax
import numpy as np

from dsv41_jax.command import exit_status, output_file, progress_line
from dsv41_jax.errors import UserError
from dsv41_jax.score import default_numerics
from pallas_kernels.numerics import MODES
from serving.generate import load
from serving.request import Request, check_request
from serving.runner import Runner, RunnerOptions


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="load, compile, first token and decode times")
    generate.add_argument("--checkpoint", required=True, metavar="DIR")
    generate.add_argument("--prompt-tokens", type=int, default=64)
    generate.add_argument("--new-tokens", type=int, default=48)
    generate.add_argument("--requests", type=int, default=1)
    generate.add_argument("--repeats", type=int, default=5)
    generate.add_argument("--numerics", choices=tuple(MODES))
    generate.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    generate.set_defaults(run=_generate)
    return parser


def _generate(arguments: argparse.Namespace) -> None:
    """Medians over the repeats; random prompts, uniform over the vocabulary."""
    if arguments.repeats < 1:
        raise UserError(f"--repeats {arguments.repeats} must be at least 1")
    began = time.perf_counter()
    loaded = load(arguments.checkpoint, default_numerics(arguments.numerics))
    load_s = time.perf_counter() - began
    requests = _requests(arguments, loaded.model.cfg.vocab_size)
    for request in requests:
        check_request(request, loaded.model.cfg)
    rows = []
    programs = None
    for replay in (True, False):
        total = arguments.prompt_tokens + arguments.new_tokens
        options = RunnerOptions(requests=arguments.requests, max_tokens=total, replay=replay)
        began = time.perf_counter()
        runner = Runner(loaded.model, loaded.ops, options, programs)
        runner.warm_up([arguments.prompt_tokens], progress=progress_line)
        compile_s, programs = time.perf_counter() - began, runner.programs
        timed = [runner.generate(requests)[0] for _ in range(arguments.repeats)]
        tpot = float(np.median([result.tpot_ms for result in timed]))
        rows.append(
            {
                "replay": replay,
                "requests": arguments.requests,
                "prompt_tokens": arguments.prompt_tokens,
                "load_s": round(load_s, 2),
                "compile_s": round(compile_s, 2),
                "ttft_ms": round(float(np.median([result.ttft_ms for result in timed])), 2),
                "tpot_ms": round(tpot, 2),
                "decode_tokens_per_s": round(1e3 * arguments.requests / tpot, 1),
                "compiles_after_warmup": runner.compiles.count,
            }
        )
    _print(rows)
    if arguments.json:
        report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
        _write(arguments.json, report)


def _requests(arguments: argparse.Namespace, vocabulary: int) -> list[Request]:
    rng = np.random.default_rng(0)
    shape = arguments.requests, arguments.prompt_tokens
    prompts = rng.integers(0, vocabulary, shape)
    return [Request(tuple(prompt.tolist()), arguments.new_tokens) for prompt in prompts]


def _print(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{name:>{len(name)}}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>{len(name)}}" for name, value in row.items()))


def _write(path: str, report: dict[str, Any]) -> None:
    with output_file(path) as file:
        file.write(json.dumps(report, indent=1).encode())


if __name__ == "__main__":
    sys.exit(main())
