"""The peer-to-peer all-reduce in programs of simulated devices: tables, calls, errors, its bench.

The sums themselves are XLA's here; ``test_all_reduce_kernel`` runs the kernel's.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from dsv41_jax.cache import CacheShape
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels.all_reduce import op, ref
from pallas_kernels.all_reduce.cases import Case
from pallas_kernels.all_reduce.exchange import SENTINEL
from pallas_kernels.mhc import ref as mhc
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from serving.programs import FORWARDS, OUTPUT_SPECS, Bucket, Programs
from sharding import gather_bench, peer_bench
from sharding.all_reduce import peer_kernels
from sharding.build import build_ops
from sharding.collectives import ALL_REDUCES, all_reduce
from sharding.fused_sums import FusedStreams, fusing_all_reduce
from sharding.layouts import layout
from sharding.measure import PlacedStep
from sharding.mesh import make_mesh
from sharding.peer import PeerMemory, groups
from sharding.peer_bench import Bench
from sharding.place import BY_RANK, place
from sharding.random_weights import random_model
from sharding.roofline import Step
from sharding.watchdog import StuckStep
from tests.sharding.devices.support import rounded_ops

MODEL, D = ("model",), 64


def memory_of(name: str, rows: int = 3) -> PeerMemory:
    mesh = make_mesh(layout(name))
    return PeerMemory.make(mesh, MODEL, rows=rows, width=D, kernels="reference")


def run(memory: PeerMemory, step, x):
    """``step(x)`` of every rank's part, traced inside the memory's calls; its errors."""

    def inside(x, table):
        with memory.calls(table) as calls:
            return step(x), calls.finish()

    spec = memory.table_spec
    mapped = jax.shard_map(
        inside, mesh=memory.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    return jit(mapped)(x, memory.table)


def values(seed: int, devices: int, rows: int = 3, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), (devices * rows, D), dtype)


def peer(x):
    return ALL_REDUCES["peer"](x, MODEL)


@pytest.mark.parametrize("name", ["tp2", "tp8", "tp2xdep4", "tp4xdep2"])
def test_ranks_find_the_memory_of_their_group(name):
    memory = memory_of(name)
    devices = list(memory.mesh.devices.flat)
    at = {s.device: s.data.unsafe_buffer_pointer() for s in memory.slots.addressable_shards}
    table, ranks = np.asarray(memory.table), memory.mesh.shape["model"]
    assert memory.exchange.ranks == ranks and table.shape == (len(devices), 2 * ranks + 2)
    for i, device in enumerate(devices):
        addresses = table[i, : 2 * ranks].view(np.uint64)
        first = i // ranks * ranks  # tensor ranks stand next to one another
        assert addresses.tolist() == [at[d] for d in devices[first : first + ranks]]
        assert table[i, -2:].tolist() == [i % ranks, 0]
        assert memory.table.sharding.shard_shape(table.shape) == (1, table.shape[1])
        assert [device in group for group in groups(memory.mesh, MODEL)].count(True) == 1
    slots = np.asarray(memory.slots).view(np.uint32)
    word = memory.exchange.fault // 4
    assert (slots[:, :word] == SENTINEL).all() and not slots[:, word:].any()


def test_the_outer_axis_counts_first():
    mesh = make_mesh(layout("tp2xdep4"))
    order = list(mesh.devices.flat)
    assert groups(mesh, ("data", "model")) == [order]
    assert groups(mesh, ("data",)) == [order[0::2], order[1::2]]


@pytest.mark.parametrize(("calls", "whole"), [(1, 3), (3, 3), (4, 6)])
def test_calls_are_filled_up_in_order(calls, whole, monkeypatch):
    memory, slots = memory_of("tp2xdep4"), []
    plain = op.build_all_reduce("reference")

    def recorded(x, table, after, axes, *, exchange, slot):
        slots.append(slot)
        return plain(x, table, after, axes, exchange=exchange, slot=slot)

    monkeypatch.setattr("sharding.peer.build_all_reduce", lambda kernels: recorded)

    def step(x):
        for _ in range(calls):
            x = peer(x) / 2
        return x

    x = values(0, 8)
    got, errors = run(memory, step, x)
    assert slots == [i % 3 for i in range(whole)] and not np.asarray(errors).any()
    want = x.reshape(4, 2, 3, D)
    for _ in range(calls):
        want = jnp.repeat(ref.sum_of(jnp.moveaxis(want, 1, 0))[:, None] / 2, 2, axis=1)
    assert np.asarray(got).tobytes() == np.asarray(want.reshape(got.shape)).tobytes()


def test_sums_of_two_ranks_have_the_bits_of_psum():
    memory = memory_of("tp2xdep4")
    both, _ = run(memory, lambda x: (peer(x), all_reduce(x, MODEL)), values(1, 8))
    assert np.asarray(both[0]).tobytes() == np.asarray(both[1]).tobytes()


def test_many_rows_are_summed_by_psum():
    memory = memory_of("tp2xdep4")
    many = values(2, 8, rows=65)

    def step(x):
        few = peer(x[:3])
        return peer(x) + few[:1]

    got, _ = run(memory, step, many)
    assert got.shape == many.shape
    mapped = jax.shard_map(
        peer, mesh=memory.mesh, in_specs=memory.table_spec, out_specs=memory.table_spec
    )
    assert jit(mapped)(many).shape == many.shape  # and need no memory
    assert peer_bench.all_reduce(many, ()) is many and ALL_REDUCES["peer"](many, ()) is many


def test_wrong_calls_are_refused():
    memory = memory_of("tp2xdep4")
    x = values(3, 8)
    with pytest.raises(ValueError, match=r"must be traced inside PeerMemory.calls"):
        jax.shard_map(
            peer, mesh=memory.mesh, in_specs=memory.table_spec, out_specs=memory.table_spec
        )(x)
    with pytest.raises(ValueError, match=r"x.dtype=dtype\('float32'\) must be bfloat16 of 3 x 64"):
        run(memory, peer, x.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"x.shape=\(2, 64\) .* must be bfloat16 of 3 x 64"):
        run(memory, lambda x: peer(x[:2]), x)
    with pytest.raises(ValueError, match=r"axes=\('data',\) must be \('model',\), which the peer"):
        run(memory, lambda x: ALL_REDUCES["peer"](x, ("data",)), x)
    same, errors = run(memory, lambda x: x, x)  # one without calls has nothing to report
    assert np.asarray(same).tobytes() == np.asarray(x).tobytes() and not np.asarray(errors).any()


def test_devices_without_the_kernel_are_refused():
    mesh = make_mesh(layout("tp2"))
    with pytest.raises(UserError, match=r"the 'mosaic' kernel needs an sm_90 GPU, this is cpu"):
        PeerMemory.make(mesh, MODEL, rows=1, width=D)


def test_a_rank_that_got_no_answer_is_named():
    memory = memory_of("tp2xdep4")
    memory.check(np.zeros(8, np.int32), "decode 1")
    errors = np.array([0, 0, 0, 0, 0, 1, 0, 0], np.int32)
    with pytest.raises(
        StuckStep, match=r"step decode 7: rank 5 got no answer from rank 4 within 5 s"
    ):
        memory.check(jnp.asarray(errors), "decode 7")


def test_operations_take_it_by_name():
    division = place("tp2", Config.preset("tiny")).division
    plain, alone, fused = (
        build_ops(division, numerics, kernels, kind).moe_experts.reduce
        for numerics, kernels, kind in (
            (SERVING, "reference", "psum"),
            (REFERENCE, "auto", "peer"),  # whose pass over the streams rounds otherwise
            (SERVING, "auto", "peer"),
        )
    )
    assert (plain.func, alone, fused) == (all_reduce, ALL_REDUCES["peer"], fusing_all_reduce)


@pytest.mark.parametrize(
    ("layout", "kind", "kernels", "hopper", "found"),
    [
        ("tp2", "auto", "auto", True, "mosaic"),
        ("tp2", "auto", "auto", False, ""),
        ("tp2", "auto", "reference", True, ""),
        ("dep2", "auto", "auto", True, ""),
        ("tp2", "psum", "auto", True, ""),
        ("tp2", "peer", "reference", False, "reference"),
    ],
)
def test_the_choice(layout, kind, kernels, hopper, found, monkeypatch):
    monkeypatch.setattr("sharding.all_reduce.on_hopper", lambda: hopper)
    placement = place(layout, Config.preset("tiny"))
    assert peer_kernels(kind, placement, SERVING, kernels) == found
    assert peer_kernels("auto", placement, FLOAT32, kernels) == ""
    assert peer_kernels("auto", None, SERVING, kernels) == ""


@pytest.mark.parametrize(
    ("layout", "numerics", "says"),
    [
        ("dep2", SERVING, "layout dep2 has no tensor ranks to sum over"),
        ("tp2", FLOAT32, "sums bfloat16, not numerics 'float32'"),
    ],
)
def test_what_cannot_be_summed_so(layout, numerics, says):
    placement = place(layout, Config.preset("tiny"))
    with pytest.raises(UserError, match=rf"all-reduce 'peer': {says}"):
        peer_kernels("peer", placement, numerics, "auto")
    with pytest.raises(UserError, match=r"all-reduce 'peer': layout tp1 has no tensor ranks"):
        peer_kernels("peer", None, numerics, "auto")
    with pytest.raises(UserError, match=r"the 'mosaic' kernel needs an sm_90 GPU, this is cpu"):
        peer_kernels("peer", place("tp2", Config.preset("tiny")), SERVING, "auto")


@pytest.mark.parametrize(("rows", "fuses"), [(3, True), (33, False)])
def test_the_pass_over_the_streams_takes_the_sum_in(rows, fuses, monkeypatch):
    memory, taken = memory_of("tp2", rows), []
    fused = op.build_all_reduce_norm("reference")

    def recorded(*args, **options):
        taken.append(options["slot"])
        return fused(*args, **options)

    monkeypatch.setattr("sharding.peer.build_all_reduce_norm", lambda kernels: recorded)
    key = jax.random.key(4)
    h = jax.random.normal(key, (1, rows, 4, D), jnp.bfloat16)
    post, pre = jax.random.uniform(key, (2, 1, rows, 4))
    comb, weight = jax.random.uniform(key, (1, rows, 4, 4)), jnp.ones(D, jnp.bfloat16)
    streams = FusedStreams(mhc.expand, mhc.expand_collapse_norm)

    def step(x):
        y = fusing_all_reduce(x, MODEL).reshape((1, rows, D))
        inside = streams.expand_collapse_norm(h, y, post, comb, pre, weight, norm_eps=1e-6)
        whole = all_reduce(x, MODEL).reshape(1, rows, D)
        outside = mhc.expand_collapse_norm(h, whole, post, comb, pre, weight, norm_eps=1e-6)
        return (*inside, streams.expand(h, y, post, comb)), (*outside, outside[0])

    (got, want), errors = run(memory, step, values(5, 2, rows))
    assert taken == ([0] if fuses else []) and not np.asarray(errors).any()
    for ours, plain in zip(got, want, strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(plain).tobytes()


class Sums(nnx.Module):
    """In place of a model: its programs sum ones."""

    def __init__(self):
        self.cfg, self.weight = Config.preset("tiny"), nnx.Param(jnp.ones(1, jnp.bfloat16))
        self.layers = nnx.List([])


def sums(model, ops, cache, batch, sampling, *, logprobs, steps):
    width = model.cfg.hidden_size
    ones = jnp.broadcast_to(model.weight.get_value(), (len(batch.slot), width))
    return cache, ALL_REDUCES["peer"](ones, MODEL)[:, 0]


@pytest.fixture
def programs(monkeypatch):
    """Programs of two tensor ranks and two data ranks, whose decode is ``sums``."""
    monkeypatch.setitem(FORWARDS, "decode", sums)
    monkeypatch.setitem(OUTPUT_SPECS, "decode", (BY_RANK, BY_RANK))
    placement = place("tp2xdp2", Config.preset("tiny"))
    ops = build_ops(placement.division, SERVING, "reference", "peer")
    shape = CacheShape(slots=2, pages=2, page_size=16)
    return Programs(Sums(), ops, shape, placement=placement, peers="reference")


def test_a_program_has_memory_of_its_own(programs):
    bucket, more = Bucket(2, 1, 2), Bucket(65, 1, 2)
    programs.compile("decode", bucket)
    memory, cache = programs.memory("decode", bucket), programs.new_cache()
    assert (memory.exchange.ranks, memory.exchange.rows) == (2, 2)
    assert memory is programs.memory("decode", bucket)
    assert programs.memory("draft", bucket).exchange.rows == 2 * programs.cfg.dspark_block_size
    assert programs.memory("decode", more) is None and programs.memory("put_state", bucket) is None
    with pytest.raises(ValueError, match=r"bucket.steps=4 must be 1 with peer-to-peer sums"):
        programs.memory("decode", replace(bucket, steps=4))
    _, found = programs("decode", bucket, cache, *programs.idle_inputs("decode", bucket))
    assert np.asarray(found).tolist() == [2.0] * 4
    (report,) = programs.take_reports()
    report.check("step 1")
    assert np.asarray(report.errors).tolist() == [0] * 4 and programs.take_reports() == []


def test_a_step_without_an_answer_is_named(programs, monkeypatch):
    late = jnp.array([2], jnp.int32)
    monkeypatch.setattr("sharding.peer.build_report", lambda kernels: lambda *_, exchange: late)
    bucket = Bucket(2, 1, 2)
    programs.compile("decode", bucket)
    programs("decode", bucket, programs.new_cache(), *programs.idle_inputs("decode", bucket))
    (report,) = programs.take_reports()
    with pytest.raises(
        StuckStep, match=r"step 17 \(decode\): rank 0 got no answer from rank 1 within 30 s"
    ):
        report.check("17")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("tp2xdep2", 6), ("tp2", 65), ("dep2", 2)])
def test_a_measured_step_makes_the_same_tokens(name, batch):
    """Two tensor ranks sum bf16 alike either way; more rows, or none to sum over, need no
    memory.
    """
    cfg = Config.preset("tiny")
    placement = place(name, cfg)
    model = random_model(cfg, placement, numerics=SERVING)
    tokens = {}
    for kind, peers in (("psum", ""), ("peer", "reference")):
        ops = rounded_ops(placement, SERVING)
        if kind == "peer":
            ops = build_ops(placement.division, SERVING, "reference", kind)
        step = PlacedStep(model, ops, placement, Step("decode", batch, 32), peers=peers)
        memory = step.memory()
        assert (memory is None) == (kind == "psum" or name != "tp2xdep2")
        table = () if memory is None else (memory.table,)
        compiled = step.compiled(memory)
        _, tokens[kind], *errors = compiled(nnx.split(model)[1], step.cache(), step.rows(), *table)
        assert not any(np.asarray(error).any() for error in errors)
    assert np.array_equal(tokens["psum"], tokens["peer"])


def small(rows: int = 1) -> Bench:
    return Bench(
        tuple(jax.devices()[:2]),
        Case(rows, width=D),
        layers=2,
        executions=2,
        skew=8,
        kernels="reference",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        (peer_bench.sums, {"none", "peer", "psum"}),
        (gather_bench.gathers, {"none", "peer", "xla"}),
        (peer_bench.norms, {"none", "fused", "peer", "psum"}),
    ],
)
def test_the_bench_times_every_kind(part, kinds):
    row = part(small())
    assert row["wrong"] == 0 and set(row["us"]) == kinds
    ours = row["us"]["fused" if "fused" in kinds else "peer"]
    assert row["cost_us"] == ours - row["us"]["none"] and min(row["us"].values()) > 0


def test_the_bench_counts_wrong_bits(monkeypatch):
    monkeypatch.setattr(peer_bench, "times", lambda bench, variants: {"peer": 3.0, "none": 1.0})
    monkeypatch.setattr(peer_bench, "layers", lambda *_: {})
    row = peer_bench.sums(small())
    assert row["wrong"] == 0 and row["cost_us"] == 2 and row["goal_us"] == 4
    plain = op.build_all_reduce("reference")

    def off(x, *args, **options):
        return plain(x, *args, **options).at[0, 0].add(1)

    monkeypatch.setattr("sharding.peer.build_all_reduce", lambda kernels: off)
    assert peer_bench.sums(small())["wrong"] > 0


def test_the_bench_wants_the_silence_noticed(monkeypatch):
    with pytest.raises(RuntimeError, match=r"a rank that sends nothing has gone unnoticed"):
        peer_bench.silent(small())
    late = jnp.array([2], jnp.int32)
    monkeypatch.setattr("sharding.peer.build_report", lambda kernels: lambda *_, exchange: late)
    assert "rank 0 got no answer from rank 1 within 2 s" in peer_bench.silent(small())["error"]


def test_products_of_several_axes():
    """A group over both axes: the reference sums all eight ranks."""
    mesh = make_mesh(layout("tp2xdep4"))
    both = ("data", "model")
    memory = PeerMemory.make(mesh, both, rows=1, width=8, kernels="reference")
    x = jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8)
    got, _ = run(memory, lambda x: ALL_REDUCES["peer"](x, both), x)
    assert (np.asarray(got) == np.asarray(x.sum(0, dtype=jnp.float32))[None]).all()
    assert memory.table_spec == PartitionSpec(("data", "model"))
