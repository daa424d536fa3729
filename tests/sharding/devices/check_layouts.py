"""Every layout gives the logits and tokens of one device: prompts in chunks, decoded rows, verify
widths and drafts, with some, one and no requests a rank.
"""

import pytest

from sharding.layouts import LAYOUTS
from tests.sharding.devices.support import Placed, run_goldens

DEFAULT = ("tp2xdep4",)
OTHERS = [name for name, each in LAYOUTS.items() if 1 < each.devices <= 8 and name not in DEFAULT]


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", [*DEFAULT, *slow(OTHERS)])
def test_layout(name):
    compared = run_goldens(Placed.of(name))
    assert compared > 70 * LAYOUTS[name].tensor
