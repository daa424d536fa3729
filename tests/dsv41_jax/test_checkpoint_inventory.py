"""Names, shapes and totals of the released checkpoint, and the answer to what fits where."""

import json
from collections import Counter

import pytest

from dsv41_jax.checkpoint.fit import bytes_by_kind, kv_bytes_per_token, what_fits
from dsv41_jax.checkpoint.inventory import TensorSpec, Totals, inventory, vision_inventory
from dsv41_jax.checkpoint.parameters import parameters
from dsv41_jax.checkpoint.safetensors_files import TensorFiles
from dsv41_jax.config import Config


@pytest.fixture(scope="module")
def flash() -> dict[str, TensorSpec]:
    return inventory(Config.preset("flash"))


def test_flash_totals(flash):
    totals = Totals.of(flash.values())
    assert totals == Totals(96_085, 763_205_315_794, 510_286_023_000)


def test_flash_elements_by_dtype(flash):
    """ARCHITECTURE section 2, recounted."""
    elements = Counter()
    for spec in flash.values():
        count = 1
        for size in spec.shape:
            count *= size
        elements[spec.dtype] += count
    assert elements == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
    }


def test_flash_parameters_by_part(flash):
    """ARCHITECTURE section 14."""

    def count(*needles: str, part: str | None = None) -> int:
        return sum(
            spec.parameters
            for name, spec in flash.items()
            if all(n in name for n in needles) and part in (None, spec.part)
        )

    assert count(".ffn.experts.", part="text") == 543_581_798_400
    assert count(".shared_experts.", part="text") == 1_415_577_600
    assert count("engram.embed.") == 196_613_849_600
    assert count(".compressor.w") == 18_350_080
    assert count("vision.") == 411_842_560
    assert count("aligner.") == 73_410_560
    assert count(part="mtp") == 14_225_362_530


def test_flash_tensors_by_hand(flash):
    """The shape of one tensor of every kind that ARCHITECTURE 2.2 to 2.4 states."""
    stated = {
        "embed.weight": ("BF16", (129280, 5120)),
        "layers.0.attn.wq_b.weight": ("F8_E4M3", (32768, 1280)),
        "layers.0.attn.wq_b.scale": ("F8_E8M0", (1024, 40)),
        "layers.39.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
        "layers.5.attn.wo_b.scale": ("F8_E8M0", (160, 256)),
        "layers.7.hc_ffn_fn": ("F32", (24, 20480)),
        "layers.7.ffn.experts.383.w1.weight": ("I8", (2304, 2560)),
        "layers.7.ffn.experts.383.w2.scale": ("F8_E8M0", (5120, 72)),
        "mtp.2.ffn.experts.127.w2.weight": ("I8", (5120, 1152)),
        "mtp.1.ffn.gate.bias_vl": ("F32", (128,)),
        "layers.14.engram.embed.weight": ("F8_E4M3", (384016682, 256)),
        "layers.1.engram.wkv.scale": ("F8_E8M0", (800, 192)),
        "layers.8.attn.compressor.wgate.weight": ("BF16", (512, 5120)),
        "layers.20.attn.indexer.wk.weight": ("BF16", (128, 512)),
        "layers.36.attn.indexer.wq_b.weight": ("F8_E4M3", (4096, 1280)),
        "mtp.0.main_proj.scale": ("F8_E8M0", (160, 480)),
        "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5376)),
        "vision.patch_embed.proj.weight": ("BF16", (1024, 588)),
        "vision.blocks.31.mlp.w1.weight": ("BF16", (5632, 1024)),
        "aligner.w1.weight": ("BF16", (5120, 9216)),
    }
    assert {name: (flash[name].dtype, flash[name].shape) for name in stated} == stated
    for absent in (
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.1.norm.weight",
        "layers.0.engram.embed.weight",
    ):
        assert absent not in flash


def test_tiny_inventory_is_the_golden_checkpoint(tiny_dir):
    files = TensorFiles(tiny_dir)
    stored = {name: (files.entry(name).dtype, files.entry(name).shape) for name in files}
    expected = inventory(Config.preset("tiny"))
    assert files.problems == [] and len(stored) == 826
    assert {name: (spec.dtype, spec.shape) for name, spec in expected.items()} == stored
    index = json.loads((tiny_dir / "model.safetensors.index.json").read_text())
    assert Totals.of(expected.values()).nbytes == index["metadata"]["total_size"]


def test_vision_names_are_known_without_vision_layers():
    cfg = Config.preset("tiny")
    assert not any(spec.part == "vision" for spec in inventory(cfg).values())
    assert {"image_start", "aligner.w2.bias", "vision.norm.weight"} <= vision_inventory(cfg).keys()


def test_parameters_cover_every_text_and_draft_tensor_once(flash):
    plan = parameters(flash)
    covered = Counter(name for p in plan.values() for name, _ in p.tensors())
    assert set(covered.values()) == {1}
    assert covered.keys() == {name for name, spec in flash.items() if spec.part != "vision"}
    assert sum(p.nbytes for p in plan.values()) == sum(
        spec.nbytes for spec in flash.values() if spec.part != "vision"
    )
    assert len(plan["layers.0.ffn.experts.w1.weight"].weights) == 384


def test_kv_bytes_per_token():
    assert kv_bytes_per_token(Config.preset("flash")) == 890
    assert kv_bytes_per_token(Config.preset("tiny")) == 105


def test_what_fits(flash):
    cfg = Config.preset("flash")
    kinds = bytes_by_kind(flash)
    head = flash["head.weight"].nbytes
    assert kinds.head == head
    assert kinds.loaded + kinds.vision == 510_286_023_000
    fits = {(fit.gpus, fit.engram): fit for fit in what_fits(cfg, kinds)}
    assert not fits[2, "host"].fits and fits[4, "host"].fits
    assert not fits[4, "device"].fits and fits[8, "device"].fits
    eight = fits[8, "host"]
    assert eight.host_bytes == kinds.engram_tables == 768_022_850 * 264
    assert eight.kv_tokens == (126_900_000_000 - eight.bytes_per_gpu) // 890
    assert "8 x 141 GB" in eight.line(890) and "890 B" in eight.line(890)
