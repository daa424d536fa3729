"""What a pool saves: a conversation's second turn on another engine, in another process.

Both engines have one pool. The first turn runs on engine A; the second one on B, which loads its
prefix, and on A, which holds it; a prompt of the same length that nobody knows runs cold on B. What
the second turn adds is less than a page, so that both have the same prefix and must agree.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv41_jax.command import progress_line
from dsv41_jax.errors import UserError
from serving.kv_pool.options import PoolOptions, parse_pool
from serving.kv_pool.process import EngineProcess, Served
from serving.kv_pool.shm import pool_path

if TYPE_CHECKING:
    from serving.engine import Engine as _Engine
    from serving.handoff.options import HandoffOptions


@dataclass(frozen=True)
class Setting:
    """What both processes make their engines of. pages: of the first prompt."""

    checkpoint: str
    numerics: str | None
    pool: PoolOptions
    page_size: int
    chunk: int
    pages: int

    @property
    def prompt(self) -> int:
        """Tokens of the first prompt."""
        return self.pages * self.page_size

    @property
    def answer(self) -> int:
        """Tokens generated in a turn."""
        return self.page_size // 2

    @property
    def message(self) -> int:
        """New tokens of the second turn."""
        return self.page_size - 1 - self.answer


@dataclass(frozen=True)
class Turn:
    """What came of a request."""

    token_ids: tuple[int, ...]
    ttft_ms: float
    cached_tokens: int
    pool_tokens: int


class Engine(EngineProcess):
    """An engine of the measurement."""

    def __init__(self, setting: Setting):
        super().__init__(_made, setting)

    def run(self, prompt: Sequence[int]) -> Turn:
        """Run a request, greedily; what it stores is in the pool when this returns."""
        return self.ask(tuple(map(int, prompt)))


def _made(setting: Setting) -> Served:
    """In the process: prompts in, turns out."""
    from serving.request import Request

    engine, vocabulary = new_engine(setting)
    assert engine.kv_pool is not None
    pool = engine.kv_pool

    def answer(prompt: tuple[int, ...]) -> Turn:
        result = engine.run([Request(prompt, setting.answer)])[0].result
        pool.flush()
        ids = tuple(result.token_ids)
        return Turn(ids, result.ttft_ms, result.cached_tokens, result.pool_tokens)

    return Served(vocabulary, answer, engine.close)


def new_engine(setting: Setting, handoff: "HandoffOptions | None" = None) -> "tuple[_Engine, int]":
    """A warm engine for one request at a time, and the size of its vocabulary."""
    from dsv41_jax.score import default_numerics
    from serving.engine import Engine
    from serving.generate import load
    from serving.options import EngineOptions

    loaded = load(setting.checkpoint, default_numerics(setting.numerics))
    most = setting.pages + 2
    options = EngineOptions(
        slots=1,
        pages=4 * most,
        page_size=setting.page_size,
        max_tokens=most * setting.page_size,
        prefill=((1, setting.chunk),),
        decode=(1,),
        prompt_logprobs=False,
        kv_pool=setting.pool,
        handoff=handoff,
    )
    engine = Engine(loaded.model, loaded.ops, options, placement=loaded.placement)
    engine.warm_up()
    return engine, loaded.model.cfg.vocab_size


def measure(setting: Setting, repeats: int) -> list[dict[str, Any]]:
    """Rows (cold, pool, local) of median times to the first token; UserError if the turns on both
    engines do not agree, or nothing came from the pool.
    """
    with ExitStack() as running:
        engines = []
        for name in "AB":  # B may find in JAX's cache what A has compiled
            engines.append(Engine(setting))
            running.callback(engines[-1].close)
            vocabulary = engines[-1].ready()
            progress_line(f"engine {name} is ready")
        a, b = engines
        return _rows(_turns(a, b, setting, vocabulary, repeats))


def _turns(
    a: Engine, b: Engine, setting: Setting, vocabulary: int, repeats: int
) -> dict[str, list[Turn]]:
    """Second turns by where their prefix comes from."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(3, vocabulary, count).tolist()

    taken: dict[str, list[Turn]] = {"cold": [], "pool": [], "local": []}
    for _ in range(repeats):
        prompt = tokens(setting.prompt)
        turn = [*prompt, *a.run(prompt).token_ids, *tokens(setting.message)]
        taken["pool"].append(b.run(turn))
        taken["local"].append(a.run(turn))
        taken["cold"].append(b.run(tokens(len(turn))))
    for there, here in zip(taken["pool"], taken["local"], strict=True):
        if not there.pool_tokens:
            raise UserError("nothing came from the pool: is the prompt longer than the window?")
        if there.token_ids != here.token_ids:
            raise UserError(f"the engines do not agree: {there.token_ids}, {here.token_ids}")
    return taken


def _rows(taken: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(t.ttft_ms for t in turns) for name, turns in taken.items()}
    return [
        {
            "prefix": name,
            "cached_tokens": turns[0].cached_tokens,
            "pool_tokens": turns[0].pool_tokens,
            "ttft_ms": round(medians[name], 2),
            "of_cold": round(medians[name] / medians["cold"], 4),
        }
        for name, turns in taken.items()
    ]


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("second-turn", help="measure what a pool saves")
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of measurements with two engines."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--kv-pool", metavar="POOL", help="default: one in shared memory, removed")
    parser.add_argument("--prompt-tokens", type=int, default=3072, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--page-size", type=int, default=64, metavar="N")
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="rows a dispatch")
    parser.add_argument("--numerics")
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")


def run(arguments: argparse.Namespace) -> None:
    """The command."""
    measured(arguments, measure)


def measured(
    arguments: argparse.Namespace, measure: Callable[[Setting, int], list[dict[str, Any]]]
) -> None:
    """Report what a measurement with a setting and so many repeats finds."""
    from serving.bench.table import report
    from serving.kv_pool.fingerprint import fingerprint

    own = f"second-turn-{os.getpid()}"
    pool = parse_pool(arguments.kv_pool or f"shm:1GB:{own}", fingerprint(arguments.checkpoint))
    pages = arguments.prompt_tokens // max(arguments.page_size, 1)
    if pool is None or arguments.repeats < 1 or pages < 1:
        raise UserError("--kv-pool, --prompt-tokens, --repeats: a pool, a page and 1 at least")
    setting = Setting(
        arguments.checkpoint,
        arguments.numerics,
        pool,
        arguments.page_size,
        arguments.chunk,
        pages,
    )
    try:
        report(measure(setting, arguments.repeats), arguments.json)
    finally:
        pool_path(own).unlink(missing_ok=True)
