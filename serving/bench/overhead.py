"""What the engine's own Python costs a decode step, without a device."""

import argparse
import time

import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.batch import by_rank
from serving.bench.table import report
from serving.pages import PagePool
from serving.prefix_cache import ROOT, PrefixCache
from serving.ranks import assign, plan_step
from serving.request import Request
from serving.scheduler import Limits, Scheduler
from serving.sequence import Sequence, Stage
from serving.slots import SlotTable

PAGE, PAGES, TABLE = 64, 40_000, 2048
PROMPT, NEW = 5_000, 4_000


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("overhead", help="scheduling, batch building and prefix lookup")
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--ranks", type=int, default=1, help="data ranks that share them")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lookup-tokens", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Medians in milliseconds: of a step with every request decoding, and of one prefix lookup."""
    if not 1 <= arguments.ranks <= arguments.running:
        limit = arguments.running
        raise UserError(f"--ranks {arguments.ranks} must be from 1 to --running {limit}")
    count, cfg = arguments.running, Config.preset("flash")
    slots = -(-count // arguments.ranks)
    limits = Limits(slots, PAGE, cfg.sliding_window, prefill=((1, 512), (8, 2048)))
    ranks = [_new_rank(limits) for _ in range(arguments.ranks)]
    table = SlotTable(cfg, slots, TABLE, stop_ids=8, bias_ids=300, ranks=arguments.ranks)
    _fill(ranks, table, count)
    steps = [_step(ranks, table, slots) for _ in range(arguments.steps)]
    plan, build, register = np.median(np.array(steps), axis=0) * 1e3
    rows = [
        {"what": f"plan, {count} running on {len(ranks)} ranks", "ms": round(plan, 3)},
        {"what": "batch building", "ms": round(build, 3)},
        {"what": "pages into the prefix cache", "ms": round(register, 3)},
        {"what": "whole step", "ms": round(plan + build + register, 3)},
        {
            "what": f"prefix lookup, {arguments.lookup_tokens} tokens",
            "ms": round(_lookup(ranks[0].cache, ranks[0].pool, arguments.lookup_tokens), 3),
        },
    ]
    report(rows, arguments.json)


def _new_rank(limits: Limits) -> Scheduler:
    pool = PagePool(PAGES)
    return Scheduler(limits, pool, PrefixCache(pool, PAGE))


def _fill(ranks: list[Scheduler], table: SlotTable, count: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(count):
        prompt = tuple(rng.integers(0, 1000, PROMPT).tolist())
        assign(ranks, Sequence.of(Request(prompt, NEW), i))
    while any(s.stage is not Stage.DECODE for rank in ranks for s in rank.sequences):
        for chunk in plan_step(ranks).chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.stop
            if chunk.last:
                sequence.dispatched, sequence.stage = 1, Stage.DECODE
                table.assign(sequence, replay=True)


def _step(ranks: list[Scheduler], table: SlotTable, places: int) -> tuple[float, float, float]:
    """Seconds of planning, of building the decode batch, of registering pages."""
    marks = [time.perf_counter()]
    decode = plan_step(ranks).decode
    marks.append(time.perf_counter())
    for sequence in decode:
        table.update_pages(sequence)
    table.decode_inputs(by_rank(decode, len(ranks), places))
    marks.append(time.perf_counter())
    for sequence in decode:
        sequence.dispatched += 1
        sequence.result.token_ids.append(0)
    registered = time.perf_counter()
    for rank in ranks:
        for sequence in rank.running:
            rank.register(sequence)
    return marks[1] - marks[0], marks[2] - marks[1], time.perf_counter() - registered


def _lookup(cache: PrefixCache, pool: PagePool, length: int) -> float:
    tokens = np.random.default_rng(1).integers(0, 1000, length).astype(np.int32)
    parent = ROOT
    for index in range(length // PAGE):
        page = pool.take(1)[0]
        parent = cache.insert(parent, tokens[index * PAGE : (index + 1) * PAGE], page)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        found = cache.match(tokens, length)
        seconds.append(time.perf_counter() - began)
        assert len(found) == length // PAGE
    return 1e3 * float(np.median(seconds))
