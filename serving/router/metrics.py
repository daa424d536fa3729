"""Metrics of the router, under names of its own; label ``worker`` is a worker's URL."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from serving.router.fleet import Fleet
from serving.router.policy import Placed

_STATES = ("up", "draining", "down", "refused")


class Metrics:
    """One registry a router; of the event loop's thread alone."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            name = f"dsv41_router_{name}"
            return Counter(name, text, ("worker", *labels), registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            name = f"dsv41_router_{name}"
            return Gauge(name, text, ("worker", *labels), registry=self.registry)

        self._requests = counter("requests", "Requests sent to a data rank", "rank")
        self.failures = counter("failures", "Requests that it did not take", "reason")
        self.retries = counter("retries", "Requests taken over from another worker")
        self.broken = counter("broken_answers", "Answers that ended in an error on their way")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests sent")
        self._cached = counter("cached_tokens", "Of these, known to be on the rank's device")
        self._pooled = counter("pooled_tokens", "Of these, known to be in its pool only")
        self.events = counter("kv_events", "Events of caches")
        self.cleared = counter("kv_resets", "Times that a data rank's cache was followed anew")
        self._in_flight = gauge("in_flight", "Requests on their way", "rank")
        self._state = gauge("worker_state", "1 for the state that it is in", "state")
        self.lost = Counter(
            "dsv41_router_lost_handoffs",
            "Prompts computed again as their hand-off was lost",
            registry=self.registry,
        )
        self._waiting = Gauge(
            "dsv41_router_waiting", "Requests that wait for a rank", registry=self.registry
        )
        for member in fleet:
            for made in (self.retries, self.broken, self.events, self.cleared):
                made.labels(member.url)

    def sent(self, placed: Placed) -> None:
        """A request goes to its rank."""
        worker, overlap = placed.target.worker, placed.overlap
        self._requests.labels(worker, str(placed.target.rank)).inc()
        self._prompt.labels(worker).inc(len(placed.prompt.tokens))
        self._cached.labels(worker).inc(overlap.cached)
        self._pooled.labels(worker).inc(max(overlap.pooled - overlap.cached, 0))

    def render(self, waiting: int) -> bytes:
        self._waiting.set(waiting)
        self._in_flight.clear()  # ranks come and go
        for member in self._fleet:
            for state in _STATES:
                self._state.labels(member.url, state).set(member.state == state)
            for target in member.targets:
                running = sum(hop.placed.target == target for hop in member.hops)
                self._in_flight.labels(member.url, str(target.rank)).set(running)
        return generate_latest(self.registry)
