"""Small traces in the Weka/AgentX schema: agents whose prompts grow, and their subagents."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dsv41_jax.errors import UserError

BLOCK = 64
_SYSTEM_BLOCKS = 3
_PAUSE_S = 0.3


def write_traces(folder: Path, *, model: str, sessions: int, turns: int, seed: int) -> list[Path]:
    """A file a session. ``turns`` of the agent; half way through it waits for a subagent of two
    turns, which shares the first blocks of its prompt. A turn adds 64 to 192 tokens and asks for 8
    to 64. ``UserError`` for counts below 1.
    """
    if sessions < 1 or turns < 1:
        raise UserError(f"--sessions {sessions} and --turns {turns} must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(sessions):
        rng = np.random.default_rng((seed, number))
        path = folder / f"agent-{number:03d}.json"
        path.write_text(json.dumps(_Trace(f"agent-{number:03d}", model, rng).record(turns)))
        paths.append(path)
    return paths


class _Trace:
    """One session on its way; ``time_s`` and ``blocks`` are where it stands."""

    def __init__(self, name: str, model: str, rng: np.random.Generator):
        self.name, self.model, self.rng = name, model, rng
        self.time_s, self.blocks = 0.0, 0

    def record(self, turns: int) -> dict[str, Any]:
        requests, prompt = [], self._new(_SYSTEM_BLOCKS)
        for turn in range(turns):
            if turn and turn == turns // 2:
                requests.append(self._subagent(prompt[:_SYSTEM_BLOCKS]))
            prompt = prompt + self._new(int(self.rng.integers(1, 4)))
            requests.append(self._request(prompt, "end_turn" if turn == turns - 1 else "tool_use"))
        return {
            "id": self.name,
            "models": [self.model],
            "block_size": BLOCK,
            "hash_id_scope": "local",
            "tool_tokens": BLOCK,
            "system_tokens": BLOCK,
            "requests": requests,
        }

    def _subagent(self, shared: list[int]) -> dict[str, Any]:
        began = self.time_s
        first = shared + self._new(2)
        inner = [self._request(first, "tool_use")]
        inner.append(self._request(first + self._new(1), "end_turn"))
        return {
            "t": began,
            "type": "subagent",
            "agent_id": "agent_001",
            "subagent_type": "Explore",
            "duration_ms": round(1e3 * (self.time_s - began)),
            "total_tokens": sum(request["in"] + request["out"] for request in inner),
            "tool_use_count": 1,
            "status": "completed",
            "requests": inner,
            "models": [self.model],
        }

    def _request(self, prompt: list[int], stop: str) -> dict[str, Any]:
        began, output = self.time_s, int(self.rng.integers(8, 65))
        took = 0.01 * output
        self.time_s += took + _PAUSE_S
        return {
            "t": began,
            "type": "s",
            "model": self.model,
            "in": len(prompt) * BLOCK - int(self.rng.integers(BLOCK)),
            "out": output,
            "hash_ids": list(prompt),
            "input_types": ["text"],
            "output_types": ["text"],
            "stop": stop,
            "api_time": took,
            "think_time": _PAUSE_S,
        }

    def _new(self, count: int) -> list[int]:
        self.blocks += count
        return list(range(self.blocks - count, self.blocks))
