"""A scenario's machine: step times, what is known of the model, whether it all fits."""

from dataclasses import asdict, dataclass
from pathlib import Path

from dsv41_jax.checkpoint.fit import kv_bytes_per_token
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.simulate.fleet import Model
from serving.simulate.scenario import Scenario
from serving.simulate.times import Roofs, Times, read_curves
from sharding.estimate import ShardedModel, slot_bytes
from sharding.hardware import hardware
from sharding.layouts import layout


@dataclass(frozen=True)
class Setting:
    """gpus: of the whole fleet. label: of the step times; projection: no measurement of this
    project's own stands behind them.
    """

    model: Model
    times: Times
    gpus: int
    label: str
    projection: bool


def setting(scenario: Scenario) -> Setting:
    """UserError for an unknown layout or machine, figures that are missing, or what does not fit
    the memory.
    """
    cfg, clock, fleet = Config.preset("flash"), scenario.clock, scenario.fleet
    each = layout(fleet.layout)
    sharded = ShardedModel(cfg, each)
    ranks = sharded.division.ways("batch")
    model = Model(ranks, cfg.sliding_window, kv_bytes_per_token(cfg))
    gpus = fleet.instances * each.devices
    if clock.curves:
        label = f"measured curves {Path(clock.curves).name}"
        return Setting(model, read_curves(clock.curves), gpus, label, False)
    machine = hardware(clock.hardware).with_settings(clock.settings)
    held = asdict(sharded.bytes_by_kind)
    del held["vision"]
    # The instances share one copy of the Engram tables.
    held["engram_tables"] //= fleet.instances
    held["slots"] = fleet.slots * sum(slot_bytes(cfg).values())
    memory = machine["memory_gb"] * 1e9
    needed = sum(held.values()) + fleet.cache_gb * 1e9 + memory * machine["reserved_fraction"]
    if needed > memory:
        raise UserError(
            f"fleet: {fleet.layout} with cache_gb={fleet.cache_gb:g} needs {needed / 1e9:.0f} GB a"
            f" GPU, {machine.title} has {memory / 1e9:.0f}"
        )
    label = f"{machine.label}, {clock.efficiency:.0%} of the roofline's speed assumed"
    times = Roofs(cfg, each, machine, clock.efficiency)
    return Setting(model, times, gpus, label, not machine.measured)
