"""The roofline and the footprint against figures worked out by hand for eight H200."""

from dataclasses import replace
from functools import cache

import pytest

from dsv41_jax.checkpoint.fit import bytes_by_kind
from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from sharding.estimate import ShardedModel, slot_bytes
from sharding.hardware import hardware
from sharding.layouts import layout
from sharding.roofline import Step, busiest_experts, mean_capped

FLASH = Config.preset("flash")
H200 = hardware("h200")
# Without matrix time: the decode tables count bytes alone.
BYTES_ONLY = H200.with_settings(["bf16_tflops=1e9", "fp8_tflops=1e9"])
DEVICE_PARTS = ("dense", "experts", "gate", "mhc", "attention", "head")


@cache
def model(name):
    return ShardedModel(FLASH, layout(name))


def parts(name, phase, batch, context, machine=H200, **options):
    return model(name).estimate(machine, Step(phase, batch, context, **options)).parts


def printed(text):
    """A figure as a table prints it: anything that rounds to it."""
    decimals = len(text.partition(".")[2])
    return pytest.approx(float(text), abs=0.5001 * 10**-decimals)


@pytest.mark.parametrize(
    ("rows", "distinct", "gbytes", "one_us", "eight_us"),
    [
        (1, "6", 0.148, "34.5", "4.3"),
        (8, "45.5", 0.89, "207", "25.9"),
        (32, "152", 2.89, "673", "84.1"),
        (128, "333", 6.3, "1464", "183"),
    ],
)
def test_expert_bytes_of_decode(rows, distinct, gbytes, one_us, eight_us):
    touched = busiest_experts(384, 1, 6, rows)
    assert touched == printed(distinct)
    weights = model("tp1").weights
    held = touched * weights[0, "experts"].nbytes / 384 + weights[0, "shared"].nbytes
    assert held / 1e9 == pytest.approx(gbytes, rel=2e-3)
    assert parts("tp1", "decode", rows, 8192)["experts"] / 40 == pytest.approx(float(one_us), 2e-3)
    assert parts("tp8", "decode", rows, 8192)["experts"] / 40 == printed(eight_us)


@pytest.mark.parametrize(("rows", "most"), [(8, 9.0), (32, 23.9), (128, 44.8)])
def test_experts_of_the_busiest_of_eight_ranks(rows, most):
    """Tabulated by simulation of the routing."""
    assert busiest_experts(384, 8, 6, rows) == pytest.approx(most, rel=0.01)


def test_limits_of_the_busiest_rank():
    assert busiest_experts(8, 1, 2, 1) == pytest.approx(2)
    assert busiest_experts(384, 8, 6, 10**6) == pytest.approx(48)
    assert busiest_experts(384, 1, 6, 10**6) == pytest.approx(384)


@pytest.mark.parametrize(
    ("batch", "device_ms", "split_ms", "whole_ms", "step_ms"),
    [
        (1, "0.51", "0.52", "0.55", "1.8"),
        (8, "1.40", "1.44", "1.74", "2.7"),
        (32, "3.83", "4.00", "5.19", "5.1"),
        (128, "8.2", "8.9", "13.6", "9.5"),
    ],
)
def test_whole_decode_step(batch, device_ms, split_ms, whole_ms, step_ms):
    """TP8: bytes of a device; with the scan of 1M tokens, shared by the ranks or not; at 8K with 80
    all-reduces of 7 us and 12 kernels a layer of 1.5 us.
    """
    short = parts("tp8", "decode", batch, 8192, BYTES_ONLY)
    device = sum(short[name] for name in DEVICE_PARTS)
    assert device / 1e3 == printed(device_ms)
    for index_split, expected in ((True, split_ms), (False, whole_ms)):
        scan = parts("tp8", "decode", batch, 2**20, BYTES_ONLY, index_split=index_split)["indexer"]
        assert (device + scan) / 1e3 == printed(expected)
    assert short["collectives"] == pytest.approx(80 * 7)
    assert short["launches"] == pytest.approx(40 * 12 * 1.5)
    assert (device + short["collectives"] + short["launches"]) / 1e3 == printed(step_ms)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_the_whole_is_little_more_than_the_table(batch):
    """What the table leaves out: Engram, compressors and indexers, the ends of the stack."""
    found = parts("tp8", "decode", batch, 8192)
    listed = sum(found[name] for name in (*DEVICE_PARTS, "collectives", "launches"))
    rest = sum(us for us in found.values()) - listed
    assert 70 < rest < 110
    assert rest == pytest.approx(
        sum(found[n] for n in ("engram", "index_weights", "indexer", "edge_collectives"))
    )


def test_projections_are_bound_by_matrices_from_92_rows():
    """wq_a and wkv (replicated) and an eighth of the others: 23.86 MB, read once."""
    assert parts("tp8", "decode", 1, 8192)["dense"] / 40 == printed("5.55")
    assert parts("tp8", "decode", 91, 8192)["dense"] / 40 == printed("5.55")
    flops = 2 * 128 * (1792 * 5120 + (126_615_552 - 1792 * 5120) / 8)
    assert parts("tp8", "decode", 128, 8192)["dense"] / 40 == pytest.approx(flops / 790e6)


@pytest.mark.parametrize(
    ("rows", "site_us", "gate_us"), [(1, "0.48", "0.92"), (8, "0.65", None), (128, "3.5", "1.26")]
)
def test_streams_and_gate(rows, site_us, gate_us):
    found = parts("tp8", "decode", rows, 8192)
    assert found["mhc"] / 80 == printed(site_us)
    if gate_us:
        assert found["gate"] / 40 == printed(gate_us)


@pytest.mark.parametrize(
    ("context", "scanned_us", "candidates_us"),
    [(8192, 0.3, 0.5), (2**15, 1.3, 1.04), (2**17, 5.2, 1.04), (2**18, 10.4, 1.04),
     (2**20, 41.5, 1.04)],
)  # fmt: skip
def test_index_scan(context, scanned_us, candidates_us):
    found = parts("tp8", "decode", 1, context)["indexer"]
    assert found == pytest.approx(scanned_us + candidates_us, abs=0.06)


def test_ends_and_engram():
    assert parts("tp1", "decode", 1, 8192)["head"] == printed("308")
    assert parts("tp8", "decode", 1, 8192)["head"] == printed("38.5")
    assert parts("tp1", "decode", 1, 8192)["engram"] == printed("73")
    assert parts("tp8", "decode", 1, 8192)["engram"] == printed("9")


@pytest.mark.parametrize(
    ("tokens", "layers_21_ms", "layers_40_ms"), [(8192, "13.5", None), (32768, "53.9", "102.8")]
)
def test_experts_of_prefill(tokens, layers_21_ms, layers_40_ms):
    """bf16, /8; after the cut layer only the last 128 rows run, at the cost of 128 decoded rows."""
    replayed = parts("tp8", "prefill", 1, tokens)["experts"]
    tail = 19 * parts("tp8", "decode", 128, 8192)["experts"] / 40
    assert (replayed - tail) / 1e3 == printed(layers_21_ms)
    if layers_40_ms:
        whole = parts("tp8", "prefill", 1, tokens, bounded_replay=False)["experts"]
        assert whole / 1e3 == printed(layers_40_ms)


def test_other_parts_of_prefill():
    short = parts("tp8", "prefill", 1, 8192, bounded_replay=False)
    long = parts("tp8", "prefill", 1, 32768, bounded_replay=False)
    assert short["mhc"] / 1e3 == printed("2.0")
    assert long["mhc"] / 1e3 == printed("7.8")
    assert short["gate"] / 40 == printed("41")
    assert long["gate"] / 40 == printed("163")
    # 38 layers see 640 rows, two see 128; a few rows at the start see fewer.
    assert long["attention"] / 38.4 / 1e3 == pytest.approx(0.54, rel=0.02)
    assert parts("tp8", "prefill", 1, 32768)["indexer"] / 1e3 == printed("1.0")


def test_bounded_replay_halves_prefill_and_leaves_decode():
    replayed = sum(parts("tp8", "prefill", 1, 32768).values())
    whole = sum(parts("tp8", "prefill", 1, 32768, bounded_replay=False).values())
    assert 1.7 < whole / replayed < 1.95
    assert parts("tp8", "prefill", 1, 128) == parts("tp8", "prefill", 1, 128, bounded_replay=False)
    assert parts("tp8", "decode", 8, 8192) == parts("tp8", "decode", 8, 8192, bounded_replay=False)


def test_verify_is_decode_of_six_rows_a_request_with_one_scan():
    verify, decode = parts("tp8", "verify", 4, 2**17), parts("tp8", "decode", 24, 2**17)
    assert verify["experts"] == pytest.approx(decode["experts"])
    assert verify["attention"] == pytest.approx(decode["attention"])
    # Six rows share the bytes of a scan, so it is bound by matrices: layers 2, 8, 14, 20, and four
    # layers over 16384 candidates, 32 heads of 128.
    keys = 2.5 * 2**17 + 4 * 16384
    assert decode["indexer"] == pytest.approx(24 * keys * 68 / 4.3e6)
    assert verify["indexer"] == pytest.approx(24 * keys * 8192 / 1400e6)
    bytes_only = parts("tp8", "verify", 4, 2**17, BYTES_ONLY)
    assert bytes_only["indexer"] == pytest.approx(decode["indexer"] / 6)


def test_dep_reads_whole_dense_weights_and_an_eighth_of_the_requests():
    tp, dep = parts("tp8", "decode", 128, 2**17), parts("dep8", "decode", 128, 2**17)
    assert dep["indexer"] == pytest.approx(tp["indexer"] / 8)
    assert dep["head"] == pytest.approx(308, abs=0.5)
    assert dep["dense"] / 40 == pytest.approx(126_615_552 * (1 + 1 / 1024) / 4.3e6)


def test_collectives_grow_with_bytes_and_domains():
    """8192 rows: an all-reduce sends 2 * 7/8 of 84 MB over a link of 450 GB/s."""
    found = parts("tp8", "prefill", 1, 8192, bounded_replay=False)["collectives"]
    assert found == pytest.approx(80 * 1.75 * 8192 * 10240 / 450e3)
    wide = H200.with_settings(["network_gbps=50"])
    slow, fast = (
        model("dep16").estimate(machine, Step("decode", 2048, 8192)).parts["collectives"]
        for machine in (wide, wide.with_settings(["gpus_per_domain=16"]))
    )
    assert slow == pytest.approx(9 * fast)
    with pytest.raises(UserError, match=r"hardware h200: give --set NAME=VALUE for network_gbps"):
        model("dep16").estimate(H200, Step("decode", 16, 8192))


@pytest.mark.parametrize(
    ("start", "end", "cap", "mean"), [(0, 10, 20, 5), (5, 5, 3, 3), (0, 10, 5, 3.75), (4, 4, 9, 4)]
)
def test_mean_capped(start, end, cap, mean):
    assert mean_capped(start, end, cap) == pytest.approx(mean)


def test_bytes_by_kind():
    assert model("tp1").bytes_by_kind == replace(bytes_by_kind(inventory(FLASH)), vision=0)
    held = model("tp8").bytes_by_kind
    assert held.experts == 40 * 384 * 18_800_640 // 8
    assert held.engram_tables == (48_000_771 + 48_002_086) * 264
    assert held.loaded / 1e9 == printed("64.4")
    assert model("dep8").bytes_by_kind.experts == held.experts
    assert model("tp4xdp2").bytes_by_kind.experts == 2 * held.experts
    assert model("tp4xdp2").bytes_by_kind.engram_tables == held.engram_tables


def test_private_bytes_of_a_request():
    """43 rings of 256 tagged rows; 128 carried rows of 4 streams, pre, 512 and 2048 positions."""
    found = slot_bytes(FLASH)
    assert found["windows"] == 43 * 256 * (528 + 4)
    assert found["carry"] == 128 * (4 * 5120 * 2 + 4 * 4 + 512 * 4 + 2048 * 4 + 4)
    assert found["pairs"] == 3 * 8 * (2 * 512 * 4 + 4) + 3 * 4 + 4


def test_footprint_counts_pages_slots_and_the_reserve():
    held = model("tp8").footprint(H200, context=100, concurrency=3)
    assert held.pool == 3 * 128 * 890
    assert held.windows == 3 * 43 * 256 * 532
    assert held.reserved == 14_100_000_000
    assert held.total == sum(held.by_kind.values())
    assert model("dep8").footprint(H200, 100, 9).pool == 2 * 128 * 890


def test_will_it_fit():
    """128 requests of 1M tokens need 119 GB of cache on every tensor rank, an eighth in DEP."""
    assert not model("tp1").footprint(H200, 64, 1).fits
    assert not model("tp8").footprint(H200, 2**20, 128).fits
    assert model("dep8").footprint(H200, 2**20, 128).fits
    most = model("tp8").footprint(H200, 2**20, 1).kv_tokens // 2**20
    per_request = 890 * 2**20 + sum(slot_bytes(FLASH).values())
    room = 126_900_000_000 - model("tp8").bytes_by_kind.loaded
    assert most == room // (890 * 2**20)
    fitting = room // per_request
    assert model("tp8").footprint(H200, 2**20, fitting).fits
    assert not model("tp8").footprint(H200, 2**20, fitting + 1).fits


def test_memory_domains_slow_only_their_own_kind():
    slow = H200.with_settings(["cache_factor=0.5"])
    before, after = parts("tp8", "decode", 8, 2**18), parts("tp8", "decode", 8, 2**18, slow)
    assert after["indexer"] == pytest.approx(2 * before["indexer"])
    assert after["experts"] == before["experts"]
    slow = H200.with_settings(["weights_factor=0.5"])
    assert parts("tp8", "decode", 8, 2**18, slow)["experts"] == pytest.approx(2 * before["experts"])


@pytest.mark.parametrize(
    ("values", "named"),
    [(("train", 1, 1), "phase='train'"), (("decode", 0, 1), "batch=0"),
     (("decode", 1, 0), "context=0")],
)  # fmt: skip
def test_a_step_is_checked(values, named):
    with pytest.raises(ValueError, match=named):
        Step(*values)


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="layout tp8: vocabulary = 129284"):
        ShardedModel(replace(FLASH, vocab_size=129284), layout("tp8"))
