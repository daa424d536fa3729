"""Whole simulations: the same numbers for a seed, hits that a pool without limits explains."""

from dataclasses import replace

import pytest

from dsv41_jax.errors import UserError
from serving.bench.workloads import Conversation, Turn
from serving.simulate.measure import Occupancy, figures
from serving.simulate.policies import POLICIES
from serving.simulate.scenario import Window
from serving.simulate.sessions import Trace
from tests.serving.simulate.support import simulated, simulation, small

GPUS = 4
POLICY_PAIR = "affinity", "pool_workload_aware"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_same_numbers(policy):
    ones, others = (figures(simulated(small(), policy, seed=5), GPUS) for _ in range(2))
    assert ones == others
    assert ones["requests"] > 100
    assert ones != figures(simulated(small(), policy, seed=6), GPUS)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_comes_to_its_end(policy):
    scenario = small(workload__steady=False, workload__sessions=20)
    turns = tuple(Turn(tuple(range(100, 100 + 8 * (i + 1))), 2, 0.1) for i in range(3))
    trace = Trace([Conversation(turns, 0.01 * i) for i in range(20)], at_once=1)
    whole = replace(scenario, window=Window(0.0, float("inf")))
    run = simulation(whole, policy, source=trace)
    record = run.run()
    assert record.finished == len(record.requests.prompt) == 60
    assert record.output == 60 * 2 * 16
    run.board.check()
    for instance in run.instances:
        assert not instance.jobs
        instance.check()


def test_a_pool_with_room_has_what_one_without_limits_has():
    row = figures(simulated(small(fleet__cache_gb=0.0005), "pool_workload_aware"), GPUS)
    assert row["hit_rate_infinite_pool"] - row["hit_rate"] < 0.01
    assert row["pool_share"] > 0.1
    alone = figures(simulated(small(fleet__cache_gb=0.0005), "affinity"), GPUS)
    assert alone["hit_rate"] < row["hit_rate"] - 0.05


def test_a_full_pool_has_less():
    scenario = small(fleet__cache_gb=0.0005, pool__capacity_gb=0.0005)
    row = figures(simulated(scenario, "pool_workload_aware"), GPUS)
    assert row["hit_rate"] < row["hit_rate_infinite_pool"] - 0.05


def test_work_goes_where_nothing_waits():
    rows = [figures(simulated(small(), policy, factor=40), GPUS) for policy in POLICY_PAIR]
    assert rows[1]["idle_while_queued"] < rows[0]["idle_while_queued"] / 2
    assert rows[1]["ttft_p90_s"] < rows[0]["ttft_p90_s"]


def test_the_way_between_router_and_rank_is_in_every_first_token():
    scenario = small(workload__sessions=2, window__measure_s=4.0)
    near, far = (
        figures(simulated(scenario.with_values({"fleet.hop_ms": hop}), "affinity"), GPUS)
        for hop in (0.0, 50.0)
    )
    assert far["ttft_p50_s"] - near["ttft_p50_s"] == pytest.approx(0.1, abs=2e-3)


def test_late_binding_holds_requests_back_only_while_nobody_has_room():
    """Every arrival finds a rank, or all have work. What the pool has is as good as cached."""
    scenario = small(workload__sessions=80, pool__credit=1.0)
    run = simulation(scenario, "pool_workload_aware", factor=40)
    held, place = [], run.router.place

    def placing(now: float):
        placed = place(now)
        if len(run.router):
            held.append(min(load.prefill for load in run.board.loads.values()))
        return placed

    run.router.place = placing
    run.run()
    assert len(held) > 10 and min(held) > 0


def test_decoding_here_is_timed_token_by_token():
    scenario = small(fleet__role="both", fleet__decode_sizes=[8], workload__sessions=4)
    row = figures(simulated(scenario, "workload_aware"), GPUS)
    assert row["itl_p50_ms"] == pytest.approx((1000 + 8) / 1000)
    assert row["tokens_per_s_user"] < 1000


def test_a_rank_must_hold_the_longest_request():
    with pytest.raises(UserError, match="must hold max_context=4096"):
        simulation(small(fleet__cache_gb=0.0004), "affinity")
    with pytest.raises(UserError, match="must divide the window"):
        simulation(small(fleet__grain=64, fleet__page_tokens=64), "affinity")


def test_occupancy_counts_idle_ranks_while_another_queues():
    occupancy = Occupancy(ranks=3, since=1.0)
    occupancy.change(0.0, 0, works=True, queues=True, waits=True)  # two idle, one queues
    occupancy.change(3.0, 1, works=True, queues=False, waits=False)  # one idle
    occupancy.change(4.0, 0, works=True, queues=False, waits=True)  # it waits for a step's end
    occupancy.change(6.0, 0, works=True, queues=False, waits=False)
    occupancy.hold(7.0, holds=True)  # the router holds a request
    occupancy.hold(8.0, holds=False)
    occupancy.advance(10.0)
    assert occupancy.idle_while_queued == 2 * 2 + 1 + 1
    assert occupancy.idle_while_waiting == 2 * 2 + 1 + 2 + 1
    assert occupancy.busy == 2 + 2 + 6 * 2


def test_a_rank_does_not_idle_because_of_itself():
    """It has nothing in its worker's step and a request that found no room; no other rank has."""
    occupancy = Occupancy(ranks=3, since=0.0)
    occupancy.change(0.0, 0, works=False, queues=True, waits=True)
    occupancy.change(0.0, 1, works=True, queues=False, waits=False)
    occupancy.advance(1.0)
    assert occupancy.idle_while_queued == 1  # rank 2
    occupancy.change(1.0, 1, works=True, queues=True, waits=True)
    occupancy.advance(2.0)
    assert occupancy.idle_while_queued == 1 + 2
