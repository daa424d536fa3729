"""What a load test sends: synthetic prompts, Mooncake traces, multi-turn agent traces."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv41_jax.errors import UserError

MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class Turn:
    """One request: prompt ids, tokens to generate, seconds to wait after the turn before it."""

    prompt: tuple[int, ...]
    output_tokens: int
    delay_s: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """Turns in order; start_s is when the first may start, None for as soon as there is room."""

    turns: tuple[Turn, ...]
    start_s: float | None = None


@dataclass(frozen=True)
class Scale:
    """How token counts and delays of a trace are shrunk to a model and a machine.

    Lengths are multiplied by ``tokens`` and cut at ``max_tokens`` (prompt and output together),
    delays and start times by ``time``.
    """

    tokens: float = 1.0
    time: float = 1.0
    max_tokens: int = 1 << 20

    def lengths(self, prompt: int, output: int) -> tuple[int, int]:
        new = max(1, min(round(output * self.tokens), self.max_tokens - 1))
        return max(1, min(round(prompt * self.tokens), self.max_tokens - new)), new


def synthetic(
    *,
    conversations: int,
    turns: int,
    prompt_tokens: int,
    output_tokens: int,
    shared_tokens: int,
    vocabulary: int,
    seed: int,
) -> list[Conversation]:
    """Random ids: a prefix shared by all, then turns that each grow the prompt by as much."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, vocabulary, count).tolist())

    shared, made = ids(shared_tokens), []
    for _ in range(conversations):
        prompt, growing = shared, []
        for _ in range(turns):
            prompt = prompt + ids(prompt_tokens)
            growing.append(Turn(prompt, output_tokens))
            prompt = prompt + ids(output_tokens)
        made.append(Conversation(tuple(growing)))
    return made


def mooncake(path: str, *, vocabulary: int, scale: Scale) -> list[Conversation]:
    """JSONL of {timestamp (ms), input_length, output_length, hash_ids}, 512 tokens a hash."""
    made = []
    for line, record in _json_lines(path):
        with _named(f"{path}: line {line}"):
            blocks, length = record["hash_ids"], record["input_length"]
            new, seconds = record["output_length"], record["timestamp"] / 1e3
            turn = _turn(blocks, MOONCAKE_BLOCK, length, new, 0.0, "", vocabulary, scale)
            made.append(Conversation((turn,), seconds * scale.time))
    return made


def agents(path: str, *, vocabulary: int, scale: Scale) -> list[Conversation]:
    """Multi-turn traces in the Weka/AgentX schema: a file of one JSON object, or JSONL of them.

    A subagent's requests run where it was called; the agent waits for them.
    """
    made = []
    for line, record in _json_lines(path):
        with _named(f"{path}: record {line}"):
            scope = "" if record.get("hash_id_scope") == "global" else str(record["id"])
            size = record["block_size"]
            turns = tuple(
                _turn(r["hash_ids"], size, r["in"], r["out"], wait, scope, vocabulary, scale)
                for r, wait in _agent_requests(record["requests"])
            )
            made.append(Conversation(turns))
    return made


def _agent_requests(requests: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    for request in requests:
        if request["type"] == "subagent":
            yield from _agent_requests(request["requests"])
        else:
            yield request, request.get("think_time", 0.0)


def _turn(
    blocks: list[int],
    block_size: int,
    prompt: int,
    output: int,
    delay_s: float,
    scope: str,
    vocabulary: int,
    scale: Scale,
) -> Turn:
    """A prompt whose blocks of ids follow from the trace's block hashes."""
    length, new = scale.lengths(prompt, output)
    size = max(1, round(block_size * scale.tokens))
    ids: list[int] = []
    for block in blocks:
        if len(ids) >= length:
            break
        ids += _block_ids(scope, block, size, vocabulary)
    ids += _block_ids(scope, (*blocks, "tail"), max(length - len(ids), 0), vocabulary)
    return Turn(tuple(ids[:length]), new, delay_s * scale.time)


def _block_ids(scope: str, block: object, size: int, vocabulary: int) -> list[int]:
    seed = np.frombuffer(repr((scope, block)).encode().ljust(8, b"\0"), np.uint8)
    return np.random.default_rng(seed).integers(3, vocabulary, size).tolist()


def _json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        whole = json.loads(text)
        records = whole if isinstance(whole, list) else [whole]
    except json.JSONDecodeError:
        records = None
    for number, line in enumerate(records or filter(str.strip, text.splitlines()), 1):
        with _named(f"{path}: record {number}"):
            record = json.loads(line) if isinstance(line, str) else line
            if not isinstance(record, dict):
                raise ValueError("must be a JSON object")
        yield number, record


class _named:
    """Turns what a foreign record does wrong into a UserError that says where."""

    def __init__(self, where: str):
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError)) and not isinstance(
            error, UserError
        ):
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{self.where}: {what}") from None
