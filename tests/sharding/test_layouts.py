"""Layouts: names, divisibility, and what part of each parameter a device holds."""

from dataclasses import replace
from math import prod

import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dsv41_jax.checkpoint.inventory import Totals, inventory
from dsv41_jax.checkpoint.parameters import parameters
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from sharding import layouts
from sharding.layouts import LAYOUTS, layout

FLASH, TINY = Config.preset("flash"), Config.preset("tiny")


def divided(name):
    return layout(name).divide(FLASH)


@pytest.fixture(scope="module")
def flash():
    return parameters(inventory(FLASH))


def test_names():
    listed = ["tp1", "tp2", "tp4", "tp8", "dep2", "dep4", "dep8", "dep16", "dep32"]
    assert [name for name in LAYOUTS if "x" not in name] == listed
    assert layout("tp4xdp2").mesh_shape == {"data": 2, "model": 4}
    assert layout("tp2xdep4").devices == 8
    assert all(each.name == name for name, each in LAYOUTS.items())


@pytest.mark.parametrize("name", ["", "tp3", "tp16", "dep1", "TP8", "tp8 ", "tp4xdp3"])
def test_an_unknown_name_lists_what_exists(name):
    with pytest.raises(UserError, match=r"must be one of tp1, .*dep32, .*tp2xdep4.*tp4xdp2"):
        layout(name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_divides_the_release(name):
    assert layout(name).divide(FLASH).notes == ()


@pytest.mark.parametrize(
    ("name", "cfg", "problem"),
    [
        ("tp8", replace(FLASH, vocab_size=129284), "vocabulary = 129284: must be divisible by 8"),
        (
            "tp8",
            replace(FLASH, num_attention_heads=12, o_groups=4),
            "heads = 12: must be divisible by 8",
        ),
    ],
)
def test_an_axis_that_must_divide_is_named(name, cfg, problem):
    with pytest.raises(UserError) as caught:
        layout(name).divide(cfg)
    assert problem in caught.value.problems
    assert str(caught.value).startswith(f"layout {name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cfg", "notes"),
    [
        ("tp2", TINY, ()),
        (
            "tp4",
            TINY,
            (
                "wo_a groups = 2: not divisible by 4, whole on every tensor rank",
                "expert columns = 64 (blocks of 32): not divisible by 128, whole on every tensor"
                " rank",
            ),
        ),
        ("dep8", TINY, ("draft experts = 4: padded to 8",)),
        ("dep16", TINY, ("experts = 8: padded to 16", "draft experts = 4: padded to 16")),
        (
            "tp8",
            replace(FLASH, moe_intermediate_size=2176),
            (
                "expert columns = 2176 (blocks of 32): not divisible by 256, whole on every tensor"
                " rank",
            ),
        ),
    ],
)
def test_what_is_held_whole_or_padded_is_said(name, cfg, notes):
    assert layout(name).divide(cfg).notes == notes


def test_whole_columns_spread_experts_over_tensor_ranks():
    axes = layout("tp4").divide(TINY).axes
    assert (axes["expert_columns"], axes["experts"], axes["groups"]) == ((), ("model",), ())
    assert layout("tp4xdep2").divide(TINY).axes["experts"] == ("data", "model")
    assert layout("tp4xdep2").divide(FLASH).axes["experts"] == ("data",)
    assert layout("tp4").divide(FLASH).axes["experts"] == ()


def test_draft_experts_do_not_matter_without_drafts():
    cfg = replace(TINY, num_nextn_predict_layers=0, compress_ratios=TINY.compress_ratios[:8])
    assert layout("dep8").divide(cfg).notes == ()


@pytest.mark.parametrize(
    ("name", "path", "codes", "scales"),
    [
        ("tp8", "layers.3.attn.wq_b", (4096, 1280), (128, 40)),
        ("tp8", "layers.3.attn.wo_a", (1024, 4096), (32, 128)),
        ("tp8", "layers.3.attn.wo_b", (5120, 1024), (160, 32)),
        ("tp8", "layers.3.attn.wkv", (512, 5120), (16, 160)),
        ("tp8", "layers.3.ffn.experts.w1", (384, 288, 2560), (384, 288, 160)),
        ("tp8", "layers.3.ffn.experts.w2", (384, 5120, 144), (384, 5120, 9)),
        ("tp8", "layers.3.ffn.shared_experts.w2", (5120, 288), (160, 9)),
        ("dep8", "layers.3.ffn.experts.w1", (48, 2304, 2560), (48, 2304, 160)),
        ("dep8", "mtp.1.ffn.experts.w3", (16, 2304, 2560), (16, 2304, 160)),
        ("dep8", "layers.3.ffn.shared_experts.w1", (2304, 5120), (72, 160)),
        ("tp2xdep4", "layers.3.ffn.experts.w2", (96, 5120, 576), (96, 5120, 36)),
        ("tp4xdp2", "layers.3.ffn.experts.w1", (384, 576, 2560), (384, 576, 160)),
        ("tp4xdp2", "layers.1.engram.embed", (48000771, 256), (48000771, 8)),
        ("dep8", "layers.14.engram.embed", (48002086, 256), (48002086, 8)),
        ("tp8", "layers.1.engram.wkv", (3200, 6144), (100, 192)),
        ("tp8", "layers.8.attn.indexer.wq_b", (4096, 1280), (128, 40)),
    ],
)
def test_local_shapes(flash, name, path, codes, scales):
    parameter = flash[f"{path}.weight"]
    local = divided(name).local_specs([parameter])
    assert local[f"{path}.weight"].shape == codes
    assert local[f"{path}.scale"].shape == scales


@pytest.mark.parametrize("name", ["head.weight", "embed.weight", "mtp.2.markov_head.head.weight"])
def test_the_vocabulary_is_split_by_tensor_ranks_only(flash, name):
    rows = {
        at: divided(at).local_specs([flash[name]])[name].shape[0] for at in ("tp8", "dep8", "tp1")
    }
    assert rows == {"tp8": 16160, "dep8": 129280, "tp1": 129280}


def test_one_device_holds_the_checkpoint(flash):
    stored = Totals.of(spec for spec in inventory(FLASH).values() if spec.part != "vision")
    local = Totals.of(divided("tp1").local_specs(flash.values()).values())
    assert (local.nbytes, local.parameters) == (stored.nbytes, stored.parameters)


@pytest.mark.parametrize("name", LAYOUTS)
def test_devices_together_hold_every_part_evenly(flash, name):
    """Parts times number of parts is the whole; only Engram rows are padded."""
    each = divided(name)
    for path, parameter in flash.items():
        ways = prod(each.ways(dim) for dim in layouts.logical_dims(path) if dim)
        held = Totals.of(each.local_specs([parameter]).values()).nbytes
        excess = held * ways - parameter.nbytes
        padding = each.layout.devices * 264 if parameter.is_engram_table else 1
        assert 0 <= excess < padding, path


@pytest.mark.parametrize("name", ["tp8", "dep8", "tp2xdep4", "tp4xdp2"])
def test_a_partition_is_what_jax_takes(flash, name):
    """The named sharding of each parameter's codes gives the local shape (no devices needed)."""
    each, shape = divided(name), layout(name).mesh_shape
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    for path, parameter in flash.items():
        if parameter.is_engram_table:
            continue
        stack = (len(parameter.weights),) if parameter.stacked else ()
        sharding = NamedSharding(mesh, PartitionSpec(*each.partition(path)))
        local = each.local_specs([parameter])[path].shape
        assert sharding.shard_shape((*stack, *parameter.spec.shape)) == local, path


def test_partitions():
    assert divided("tp8").partition("layers.0.attn.wo_b.weight") == (None, ("model",))
    assert divided("tp8").partition("layers.0.ffn.experts.w1.weight") == (None, ("model",), None)
    assert divided("tp2xdep4").partition("layers.0.ffn.experts.w2.weight") == (
        ("data",),
        None,
        ("model",),
    )
    assert divided("dep4").partition("layers.1.engram.embed.weight") == (("data", "model"), None)
    assert divided("tp8").partition("layers.0.attn_norm.weight") == ()
    assert divided("dep8").ways("batch") == divided("dep8").ways("pages") == 8
    assert divided("tp8").ways("batch") == 1


def test_every_rule_names_a_parameter(flash):
    unused = [
        end for end in layouts._SPLITS if not any(path.endswith(end) for path in flash)
    ]  # fmt: skip
    assert unused == [".ffn.experts.weight"], "made by repacking, not stored"
    assert set(layouts._ROOT_SPLITS) <= set(flash)
