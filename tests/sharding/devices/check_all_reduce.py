"""The peer-to-peer all-reduce in programs of simulated devices: tables, calls, errors, its bench.

The sums themselves are XLA's here; ``test_all_reduce_kernel`` runs the kernel's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from pallas_kernels.all_reduce import op, ref
from pallas_kernels.all_reduce.cases import Case
from pallas_kernels.all_reduce.exchange import SENTINEL
from pallas_kernels.numerics import SERVING
from sharding import peer_bench
from sharding.build import build_ops
from sharding.collectives import ALL_REDUCES, all_reduce
from sharding.layouts import layout
from sharding.measure import PlacedStep
from sharding.mesh import make_mesh
from sharding.peer import PeerMemory, groups
from sharding.peer_bench import Bench
from sharding.place import place
from sharding.random_weights import random_model
from sharding.roofline import Step
from sharding.watchdog import StuckStep

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
    ops = build_ops(division, SERVING, "reference", "peer")
    assert ops.moe_experts.reduce is ALL_REDUCES["peer"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch"), [("tp2xdep2", 6), ("tp2", 65), ("dep2", 2)])
def test_a_measured_step_makes_the_same_tokens(name, batch):
    """Two tensor ranks sum alike either way; more rows, or none to sum over, need no memory."""
    cfg = Config.preset("tiny")
    placement = place(name, cfg)
    model = random_model(cfg, placement, numerics=SERVING)
    tokens = {}
    for kind, peers in (("psum", ""), ("peer", "reference")):
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
    monkeypatch.setattr(peer_bench, "_layers", lambda bench: {})
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
