"""A fleet small enough for tests, with step times that can be reckoned by hand."""

from dataclasses import dataclass

from serving.simulate.fleet import Model, Simulation
from serving.simulate.measure import Record
from serving.simulate.policies import POLICIES
from serving.simulate.scenario import Scenario, parse
from serving.simulate.sessions import Generator

MODEL = Model(ranks=2, window=32, token_bytes=100.0)
_SMALL = {
    "name": "small",
    "about": "tests",
    "sources": [],
    "workload": {
        "sessions": 40,
        "groups": 2,
        "shared": 256,
        "opening": {"median": 100, "sigma": 0.5, "most": 1000},
        "turns": {"median": 4, "sigma": 0.5, "most": 12},
        "turn_input": {"median": 100, "sigma": 1.0, "most": 2000},
        "output": {"median": 60, "sigma": 0.5, "most": 300},
        "think_s": {"median": 1.0, "sigma": 0.5, "most": 5.0},
        "max_context": 4096,
    },
    "fleet": {
        "layout": "dep2",
        "instances": 2,
        "role": "prefill",
        "cache_gb": 0.01,
        "slots": 8,
        "page_tokens": 64,
        "grain": 16,
        "shapes": [[1, 128], [1, 512], [2, 256], [4, 128]],
        "decode_tokens_per_s": 50,
    },
    "clock": {"hardware": "gb300", "settings": ["launch_us=1.5", "collective_us=5"]},
    "pool": {"capacity_gb": 1, "link_gbps": 1, "lookup_ms": 1},
    "window": {"settle_s": 2, "measure_s": 10},
}


@dataclass(frozen=True)
class Simple:
    """A microsecond a row, a millisecond a program, or ``factor`` times as much."""

    factor: float = 1.0

    def encode(self, requests: int, rows: int, context: int) -> float:
        return self.factor * (1000 + requests * rows + context / 100)

    def replay(self, requests: int, context: int) -> float:
        return self.factor * (1000 + 32 * requests)

    def decode(self, requests: int, context: int) -> float:
        return 1000 + requests


def small(**values) -> Scenario:
    """The small scenario; ``part__name=value`` for other values."""
    scenario = parse(_SMALL)
    return scenario.with_values({name.replace("__", "."): v for name, v in values.items()})


def simulation(
    scenario: Scenario, policy: str, seed: int = 0, source=None, factor: float = 1.0
) -> Simulation:
    fleet = scenario.fleet
    rate = fleet.decode_tokens_per_s if fleet.role == "prefill" else 0.0
    source = source or Generator(scenario.workload, fleet.grain, rate, seed)
    return Simulation(scenario, POLICIES[policy], MODEL, Simple(factor), source)


def simulated(scenario: Scenario, policy: str, seed: int = 0, factor: float = 1.0) -> Record:
    return simulation(scenario, policy, seed, factor=factor).run()
