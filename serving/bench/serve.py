"""Load test of an OpenAI-compatible server: latency, throughput, hit rate."""

import argparse
import asyncio
import importlib
import time
from collections import Counter
from typing import Any

import numpy as np

from dsv41_jax.command import progress_line
from dsv41_jax.errors import UserError
from serving.bench import workloads
from serving.bench.table import report
from serving.bench.workloads import Conversation, Scale

PERCENTILES = (50, 90, 99)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve", help="drive a server: TTFT, inter-token latency, tokens/s"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that /v1/models lists")
    parser.add_argument("--api-key")
    parser.add_argument("--vocab-size", type=int, required=True, help="ids are drawn below it")
    parser.add_argument(
        "--concurrency", default="4", metavar="N[,N...]", help="conversations at once; a row each"
    )
    parser.add_argument(
        "--rate", type=float, help="conversations a second instead, Poisson arrivals"
    )
    parser.add_argument(
        "--dataset", choices=("synthetic", "mooncake", "agents"), default="synthetic"
    )
    parser.add_argument("--trace", metavar="FILE", help="of the mooncake and agents datasets")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1, help="synthetic: turns a conversation")
    parser.add_argument(
        "--prompt-tokens", type=int, default=32, help="synthetic: new tokens a turn"
    )
    parser.add_argument("--output-tokens", type=int, default=16, help="synthetic")
    parser.add_argument(
        "--shared-tokens", type=int, default=0, help="synthetic: prefix of all prompts"
    )
    parser.add_argument("--scale-tokens", type=float, default=1.0, help="traces: factor on lengths")
    parser.add_argument("--scale-time", type=float, default=1.0, help="traces: factor on delays")
    parser.add_argument(
        "--max-tokens", type=int, default=1 << 20, help="traces: cut of prompt and output"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", metavar="FILE", help="also write {'rows': [...]}")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="TTFT against throughput (needs matplotlib)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """One row for each concurrency, or one for the rate."""
    load = _load(arguments)
    levels = [None] if arguments.rate else _levels(arguments.concurrency)
    rows = []
    for level in levels:
        timed, seconds = asyncio.run(_drive(arguments, load, level))
        rows.append({"concurrency": level or f"{arguments.rate}/s", **summary(timed, seconds)})
        progress_line(f"{len(timed)} requests in {seconds:.1f} s")
    report(rows, arguments.json)
    if arguments.plot:
        _plot(rows, arguments.plot)


def _levels(text: str) -> list[int]:
    try:
        levels = [int(item) for item in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1:
        raise UserError(f"--concurrency {text!r} must be positive numbers")
    return levels


def _load(arguments: argparse.Namespace) -> list[Conversation]:
    if arguments.dataset == "synthetic":
        return workloads.synthetic(
            conversations=arguments.conversations,
            turns=arguments.turns,
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            shared_tokens=arguments.shared_tokens,
            vocabulary=arguments.vocab_size,
            seed=arguments.seed,
        )
    if not arguments.trace:
        raise UserError(f"--dataset {arguments.dataset} needs --trace FILE")
    read = {"mooncake": workloads.mooncake, "agents": workloads.agents}[arguments.dataset]
    scale = Scale(arguments.scale_tokens, arguments.scale_time, arguments.max_tokens)
    return read(arguments.trace, vocabulary=arguments.vocab_size, scale=scale)[
        : arguments.conversations
    ]


async def _drive(
    arguments: argparse.Namespace, load: list[Conversation], level: int | None
) -> tuple[list[Any], float]:
    """Every conversation to its end; at most ``level`` at once, or at their arrival times."""
    import httpx

    from serving.bench.client import complete

    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=arguments.url, headers=headers, timeout=arguments.timeout, limits=limits
    ) as client:
        model = arguments.model or await _first_model(client, arguments.url)
        room = asyncio.Semaphore(level or len(load))
        origin = time.perf_counter()
        starts = _starts(arguments, load)

        async def converse(conversation: Conversation, start_s: float) -> list[Any]:
            await asyncio.sleep(max(0.0, origin + start_s - time.perf_counter()))
            timed = []
            async with room:
                for turn in conversation.turns:
                    await asyncio.sleep(turn.delay_s)
                    one = await complete(
                        client, model, turn, ignore_eos=arguments.ignore_eos, origin=origin
                    )
                    timed.append(one)
            return timed

        results = await asyncio.gather(*map(converse, load, starts))
        return [one for result in results for one in result], time.perf_counter() - origin


def _starts(arguments: argparse.Namespace, load: list[Conversation]) -> list[float]:
    if arguments.rate:
        gaps = np.random.default_rng(arguments.seed).exponential(1 / arguments.rate, len(load))
        return np.cumsum(gaps).tolist()
    return [conversation.start_s or 0.0 for conversation in load]


async def _first_model(client: Any, url: str) -> str:
    import httpx

    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return response.json()["data"][0]["id"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise UserError(f"--url {url}: no model listed: {error}") from None


def summary(timed: list[Any], seconds: float) -> dict[str, Any]:
    """Totals a second, hit rate, errors and percentiles (milliseconds) of a run."""
    good = [one for one in timed if one.error is None]
    prompt = sum(one.prompt_tokens for one in good)
    output = sum(one.output_tokens for one in good)
    cached = sum(one.cached_tokens for one in good)
    errors = Counter(one.error for one in timed if one.error is not None)
    row: dict[str, Any] = {
        "requests": len(timed),
        "requests_per_s": round(len(good) / seconds, 2),
        "tokens_per_s": round((prompt + output) / seconds, 1),
        "output_tokens_per_s": round(output / seconds, 1),
        "cached_tokens_per_s": round(cached / seconds, 1),
        "hit_rate": round(cached / max(prompt, 1), 4),
    }
    measures = {
        "ttft": [one.ttft_s for one in good if one.ttft_s is not None],
        "itl": [gap for one in good for gap in one.gaps_s],
        "e2e": [one.e2e_s for one in good],
    }
    for name, values in measures.items():
        for percentile in PERCENTILES:
            value = 1e3 * float(np.percentile(values, percentile)) if values else None
            row[f"{name}_p{percentile}_ms"] = None if value is None else round(value, 2)
    row["errors"] = dict(errors)
    return row


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise UserError("--plot needs matplotlib (extra: bench)") from None
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for percentile in (50, 90):
        values = [row[f"ttft_p{percentile}_ms"] for row in rows]
        axes.plot([row["tokens_per_s"] for row in rows], values, "o-", label=f"p{percentile}")
    axes.set_xlabel("tokens/s (prompt and output)")
    axes.set_ylabel("time to first token, ms")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
