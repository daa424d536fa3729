"""One streamed completion, timed."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving.bench.workloads import Turn


@dataclass
class Timed:
    """What one request took, in seconds. error: None, or what went wrong."""

    prompt_tokens: int
    started_s: float
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None


async def complete(
    client: httpx.AsyncClient, model: str, turn: Turn, *, ignore_eos: bool, origin: float
) -> Timed:
    """Send a turn to ``/v1/completions`` and read its stream; never raises for a failed request."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(turn.prompt),
        "max_tokens": turn.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    began = time.perf_counter()
    timed = Timed(len(turn.prompt), began - origin)
    try:
        await _stream(client, body, timed, began)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        timed.error = type(error).__name__
    timed.e2e_s = time.perf_counter() - began
    return timed


async def _stream(
    client: httpx.AsyncClient, body: dict[str, Any], timed: Timed, began: float
) -> None:
    last, chunks = None, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            timed.error = f"HTTP {response.status_code}"
            return
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                timed.error = str(event["error"].get("type", "error"))
            if event.get("choices"):
                now = time.perf_counter()
                chunks += 1
                if last is None:
                    timed.ttft_s = now - began
                else:
                    timed.gaps_s.append(now - last)
                last = now
            usage = event.get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            timed.output_tokens = usage.get("completion_tokens", timed.output_tokens or chunks)
            timed.cached_tokens = details.get("cached_tokens", 0) or timed.cached_tokens
