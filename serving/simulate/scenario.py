"""What is simulated: a file of plain numbers, written before any result."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv41_jax.errors import UserError, raise_problems
from serving.simulate.plain import build

FOLDER = Path(__file__).parent / "scenarios"
ROLES = ("prefill", "both")


@dataclass(frozen=True)
class Lognormal:
    """A quantity: its median, the sigma of its logarithm, and where it is cut off."""

    median: float
    sigma: float
    most: float


@dataclass(frozen=True)
class Workload:
    """Sessions that are open at any time; what one does.

    A prompt is the shared text of one of ``groups`` agents, what opens the session, then outputs
    and inputs of the turns so far; a session ends after its turns or before a prompt would pass
    ``max_context``. shared, opening, turn_input, output: tokens. think_s: from the last token of a
    turn to the next turn. steady: sessions are in the middle at the start, with what came before in
    the caches.
    """

    sessions: int
    groups: int
    shared: int
    opening: Lognormal
    turns: Lognormal
    turn_input: Lognormal
    output: Lognormal
    think_s: Lognormal
    max_context: int
    steady: bool = True


@dataclass(frozen=True)
class Fleet:
    """Instances of one layout, their data ranks and what each rank has.

    role prefill: a request ends with its first token and other machines decode at
    ``decode_tokens_per_s`` a user. grain: tokens that one simulated id stands for; every other
    count of tokens must be a multiple of it. shapes: (requests, rows) of prefill dispatches.
    hop_ms: what goes between the router and a rank takes, either way.
    """

    layout: str
    instances: int
    role: str
    cache_gb: float
    slots: int
    page_tokens: int
    grain: int
    shapes: tuple[tuple[int, int], ...]
    decode_sizes: tuple[int, ...] = (1,)
    decode_tokens_per_s: float = 0.0
    hop_ms: float = 2.0


@dataclass(frozen=True)
class Clock:
    """Where step times come from: the estimate of a machine, or ``curves``, a file of measured
    ones. efficiency: share of the estimate's speed that is assumed to be reached.
    """

    hardware: str
    settings: tuple[str, ...] = ()
    efficiency: float = 1.0
    curves: str = ""


@dataclass(frozen=True)
class Pool:
    """capacity_gb: of all hosts together. A page comes to a rank's host at ``link_gbps``, after the
    lookup and one load after the other, and at the same rate from there in the step that needs it.
    """

    capacity_gb: float
    link_gbps: float
    lookup_ms: float
    credit: float = 0.75


@dataclass(frozen=True)
class Window:
    """Simulated seconds before anything is counted, and while it is."""

    settle_s: float
    measure_s: float


@dataclass(frozen=True)
class Scenario:
    """A file. parameters: names of other sets, each with the values (``part.name``) it changes."""

    name: str
    about: str
    sources: tuple[str, ...]
    workload: Workload
    fleet: Fleet
    clock: Clock
    pool: Pool
    window: Window
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> "Scenario":
        """The scenario with some of its values (``part.name``) replaced; UserError for a name that
        is none or a value that is not allowed.
        """
        document = asdict(self)
        for path, value in values.items():
            *parents, last = path.split(".")
            inner = document
            for parent in parents:
                inner = inner.get(parent) if isinstance(inner, dict) else None
            if not parents or not isinstance(inner, dict) or last not in inner:
                raise UserError(f"scenario {self.name}: it has no value {path!r}")
            inner[last] = value
        return parse(document)

    def with_parameters(self, name: str) -> "Scenario":
        """One of its sets of parameters; "base" is the scenario itself."""
        if name == "base":
            return self
        if name not in self.parameters:
            known = ", ".join(("base", *self.parameters))
            raise UserError(f"parameters {name!r}: must be one of {known}")
        return replace(self.with_values(self.parameters[name]), parameters=self.parameters)


def names() -> list[str]:
    """Scenarios that come with the program."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name: str) -> Scenario:
    """A scenario by its name, or a file of one; UserError that says what is wrong with it."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not name.endswith(".json") and not path.is_file():
        raise UserError(f"scenario {name!r}: must be a .json file or one of {', '.join(names())}")
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"scenario {name}: cannot be read: {error}") from None
    return parse(document)


def parse(document: Any) -> Scenario:
    """A scenario from plain values; UserError that names every wrong one."""
    problems: list[str] = []
    scenario = build(Scenario, document, "", problems)
    if not problems:
        problems += _wrong(scenario)
    if problems:
        raise_problems("scenario", problems)
    return scenario


def _wrong(scenario: Scenario) -> Iterable[str]:
    """What plain types do not say."""
    fleet, work, pool, window = scenario.fleet, scenario.workload, scenario.pool, scenario.window
    positive = {
        "workload.sessions": work.sessions, "workload.groups": work.groups,
        "workload.max_context": work.max_context, "fleet.instances": fleet.instances,
        "fleet.cache_gb": fleet.cache_gb, "fleet.slots": fleet.slots,
        "fleet.page_tokens": fleet.page_tokens, "fleet.grain": fleet.grain,
        "clock.efficiency": scenario.clock.efficiency, "pool.link_gbps": pool.link_gbps,
        "window.measure_s": window.measure_s,
    }  # fmt: skip
    yield from (
        f"{name}: {value} must be above 0" for name, value in positive.items() if value <= 0
    )
    for name in ("opening", "turns", "turn_input", "output", "think_s"):
        law = getattr(work, name)
        if not (0 < law.median <= law.most and law.sigma >= 0):
            yield f"workload.{name}: must have 0 < median <= most and sigma >= 0"
    if not 0 <= pool.credit <= 1:
        yield f"pool.credit: {pool.credit} must be between 0 and 1"
    for name, value in (
        ("pool.capacity_gb", pool.capacity_gb),
        ("pool.lookup_ms", pool.lookup_ms),
        ("fleet.hop_ms", fleet.hop_ms),
    ):
        if value < 0:
            yield f"{name}: {value} must be at least 0"
    if work.shared < 0 or window.settle_s < 0:
        yield "workload.shared and window.settle_s: must be at least 0"
    if fleet.role not in ROLES:
        yield f"fleet.role: {fleet.role!r} must be one of {', '.join(ROLES)}"
    elif fleet.role == "prefill" and fleet.decode_tokens_per_s <= 0:
        yield "fleet.decode_tokens_per_s: must be above 0 where other machines decode"
    if not fleet.shapes or any(min(shape) < 1 for shape in fleet.shapes):
        yield "fleet.shapes: must be pairs of positive numbers"
    if fleet.role == "both" and max(fleet.decode_sizes, default=0) < fleet.slots:
        yield f"fleet.decode_sizes: the largest must reach slots={fleet.slots}"
    if fleet.grain > 0:
        counts = {"page_tokens": fleet.page_tokens} | {
            f"shapes ({requests}, {rows})": rows for requests, rows in fleet.shapes
        }
        for name, count in counts.items():
            if count % fleet.grain:
                yield f"fleet.{name}: must be a multiple of grain={fleet.grain}"
