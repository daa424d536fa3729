"""Step times: parts that add up to a whole forward, curves, what is refused."""

import json

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from serving.simulate.setting import setting
from serving.simulate.times import Roofs, read_curves
from sharding.hardware import hardware
from sharding.layouts import layout
from sharding.roofline import Step
from tests.serving.simulate.support import small

SETTINGS = ("launch_us=1.5", "collective_us=5")
CURVE = {"contexts": [0, 1000], "sizes": [100, 300], "us": [[10, 30], [20, 60]]}


@pytest.fixture(scope="module")
def roofs() -> Roofs:
    machine = hardware("gb300").with_settings(SETTINGS)
    return Roofs(Config.preset("flash"), layout("dep2"), machine)


def test_encode_and_replay_are_a_whole_prefill(roofs):
    # Contexts are told apart by the middle of 4,096 tokens, so the prompt begins at 2,048.
    rows = 8192
    step = Step("prefill", 2, rows)
    whole = roofs.model.estimate(roofs.machine, step).step_us
    parts = roofs.encode(1, rows, 0) + roofs.replay(1, rows)
    assert parts == pytest.approx(whole, rel=0.02)


def test_decode_is_the_estimate(roofs):
    step = Step("decode", 64, 4096 + 2048)
    whole = roofs.model.estimate(roofs.machine, step).step_us
    assert roofs.decode(32, 5000) == pytest.approx(whole, rel=1e-12)


def test_more_work_takes_longer_and_half_the_speed_twice_as_long(roofs):
    assert roofs.encode(1, 1024, 0) < roofs.encode(2, 1024, 0) < roofs.encode(2, 1024, 100_000)
    assert roofs.replay(1, 9000) < roofs.replay(8, 9000)
    half = Roofs(roofs.cfg, layout("dep2"), roofs.machine, efficiency=0.5)
    assert half.encode(2, 1024, 0) == 2 * roofs.encode(2, 1024, 0)


def test_curves_are_read_between_their_points(tmp_path):
    file = tmp_path / "curves.json"
    file.write_text(json.dumps({"encode": CURVE, "replay": CURVE, "decode": CURVE}))
    curves = read_curves(str(file))
    assert curves.encode(2, 100, 0) == 20
    assert curves.encode(1, 100, 500) == 15
    assert curves.replay(50, 0) == 10
    assert curves.decode(600, 2000) == 120
    used = setting(small().with_values({"clock.curves": str(file)}))
    assert used.label == "measured curves curves.json"
    assert not used.projection


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"us": [[10, 30]]}, r"us must be \[contexts, sizes\]"),
        ({"sizes": [300, 100]}, "must rise"),
        ({"us": [[10, 30], [20, -1]]}, "above 0"),
        ({"contexts": "x"}, "lists of numbers"),
    ],
)
def test_bad_curves(tmp_path, change, said):
    file = tmp_path / "curves.json"
    file.write_text(json.dumps({"encode": CURVE | change, "replay": CURVE, "decode": CURVE}))
    with pytest.raises(UserError, match=said):
        read_curves(str(file))
    file.write_text(json.dumps({"encode": CURVE}))
    with pytest.raises(UserError, match="must have exactly encode, replay, decode"):
        read_curves(str(file))


def test_projections_say_so_and_what_is_unknown_is_asked_for():
    used = setting(small())
    assert used.projection
    assert "projection, not measured" in used.label
    assert used.gpus == 4
    for values, said in (
        ({"clock.hardware": "rubin"}, "hardware rubin: give --set NAME=VALUE"),
        ({"clock.hardware": "tpu"}, "hardware 'tpu'"),
        ({"clock.hardware": "h200"}, "needs .* GB a GPU, H200 SXM has 141"),
        ({"fleet.layout": "none"}, "layout 'none'"),
    ):
        with pytest.raises(UserError, match=said):
            setting(small().with_values(values))


def test_a_layout_that_fits_a_measured_machine_is_no_projection():
    values = {"clock.hardware": "h200", "fleet.layout": "dep8", "clock.settings": []}
    used = setting(small().with_values(values))
    assert not used.projection
    assert used.model.ranks == 8
    assert used.model.token_bytes == 890
