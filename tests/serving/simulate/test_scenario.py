"""Scenario files: the ones that come along, changed values, and every problem named."""

import json
import math

import pytest

from dsv41_jax.errors import UserError
from serving.simulate.scenario import Lognormal, names, parse, read
from tests.serving.simulate.support import small


def test_the_promised_scenarios_are_there():
    assert {"3xdep2-4800", "12xdep2"} <= set(names())
    for name in names():
        scenario = read(name)
        assert scenario.name == name
        assert scenario.sources
        assert len(scenario.parameters) >= 3
        for parameters in scenario.parameters:
            assert scenario.with_parameters(parameters) != scenario


def test_values_are_replaced_and_checked():
    scenario = small()
    changed = scenario.with_values({"workload.turns.sigma": 0, "fleet.instances": 3})
    assert changed.workload.turns == Lognormal(scenario.workload.turns.median, 0.0, 12)
    assert changed.fleet.instances == 3
    assert changed.clock == scenario.clock
    for path, value, said in (
        ("fleet.nothing", 1, "no value 'fleet.nothing'"),
        ("instances", 1, "no value"),
        ("fleet.instances", 2.5, "fleet.instances: 2.5 must be a int"),
        ("fleet.instances", True, "must be a int"),
        ("fleet.instances", 0, "must be above 0"),
        ("fleet.role", "decode", "must be one of prefill, both"),
        ("fleet.page_tokens", 72, "multiple of grain=16"),
        ("fleet.shapes", [[1, 40]], r"shapes \(1, 40\): must be a multiple"),
        ("fleet.shapes", [[1]], "must have 2 values"),
        ("fleet.decode_tokens_per_s", 0, "where other machines decode"),
        ("clock.efficiency", math.nan, "clock.efficiency: nan"),
        ("pool.credit", 1.5, "between 0 and 1"),
        ("fleet.hop_ms", -1.0, "fleet.hop_ms: -1.0 must be at least 0"),
        ("workload.output", {"median": 5, "sigma": 1, "most": 2}, "median <= most"),
        ("workload", 3, "no value 'workload'"),
    ):
        with pytest.raises(UserError, match=said):
            scenario.with_values({path: value})


def test_every_problem_of_a_file_is_named(tmp_path):
    with pytest.raises(UserError) as caught:
        parse({"name": 1, "extra": 2, "fleet": {"slots": "many"}, "pool": []})
    said = str(caught.value)
    for part in ("name: 1 must be a str", "extra: is unknown", "fleet.slots: 'many'", "pool: must"):
        assert part in said
    assert "workload: is missing" in said
    file = tmp_path / "own.json"
    file.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read(str(file))
    with pytest.raises(UserError, match="or one of 12xdep2"):
        read("nothing")
    file.write_text(json.dumps([]))
    with pytest.raises(UserError, match="document: must be an object"):
        read(str(file))


def test_unknown_parameters():
    with pytest.raises(UserError, match="must be one of base, lighter"):
        read("12xdep2").with_parameters("nothing")
