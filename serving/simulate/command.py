"""`python -m serving.simulate`: fleets on a simulated clock.

python -m serving.simulate --scenario 12xdep2 --policies affinity,pool_workload_aware
python -m serving.simulate --scenario 12xdep2 --parameters all --json rows.json --plot rows.png
python -m serving.simulate --scenario 3xdep2-4800 --mooncake trace.jsonl --value fleet.instances=1
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsv41_jax.command import exit_status, output_file, progress_line
from dsv41_jax.errors import UserError
from serving.bench.workloads import Conversation, Scale, agents, mooncake
from serving.simulate.fleet import Simulation
from serving.simulate.measure import Record, figures
from serving.simulate.policies import POLICIES
from serving.simulate.report import Row, plot, table
from serving.simulate.scenario import Scenario, Window, names, read
from serving.simulate.sessions import Generator, Source, Trace
from serving.simulate.setting import Setting, setting
from sharding.plot import plotting

_IDS = 2**31 - 1
_PROGRESS_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Run simulations; returns the exit status (0, or 2 for bad input)."""
    arguments = _parser().parse_args(argv)
    return exit_status(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario", default="12xdep2", help=f"{', '.join(names())} or a .json file (12xdep2)"
    )
    parser.add_argument(
        "--parameters", default="base", metavar="A,B",
        help="sets of parameters that the scenario names, base or all",
    )  # fmt: skip
    parser.add_argument(
        "--policies", default="affinity,pool_workload_aware", metavar="A,B",
        help=f"of {', '.join(POLICIES)}, or all",
    )  # fmt: skip
    parser.add_argument(
        "--value", action="append", default=[], metavar="PART.NAME=VALUE",
        help="another value of the scenario, as JSON; after those of its sets",
    )  # fmt: skip
    parser.add_argument("--hardware", help="take step times of h200, gb300 or rubin")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE",
        help="a figure of that hardware, as in sharding.sweep",
    )  # fmt: skip
    traces = parser.add_mutually_exclusive_group()
    traces.add_argument("--mooncake", metavar="FILE", help="take requests from a Mooncake trace")
    traces.add_argument("--agents", metavar="FILE", help="take them from Weka/AgentX traces")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of a trace")
    parser.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="of a trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="the same numbers for programs")
    parser.add_argument("--plot", metavar="FILE.png")
    return parser


@dataclass(frozen=True)
class Runs:
    """Every policy on every set of parameters. trace: None for generated sessions."""

    scenarios: dict[str, Scenario]
    settings: dict[str, Setting]
    policies: list[str]
    trace: list[Conversation] | None
    seed: int

    @property
    def title(self) -> str:
        scenario, used = next(iter(self.scenarios.values())), next(iter(self.settings.values()))
        return f"{scenario.name}: {used.label}"

    def rows(self) -> tuple[list[Row], list[Sequence[float]]]:
        """A row for each, and its TTFTs in seconds."""
        rows, waits = [], []
        for name in self.scenarios:
            for policy in self.policies:
                record = self._record(name, policy)
                head = {
                    "scenario": self.scenarios[name].name,
                    "parameters": name,
                    "policy": policy,
                    "seed": self.seed,
                    "projection": self.settings[name].projection,
                }
                rows.append(head | figures(record, self.settings[name].gpus))
                waits.append(record.requests.ttft_s)
        return rows, waits

    def _record(self, name: str, policy: str) -> Record:
        scenario, used = self.scenarios[name], self.settings[name]
        run = Simulation(scenario, POLICIES[policy], used.model, used.times, self._source(scenario))
        began = time.perf_counter()
        # Nothing here is cyclic, and the collector would walk through millions of pages.
        gc.disable()
        try:
            record = run.run(_progress(f"{name}, {policy}"))
        finally:
            gc.enable()
        seconds = time.perf_counter() - began
        progress_line(f"{name}, {policy}: {run.arrived} requests simulated in {seconds:.0f} s")
        return record

    def _source(self, scenario: Scenario) -> Source:
        work, fleet = scenario.workload, scenario.fleet
        if self.trace is not None:
            return Trace(self.trace, work.sessions)
        rate = fleet.decode_tokens_per_s if fleet.role == "prefill" else 0.0
        return Generator(work, fleet.grain, rate, self.seed)


def _run(arguments: argparse.Namespace) -> None:
    runs = read_runs(arguments)
    with ExitStack() as files:
        picture = out = None
        if arguments.plot:
            plotting(arguments.plot)
            picture = files.enter_context(output_file(arguments.plot))
        if arguments.json:
            out = files.enter_context(output_file(arguments.json))
        rows, waits = runs.rows()
        if picture:
            plot(rows, waits, runs.title, picture)
        if out:
            document = {
                "rows": rows,
                "step_times": runs.title,
                "scenarios": {name: asdict(each) for name, each in runs.scenarios.items()},
            }
            out.write(json.dumps(document, indent=1).encode() + b"\n")
        print("\n".join([runs.title, "", *table(rows)]))


def read_runs(arguments: argparse.Namespace) -> Runs:
    """The checked arguments; UserError for what is not allowed."""
    if arguments.seed < 0:
        raise UserError(f"--seed {arguments.seed}: must be at least 0")
    if arguments.settings and not arguments.hardware:
        raise UserError("--set: needs --hardware")
    scenario, wanted = read(arguments.scenario), arguments.parameters.split(",")
    sets = ["base", *scenario.parameters] if arguments.parameters == "all" else wanted
    scenarios = {name: _changed(scenario.with_parameters(name), arguments) for name in sets}
    policies = arguments.policies.split(",")
    if arguments.policies == "all":
        policies = list(POLICIES)
    for policy in policies:
        if policy not in POLICIES:
            raise UserError(f"--policies {policy!r}: must be of {', '.join(POLICIES)}")
    trace = None
    if arguments.mooncake or arguments.agents:
        trace = _trace(arguments, scenario)
        whole = Window(0.0, math.inf)
        scenarios = {name: replace(each, window=whole) for name, each in scenarios.items()}
    settings = {name: setting(each) for name, each in scenarios.items()}
    return Runs(scenarios, settings, policies, trace, arguments.seed)


def _changed(scenario: Scenario, arguments: argparse.Namespace) -> Scenario:
    """The scenario with the values that the command gives."""
    values: dict[str, Any] = {}
    for text in arguments.value:
        path, _, value = text.partition("=")
        try:
            values[path] = json.loads(value)
        except ValueError:
            values[path] = value
    if arguments.hardware:
        values |= {"clock.hardware": arguments.hardware, "clock.settings": arguments.settings}
        values["clock.curves"] = ""
    return scenario.with_values(values)


def _trace(arguments: argparse.Namespace, scenario: Scenario) -> list[Conversation]:
    """Conversations in ids of the scenario's grain."""
    if arguments.time_scale <= 0 or not math.isfinite(arguments.time_scale):
        raise UserError(f"--time-scale {arguments.time_scale}: must be above 0")
    if arguments.requests is not None and arguments.requests < 1:
        raise UserError(f"--requests {arguments.requests}: must be at least 1")
    grain = scenario.fleet.grain
    scale = Scale(1 / grain, arguments.time_scale, scenario.workload.max_context // grain)
    if arguments.mooncake:
        found = mooncake(arguments.mooncake, vocabulary=_IDS, scale=scale)
    else:
        found = agents(arguments.agents, vocabulary=_IDS, scale=scale)
    return found[: arguments.requests]


def _progress(what: str) -> Callable[[str], None]:
    """Says how far a simulation is, now and then."""
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > _PROGRESS_S:
            last = time.monotonic()
            progress_line(f"{what}: {text}")

    return tell
