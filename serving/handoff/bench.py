"""What a hand-off costs: one engine begins a request, another one, in another process, goes on.

Two turns of a conversation for each form of the hand-off: the first prompt is new to both engines;
of the second one the first engine has the first prompt and loads the answer, the second one has
both. Times are medians: to the first token where the request begins, from there until the pool has
all of it, and from the second engine's start to its first event.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv41_jax.command import progress_line
from dsv41_jax.errors import UserError
from serving.handoff.options import FORMS, WINDOWS, HandoffOptions
from serving.handoff.ticket import Ticket
from serving.kv_pool.process import EngineProcess, Served
from serving.kv_pool.second_turn import Setting, add_options, measured, new_engine

if TYPE_CHECKING:
    from serving.engine import Engine


@dataclass(frozen=True)
class Side:
    """What a process makes its engine of."""

    setting: Setting
    handoff: HandoffOptions


@dataclass(frozen=True)
class Message:
    """A request to begin, or with a ticket to go on with."""

    prompt: tuple[int, ...]
    ticket: Ticket | None = None


@dataclass(frozen=True)
class Half:
    """What one engine did. ttft_ms: to the first token. end_ms: to the end of the request.
    handoff_bytes: what it left beside the whole pages of the prompt, which have ``page_bytes``.
    """

    ticket: Ticket | None
    token_ids: tuple[int, ...]
    ttft_ms: float
    end_ms: float
    encoder_rows: int
    pool_tokens: int
    handoff_bytes: int
    page_bytes: int


def made(side: Side) -> Served:
    """In a process: messages in, halves out."""
    engine, vocabulary = new_engine(side.setting, side.handoff)
    return Served(vocabulary, lambda message: _half(engine, message, side.setting), engine.close)


def _half(engine: "Engine", message: Message, setting: Setting) -> Half:
    from serving.request import Request

    request = Request(message.prompt, setting.answer, ticket=message.ticket)
    if message.ticket is None:
        request = Request(message.prompt, 1, hands_off=True)
    assert engine.kv_pool is not None
    before, began = engine.kv_pool.snapshot().handoff_bytes, time.perf_counter()
    sequence = engine.run([request])[0]
    end_ms = 1e3 * (time.perf_counter() - began)
    result = sequence.result
    if result.fault:
        raise UserError(f"the hand-off is lost: {result.fault}")
    engine.kv_pool.flush()
    return Half(
        sequence.left,
        tuple(result.token_ids),
        result.ttft_ms,
        end_ms,
        result.encoder_rows,
        result.pool_tokens,
        engine.kv_pool.snapshot().handoff_bytes - before,
        sequence.length // setting.page_size * engine.kv_pool.pool.codec.value_bytes,
    )


def measure(setting: Setting, repeats: int) -> list[dict[str, Any]]:
    """Rows of both forms and turns; UserError if a hand-off is lost or rows are encoded twice."""
    rows = []
    for form in FORMS:
        with ExitStack() as running:
            engines = []
            for role in ("prefill", "decode"):
                side = Side(setting, HandoffOptions(role, form))
                engines.append(EngineProcess(made, side))
                running.callback(engines[-1].close)
                vocabulary = engines[-1].ready()
                progress_line(f"{form}: the {role} engine is ready")
            first, second = engines
            halves = _halves(first, second, setting, vocabulary, repeats)
            rows += [_row(form, turn + 1, halves[turn]) for turn in range(2)]
    return rows


def _halves(
    first: EngineProcess, second: EngineProcess, setting: Setting, vocabulary: int, repeats: int
) -> list[list[tuple[Half, Half]]]:
    """Of each turn, what both engines did."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(3, vocabulary, count).tolist())

    found: list[list[tuple[Half, Half]]] = [[], []]
    for _ in range(repeats):
        prompt = tokens(setting.prompt)
        for turn in found:
            begun = first.ask(Message(prompt))
            ended = second.ask(Message(prompt, begun.ticket))
            turn.append((begun, ended))
            prompt = (*prompt, *ended.token_ids, *tokens(setting.message))
    return found


def _row(form: str, turn: int, halves: list[tuple[Half, Half]]) -> dict[str, Any]:
    begun, ended = zip(*halves, strict=True)
    if form == WINDOWS and any(half.encoder_rows for half in ended):
        raise UserError(f"the second engine has encoded {ended[0].encoder_rows} rows")

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 2)

    return {
        "handoff": form,
        "turn": turn,
        "page_bytes": begun[0].page_bytes,
        "handoff_bytes": begun[0].handoff_bytes,
        "prefill_ms": median([half.ttft_ms for half in begun]),
        "leave_ms": median([half.end_ms - half.ttft_ms for half in begun]),
        "take_ms": median([half.ttft_ms for half in ended]),
        "loaded_tokens": ended[0].pool_tokens,
        "encoder_rows": ended[0].encoder_rows,
    }


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("handoff", help="measure what handing requests over costs")
    add_options(parser)
    parser.set_defaults(run=lambda arguments: measured(arguments, measure))
