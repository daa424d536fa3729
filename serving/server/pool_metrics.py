"""Metrics of the pool of cached pages: vLLM's names where it has them."""

from prometheus_client import CollectorRegistry, Counter

from serving.kv_pool.counts import Totals

_PREFIX = "dsv41_kv_pool"
_SINGLE = {
    "queried_tokens": ("vllm:external_prefix_cache_queries", "Prompt tokens asked for in the pool"),
    "hit_tokens": ("vllm:external_prefix_cache_hits", "Prompt tokens taken from the pool"),
    "lookups": (f"{_PREFIX}_lookups", "Requests that asked the pool"),
    "refreshed": (f"{_PREFIX}_refreshed_pages", "Pages kept by their use on the device"),
    "loaded": (f"{_PREFIX}_loaded_pages", "Pages that came in time"),
    "stored": (f"{_PREFIX}_stored_pages", "Pages put into the pool, or there already"),
    "errors": (f"{_PREFIX}_errors", "Calls of the backend that failed"),
    "foreign_pools": (f"{_PREFIX}_foreign_pools", "Pools made for something else, not used"),
    "steps": (f"{_PREFIX}_steps", "Steps dispatched"),
    "idle_s": (f"{_PREFIX}_idle_seconds", "Time with nothing to run but waiting for the pool"),
    "handoff_bytes": ("dsv41_handoff_bytes", "Of hand-offs that were left, beside whole pages"),
}
_BY_REASON = {
    (f"{_PREFIX}_wait_seconds", "Time that requests waited", "reason"): {
        "lookup": "lookup_s",
        "load": "load_s",
    },
    (f"{_PREFIX}_given_up", "Requests that did not wait for the pool", "reason"): {
        "lookup": "late_lookups",
        "load": "late_loads",
        "no_answer": "skipped",
    },
    (f"{_PREFIX}_unusable_pages", "Pages found that were computed instead", "reason"): {
        "lost": "lost",
        "corrupt": "corrupt",
        "foreign": "foreign",
        "late": "late",
    },
    (f"{_PREFIX}_unstored_pages", "Pages that were not put into the pool", "reason"): {
        "full": "refused",
        "backlog": "dropped",
    },
    (f"{_PREFIX}_starved_steps", "Steps with room for a request that waited", "reason"): {
        "lookup": "starved_lookups",
        "load": "starved_loads",
    },
    ("dsv41_handoffs", "Requests shared with another engine", "event"): {
        "left": "handoffs_left",
        "taken": "handoffs_taken",
        "lost": "handoffs_lost",
    },
}


class PoolMetrics:
    """Counters of an engine with a pool. They follow the engine's totals."""

    def __init__(self, registry: CollectorRegistry, model_name: str):
        self._counters = {}
        for field, (name, text) in _SINGLE.items():
            made = Counter(name, text, ("model_name",), registry=registry)
            self._counters[field] = made.labels(model_name)
        for (name, text, label), reasons in _BY_REASON.items():
            made = Counter(name, text, ("model_name", label), registry=registry)
            for reason, field in reasons.items():
                self._counters[field] = made.labels(model_name, reason)
        self._shown = Totals()

    def show(self, seen: Totals) -> None:
        """Bring the counters up to newer totals."""
        for field, counter in self._counters.items():
            counter.inc(getattr(seen, field) - getattr(self._shown, field))
        self._shown = seen
