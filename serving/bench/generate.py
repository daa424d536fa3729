"""Load, compile, first-token and decode times of one static batch."""

import argparse
import time
from typing import Any

import numpy as np

from dsv41_jax.command import progress_line
from dsv41_jax.errors import UserError
from dsv41_jax.score import default_numerics
from pallas_kernels.numerics import MODES
from serving.bench.table import report
from serving.engine import Engine
from serving.generate import ENGRAM_HELP, LAYOUT_HELP, load, prefill_shapes
from serving.options import EngineOptions
from serving.request import Request, check_request
from serving.speculative import add_options, speculation_of
from sharding.all_reduce import HELP as ALL_REDUCE_HELP
from sharding.all_reduce import KINDS as ALL_REDUCES


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("generate", help="load, compile, first token and decode times")
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--numerics", choices=tuple(MODES))
    parser.add_argument("--layout", default="tp1", metavar="NAME", help=LAYOUT_HELP)
    parser.add_argument("--all-reduce", choices=ALL_REDUCES, default="auto", help=ALL_REDUCE_HELP)
    parser.add_argument("--engram", default="hbm", metavar="WHERE", help=ENGRAM_HELP)
    add_options(parser)
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Medians over the repeats; random prompts, uniform over the vocabulary."""
    if arguments.repeats < 1:
        raise UserError(f"--repeats {arguments.repeats} must be at least 1")
    speculation = speculation_of(arguments)
    began = time.perf_counter()
    numerics = default_numerics(arguments.numerics)
    loaded = load(
        arguments.checkpoint,
        numerics,
        layout=arguments.layout,
        speculation=speculation is not None,
        all_reduce=arguments.all_reduce,
        engram=arguments.engram,
    )
    load_s = time.perf_counter() - began
    requests = _requests(arguments, loaded.model.cfg.vocab_size)
    for request in requests:
        check_request(request, loaded.model.cfg)
    rows, executables = [], {}
    total = arguments.prompt_tokens + arguments.new_tokens
    of_rank = -(-arguments.requests // loaded.data_ranks)
    for replay in (True, False):
        options = EngineOptions(
            slots=of_rank,
            pages=of_rank * -(-total // 64),
            max_tokens=total,
            prefill=prefill_shapes([arguments.prompt_tokens], 512, of_rank),
            decode=(of_rank,),
            replay=replay,
            prefix_cache=False,
            logprobs=0,
            prompt_logprobs=False,
            speculation=speculation,
        )
        began = time.perf_counter()
        engine = Engine(
            loaded.model,
            loaded.ops,
            options,
            executables=executables,
            placement=loaded.placement,
            peers=loaded.peers,
        )
        engine.warm_up(progress=progress_line)
        compile_s = time.perf_counter() - began
        timed = [engine.run(requests)[0].result for _ in range(arguments.repeats)]
        tpot = float(np.median([result.tpot_ms for result in timed]))
        rows.append(
            {
                "layout": arguments.layout,
                "all_reduce": "peer" if loaded.peers else "psum",
                "engram": arguments.engram,
                "replay": replay,
                "requests": arguments.requests,
                "prompt_tokens": arguments.prompt_tokens,
                "load_s": round(load_s, 2),
                "compile_s": round(compile_s, 2),
                "ttft_ms": round(float(np.median([result.ttft_ms for result in timed])), 2),
                "tpot_ms": round(tpot, 2),
                "decode_tokens_per_s": round(1e3 * arguments.requests / tpot, 1),
                "compiles_after_warmup": engine.compiles.count,
                **_drafts(engine),
            }
        )
    report(rows, arguments.json)


def _drafts(engine: Engine) -> dict[str, Any]:
    """Tokens a step and how often each position of a block was accepted."""
    speculation, seen = engine.options.speculation, engine.acceptance
    if speculation is None:
        return {}
    shares = [count / max(seen.steps, 1) for count in seen.by_position[: speculation.length]]
    by_position = "/".join(f"{share:.3f}" for share in shares)
    columns = {"tokens_per_step": round(seen.tokens_per_step, 3), "accepted": by_position}
    return columns | speculation.marks


def _requests(arguments: argparse.Namespace, vocabulary: int) -> list[Request]:
    rng = np.random.default_rng(0)
    shape = arguments.requests, arguments.prompt_tokens
    prompts = rng.integers(0, vocabulary, shape)
    return [Request(tuple(prompt.tolist()), arguments.new_tokens) for prompt in prompts]
