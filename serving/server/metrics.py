"""Prometheus metrics under vLLM's names, so that its dashboards and load tools read them."""

import math
import time
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dsv41_jax.process_memory import ProcessMemory
from serving.engine import Engine
from serving.kv_pool.counts import Totals
from serving.scheduler import Scheduler
from serving.server.draft_metrics import DraftMetrics
from serving.server.pool_metrics import PoolMetrics
from serving.speculative import Acceptance, Speculation

if TYPE_CHECKING:
    from serving.server.worker import Choice

Metric = TypeVar("Metric", Gauge, Counter)

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_S += (20, 40, 80, 160, 640, 2560)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1)
_GAP_S += (2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
_REQUEST_S += (480, 960, 1920, 7680)


@dataclass(frozen=True)
class RankSnapshot:
    """A data rank. kv_usage: share of its pages that running requests hold."""

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class Snapshot:
    """The engine between two steps. acceptance, pool: copies of its totals."""

    ranks: tuple[RankSnapshot, ...]
    compiles: int
    acceptance: Acceptance
    pool: Totals | None


def snapshot(engine: Engine) -> Snapshot:
    """To be called on the engine's thread."""
    return Snapshot(
        ranks=tuple(map(_of_rank, engine.ranks)),
        compiles=engine.compiles.count,
        acceptance=deepcopy(engine.acceptance),
        pool=None if engine.kv_pool is None else engine.kv_pool.snapshot(),
    )


def _of_rank(rank: Scheduler) -> RankSnapshot:
    held = {page for sequence in rank.running for page in sequence.pages}
    return RankSnapshot(
        running=len(rank.running),
        waiting=len(rank.waiting) + len(rank.swapped),
        kv_usage=len(held) / rank.pool.pages,
    )


class Metrics:
    """One registry a server; of the event loop's thread alone. Label ``engine`` is the data
    rank.
    """

    def __init__(
        self,
        model_name: str,
        speculation: Speculation | None = None,
        ranks: int = 1,
        *,
        pool: bool = False,
    ):
        self.registry = CollectorRegistry()
        name = {"model_name": model_name}

        def counter(metric: str, text: str) -> Counter:
            return _labelled(Counter(metric, text, tuple(name), registry=self.registry), name)

        def gauge(metric: str, text: str) -> Gauge:
            return _labelled(Gauge(metric, text, tuple(name), registry=self.registry), name)

        def of_ranks(kind: type[Metric], metric: str, text: str) -> list[Metric]:
            made = kind(metric, text, (*name, "engine"), registry=self.registry)
            return [made.labels(model_name, str(rank)) for rank in range(ranks)]

        def histogram(metric: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(metric, text, tuple(name), registry=self.registry, buckets=buckets)
            return _labelled(made, name)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "To the first token", _TTFT_S)
        self._gap = histogram("vllm:inter_token_latency_seconds", "Between two tokens", _GAP_S)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Whole requests", _REQUEST_S)
        self._running = of_ranks(Gauge, "vllm:num_requests_running", "Requests in a slot")
        self._waiting = of_ranks(Gauge, "vllm:num_requests_waiting", "Requests without a slot")
        self._usage = of_ranks(Gauge, "vllm:kv_cache_usage_perc", "Share of pages in use, 1 is all")
        self._queries = of_ranks(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up")
        self._hits = of_ranks(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the cache")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that started")
        self._generated = counter("vllm:generation_tokens", "Tokens generated")
        self._compiles = gauge("dsv41_compiles_after_warmup", "Programs compiled while serving")
        labels, text = (*name, "kind"), "Pages of host memory that the server has touched"
        memory = Gauge("dsv41_memory_bytes", text, labels, registry=self.registry)
        kinds = [kind.name for kind in fields(ProcessMemory)]
        self._memory = {kind: memory.labels(model_name, kind) for kind in kinds}
        self.empty_answers = counter("dsv41_empty_answers", "Answers that stopped without content")
        self._drafts = None
        if speculation is not None:
            self._drafts = DraftMetrics(self.registry, model_name, speculation)
        self._pool = PoolMetrics(self.registry, model_name) if pool else None
        labels = (*name, "finished_reason")
        ended = Counter("vllm:request_success", "Ended requests", labels, registry=self.registry)
        reasons = ("stop", "length", "abort", "error")
        self._ended = {reason: ended.labels(model_name, reason) for reason in reasons}

    def token(self, choice: "Choice", now: float) -> None:
        """A token came; the first one also says what the prefix cache gave."""
        self._generated.inc()
        if choice.last_token_at:
            self._gap.observe(now - choice.last_token_at)
        else:
            length = len(choice.request.prompt)
            self._ttft.observe(now - choice.added_at)
            self._prompt.inc(length)
            self._queries[choice.data_rank].inc(length)
            self._hits[choice.data_rank].inc(choice.cached_tokens)
        choice.last_token_at = now

    def finished(self, choice: "Choice", reason: str) -> None:
        self._ended[reason].inc()
        self._e2e.observe(time.perf_counter() - choice.added_at)

    def show(self, state: Snapshot) -> None:
        for number, rank in enumerate(state.ranks):
            self._running[number].set(rank.running)
            self._waiting[number].set(rank.waiting)
            self._usage[number].set(rank.kv_usage)
        self._compiles.set(state.compiles)
        if self._drafts is not None:
            self._drafts.show(state.acceptance)
        if self._pool is not None and state.pool is not None:
            self._pool.show(state.pool)

    def show_memory(self, memory: ProcessMemory | None) -> None:
        """What the process holds now; None where the system does not tell."""
        for kind, gauge in self._memory.items():
            gauge.set(math.nan if memory is None else getattr(memory, kind))

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _labelled(metric, labels: dict[str, str]):
    return metric.labels(**labels)
