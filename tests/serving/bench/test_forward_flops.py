"""Operations of measured prompts."""

from types import SimpleNamespace
from typing import Any

import pytest

from dsv41_jax.config import Config
from pallas_kernels.numerics import SERVING
from serving.bench.forward_cases import Case, Group, dispatches
from serving.bench.forward_floor import Floors
from serving.bench.forward_flops import matmul_tflops, share_pct, tflop
from serving.bench.forward_model import measured_model
from serving.bench.forward_weights import WeightSets
from sharding.hardware import hardware
from sharding.place import place

FLASH, TINY = Config.preset("flash"), Config.preset("tiny")


@pytest.fixture(scope="module")
def floors():
    def of(cfg: Config) -> Floors:
        sets: Any = SimpleNamespace(cfg=cfg, placement=place("tp1", cfg))
        return Floors(sets, hardware("h200"), "random")

    return {"flash": of(FLASH), "tiny": of(TINY)}


def test_window_rows_of_draft_stages_are_the_verifications():
    """Of the release: main_proj and three wkv, a byte a weight and a scale for 1024 of them."""
    cfg = measured_model(FLASH, "all", 1000)
    sets = WeightSets(cfg, SERVING, place("tp1", cfg), 1, packed=True, draft=True)
    floors = Floors(sets, hardware("h200"), "random")
    (verify,) = dispatches(cfg, Case("v", "verify", (Group(1, 6, 8192, 5),)), 8192)
    layers = sum(floors.layer(verify, index) for index in floors.layers(verify))
    windows = floors.dispatch(verify) - floors.ends(verify) - layers
    read = 5120 * (3 * 5120 + 3 * 512) * (1 + 1 / 1024)
    assert windows == pytest.approx(read / 4.3e6, rel=1e-6)


def counted(floors, cfg, group: Group, *, replay: bool, phase="prefill", chunk=8192) -> float:
    case = Case("p", phase, (group,), replay)
    return tflop(floors, case, dispatches(cfg, case, chunk))


def test_prompts_of_the_release(floors):
    """Figures that were counted by hand."""
    prompt = Group(1, 8192, 8192)
    assert counted(floors["flash"], FLASH, prompt, replay=False) == pytest.approx(280.0, abs=0.1)
    assert counted(floors["flash"], FLASH, prompt, replay=True) == pytest.approx(150.7, abs=0.1)


def test_a_small_prompt_number_by_number(floors):
    """Twenty rows of the small model, whose window has 16 and whose layers after 4 run on 16."""
    rows, window, wide, decoder = 20, 16, 8 * 64, 16
    dense = 256 * 64 + 64 * wide + 256 * 64 + wide // 2 * 2 * 64 + 2 * 64 * 256
    experts = (2 + 1) * 3 * 256 * 64
    each = dense + experts + 8 * 256
    seen = {
        0: sum(min(p + 1, window) for p in range(rows)),
        2: sum(min((p + 1) // 2, 8) for p in range(rows)),
        1: sum(min(p + 1, 8) for p in range(rows)),
        "decoder": sum(p + 1 + min(rows - decoder + p + 1, 8) for p in range(decoder)),
    }
    products = 5 * rows * each + 3 * decoder * each
    products += 2 * rows * 6 * 64 * 5 * 256  # Engram in layers 1 and 2
    index = 16 * 64 * 64 + 16 * 256
    products += rows * (index + 2 * 64 * 256 + 64 * 64 + 64 + 64)  # layer 2, with its norms
    products += rows * (index + 64 * 256 + 64 * 64 + 64 + 64) + decoder * index  # layers 4 and 6
    products += 512 * 256
    attended = 5 * seen[0] + 2 * seen[2] + seen[1] + 3 * seen["decoder"]
    scanned = sum((p + 1) // 2 + p + 1 for p in range(rows))
    scanned += sum(min(p + 1, 20) for p in range(rows - decoder, rows))
    total = 2 * products + 4 * wide * attended + 2 * 16 * 64 * scanned
    found = counted(floors["tiny"], TINY, Group(1, rows, rows), replay=True)
    assert round(found * 1e12) == total


def test_parts_of_a_prompt_add_up(floors):
    """Chunks count as the whole but for the head of each; a replay is what replaying adds."""
    ours, head = floors["tiny"], 2 * 512 * 256 / 1e12
    whole = Group(2, 96, 96)
    at_once = counted(ours, TINY, whole, replay=False)
    chunked = counted(ours, TINY, whole, replay=False, chunk=32)
    assert chunked == pytest.approx(at_once + 2 * 2 * head)
    replayed = counted(ours, TINY, Group(2, 16, 96), replay=True, phase="replay")
    encoded = counted(ours, TINY, whole, replay=True) - replayed
    assert 0 < replayed < encoded < at_once


def test_the_rate():
    assert 0 < matmul_tflops() < 1000
    assert share_pct(280.0, 700_000, 800) == pytest.approx(50)
