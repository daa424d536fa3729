"""Metrics of speculative decoding under vLLM's names."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from serving.speculative import SIMULATED, Acceptance, Speculation


class DraftMetrics:
    """Counters of an engine that drafts. They follow the engine's totals."""

    def __init__(self, registry: CollectorRegistry, model_name: str, speculation: Speculation):
        def counter(metric: str, text: str, *labels: str) -> Counter:
            return Counter(metric, text, ("model_name", *labels), registry=registry)

        prefix = "vllm:spec_decode_num"
        self._totals = {
            "steps": counter(f"{prefix}_drafts", "Verifications of a request's drafts"),
            "drafted": counter(f"{prefix}_draft_tokens", "Draft tokens verified"),
            "accepted": counter(f"{prefix}_accepted_tokens", "Draft tokens accepted"),
        }
        positions = {
            "by_position": (
                f"{prefix}_accepted_tokens_per_pos",
                "Accepted draft tokens by position",
            ),
            "tried": ("dsv41_draft_tokens_per_pos", "Draft tokens verified by position"),
        }
        self._by_position = {}
        for field, (name, text) in positions.items():
            made = counter(name, text, "position")
            places = range(speculation.length)
            self._by_position[field] = [made.labels(model_name, str(i)) for i in places]
        self._totals = {name: made.labels(model_name) for name, made in self._totals.items()}
        if speculation.simulated is not None:
            text = "Tokens a step that are taken whatever the model says"
            gauge = Gauge(f"dsv41_{SIMULATED}", text, ("model_name",), registry=registry)
            gauge.labels(model_name).set(speculation.simulated)
        self._shown = Acceptance()

    def show(self, seen: Acceptance) -> None:
        """Bring the counters up to newer totals."""
        for name, total in self._totals.items():
            total.inc(getattr(seen, name) - getattr(self._shown, name))
        for name, totals in self._by_position.items():
            for position, total in enumerate(totals):
                total.inc(getattr(seen, name)[position] - getattr(self._shown, name)[position])
        self._shown = seen
