"""The same trace through Dynamo's mocker: hits and first tokens agree.

Needs ``ai-dynamo-runtime`` (the extra ``route``). Both have 12 workers of one rank, prefill steps
of 100 ms up to 8,192 tokens, and requests that end with their first token.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from serving.bench.workloads import Scale, mooncake
from serving.simulate.fleet import Model, Simulation
from serving.simulate.measure import figures
from serving.simulate.policies import POLICIES
from serving.simulate.scenario import Window
from serving.simulate.sessions import Trace
from tests.serving.simulate.support import small

WORKERS, BLOCK, STEP_MS = 12, 512, 100.0
SHAPES = [[1, 512], [1, 8192], [2, 4096], [4, 2048], [8, 1024], [16, 512]]
ENGINE = {
    "backend": "vllm",
    "block_size": BLOCK,
    "num_gpu_blocks": 10_000,
    "max_num_batched_tokens": 8192,
    "timing_model": {"type": "fixed", "prefill_ms": STEP_MS, "decode_ms": 10.0},
}


class Fixed:
    """The mocker's fixed step times."""

    def encode(self, requests: int, rows: int, context: int) -> float:
        return 1e3 * STEP_MS

    def replay(self, requests: int, context: int) -> float:
        return 0.0

    def decode(self, requests: int, context: int) -> float:
        return 1e4


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    """Documents that are asked about several times, at random times."""
    rng = np.random.default_rng(0)
    lines, next_id = [], 1000
    for document in range(60):
        shared = [document * 16 + i for i in range(int(rng.integers(2, 16)))]
        for _ in range(int(rng.integers(2, 14))):
            own = list(range(next_id, next_id + int(rng.integers(1, 8))))
            next_id += len(own)
            tokens = BLOCK * (len(shared) + len(own)) - int(rng.integers(1, BLOCK))
            lines.append({
                "timestamp": int(rng.integers(0, 12_000)),
                "input_length": tokens,
                "output_length": 1,
                "hash_ids": shared + own,
            })  # fmt: skip
    lines.sort(key=lambda line: line["timestamp"])
    file = tmp_path_factory.mktemp("mocker") / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def mocked(trace: str, mode: str) -> tuple[float, float]:
    """Hit rate and mean TTFT in seconds of the mocker."""
    replay = pytest.importorskip("dynamo._core").run_mocker_trace_replay
    found = replay(
        [trace],
        extra_engine_args={"engine": ENGINE, "dp_size": 1},
        num_workers=WORKERS,
        router_mode=mode,
        trace_block_size=BLOCK,
        capture_per_request=True,
    ).per_request
    reused = sum(request["reused_input_tokens"] for request in found)
    sent = sum(request["input_length"] for request in found)
    return reused / sent, sum(request["ttft_ms"] for request in found) / len(found) / 1e3


def ours(trace: str, policy: str) -> tuple[float, float]:
    scenario = small(
        fleet__instances=WORKERS, fleet__role="both", fleet__decode_sizes=[64],
        fleet__page_tokens=BLOCK, fleet__grain=16, fleet__slots=64,
        fleet__shapes=SHAPES, fleet__cache_gb=ENGINE["num_gpu_blocks"] * BLOCK * 100 / 1e9,
        workload__max_context=65536, fleet__hop_ms=0,
    )  # fmt: skip
    scenario = replace(scenario, window=Window(0.0, float("inf")))
    source = Trace(mooncake(trace, vocabulary=2**31 - 1, scale=Scale(1 / 16)), at_once=1)
    model = Model(ranks=1, window=128, token_bytes=100.0)
    run = Simulation(scenario, POLICIES[policy], model, Fixed(), source)
    row = figures(run.run(), WORKERS)
    return row["hit_rate"], row["ttft_mean_s"]


@pytest.mark.parametrize(
    ("policy", "mode", "hits"),
    [("round_robin", "round_robin", 0.002), ("workload_aware", "kv_router", 0.03)],
)
def test_hits_and_first_tokens_agree(trace, policy, mode, hits):
    """With the same placement the hits are the same; the routers break ties differently. Buckets
    pad what the mocker packs, which costs some steps.
    """
    their_hits, their_ttft = mocked(trace, mode)
    our_hits, our_ttft = ours(trace, policy)
    assert our_hits == pytest.approx(their_hits, abs=hits)
    assert our_ttft == pytest.approx(their_ttft, rel=0.1)
