"""What ``forward --profile`` makes of a trace."""

import pytest

from serving.bench.forward_profile import Kernel, profile, profile_lines


def step(origin: float) -> list[Kernel]:
    """Two layers of 5 and 4 us and a head; a copy of the second runs beside its first kernel."""
    names = [
        ("norm.1", 0, 1), ("attention_7", 1, 3), ("moe_experts_decode", 4, 5),
        ("norm.2", 5, 6), ("copy", 5.5, 6.5), ("moe_experts_decode", 7, 9), ("head", 9, 12),
    ]  # fmt: skip
    return [Kernel(name, origin + 1e3 * start, origin + 1e3 * end) for name, start, end in names]


TWO = [*step(0), *step(20_000)]


def test_kernels_by_name():
    found = profile(TWO, 2, ["window", "full-2"])
    # The steps are 8 us apart.
    assert (found["span_us"], found["busy_us"], found["sum_us"]) == (16, 10.5, 11)
    assert found["launches"] == 7
    by_name = {one["name"]: one for one in found["kernels"]}
    assert list(by_name)[:2] == ["moe_experts_decode", "head"]
    assert by_name["norm"] == {
        "name": "norm", "launches": 2, "us": 2, "share_pct": pytest.approx(100 * 2 / 11, abs=0.01),
        "mean_us": 1,
    }  # fmt: skip


def test_layers_end_with_their_experts():
    found = profile(TWO, 2, ["window", "full-2"])["layers"]
    assert found == [
        {"kind": "window", "count": 1, "launches": 3, "span_us": 5, "busy_us": 4},
        {"kind": "full-2", "count": 1, "launches": 3, "span_us": 4, "busy_us": 3.5},
        {"kind": "ends", "count": 1, "launches": 1, "span_us": 3, "busy_us": 3},
    ]
    (same, ends) = profile(TWO, 2, ["reuse-2", "reuse-2"])["layers"]
    assert same == {"kind": "reuse-2", "count": 2, "launches": 3, "span_us": 4.5, "busy_us": 3.75}
    assert ends["kind"] == "ends"


def test_experts_of_two_launches_a_layer():
    """What else experts launch does not end a layer."""
    names = "moe_experts_gather", "moe_experts_prefill", "moe_experts_prefill", "norm"
    kernels = [Kernel(names[at % 4], 1e3 * at, 1e3 * at + 1e3) for at in range(8)]
    found = profile(kernels, 1, ["window", "full-2"])["layers"]
    assert [(one["kind"], one["launches"]) for one in found] == [
        ("window", 3), ("full-2", 4), ("ends", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "layers"), [(TWO, []), (TWO, ["a"] * 3), (TWO[1:], ["a"] * 2), (TWO[:2], ["a"])]
)
def test_layers_that_cannot_be_told_apart_are_left_out(kernels, layers):
    assert profile(kernels, 2, layers)["layers"] == []


def test_a_trace_without_kernels():
    row = {"layout": "tp1", "case": "c", "mode": "graph", "wall_us": 1} | profile([], 2, [])
    assert "tp1 c, in command buffers: the trace holds no kernels" in list(profile_lines([row]))
