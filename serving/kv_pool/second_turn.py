"""What a pool saves: a conversation's second turn on another engine, in another process.

Both engines have one pool. The first turn runs on engine A; the second one on B, which loads its
prefix, and on A, which holds it; a prompt of the same length that nobody knows runs cold on B. What
the second turn adds is less than a page, so that both have the same prefix and must agree.
"""

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from dsv41_jax.command import progress_line
from dsv41_jax.errors import UserError
from serving.kv_pool.options import PoolOptions, parse_pool
from serving.kv_pool.shm import pool_path


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


class Engine:
    """An engine in a process of its own."""

    def __init__(self, setting: Setting):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setting), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> int:
        """Wait until it has compiled: the size of its vocabulary."""
        return self._receive()

    def run(self, prompt: Sequence[int]) -> Turn:
        """Run a request, greedily; what it stores is in the pool when this returns."""
        self._connection.send(tuple(map(int, prompt)))
        return self._receive()

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        self._process.kill()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise UserError("an engine has ended; what it wrote is above") from None
        if isinstance(answer, UserError):
            raise answer
        return answer


def _serve(connection: Connection, setting: Setting) -> None:
    """The process: requests in, turns out."""
    try:
        engine, vocabulary = _new_engine(setting)
    except UserError as error:
        connection.send(error)
        return
    connection.send(vocabulary)
    while True:
        try:
            prompt = connection.recv()
        except EOFError:
            engine.close()
            return
        connection.send(_run(engine, prompt, setting.answer))


def _new_engine(setting: Setting) -> tuple[Any, int]:
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
    )
    engine = Engine(loaded.model, loaded.ops, options, placement=loaded.placement)
    engine.warm_up()
    return engine, loaded.model.cfg.vocab_size


def _run(engine: Any, prompt: tuple[int, ...], new: int) -> Turn:
    from serving.request import Request

    result = engine.run([Request(prompt, new)])[0].result
    engine.kv_pool.flush()
    ids = tuple(result.token_ids)
    return Turn(ids, result.ttft_ms, result.cached_tokens, result.pool_tokens)


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
    parser.add_argument("--checkpoint", required=True, metavar="DIR")
    parser.add_argument("--kv-pool", metavar="POOL", help="default: one in shared memory, removed")
    parser.add_argument("--prompt-tokens", type=int, default=3072, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--page-size", type=int, default=64, metavar="N")
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="rows a dispatch")
    parser.add_argument("--numerics")
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """The command."""
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
