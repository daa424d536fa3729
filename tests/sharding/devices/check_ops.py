"""Operations over ranks against those of one device."""

import threading
import time
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.ops import local_ops
from pallas_kernels.moe_experts import repack
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import FLOAT32, REFERENCE
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, Fp8Rows
from sharding.build import build_ops
from sharding.collectives import anywhere, from_first
from sharding.dispatch import AllToAll
from sharding.engram_rows import SpreadRows
from sharding.experts import SpreadExperts
from sharding.hlo import collectives
from sharding.layouts import layout
from sharding.mesh import make_mesh
from sharding.place import place
from sharding.repack import local_shapes, repack_placed, repacked
from sharding.watchdog import StuckStep, Watchdog
from tests.compare import assert_abs
from tests.sharding.devices.support import Placed, rounded_ops

DATA, MODEL, WHOLE = PartitionSpec("data"), PartitionSpec("model"), PartitionSpec()
LOCAL = local_ops(FLOAT32, "reference")
R, D, F, E, K, LIMIT = 5, 64, 64, 8, 2, 2.0


def over(name, function, inputs, outputs):
    mesh = make_mesh(layout(name))
    return jit(
        jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    )


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(*stack):
    return ExpertWeights(normal(1, *stack, F, D), normal(2, *stack, F, D), normal(3, *stack, D, F))


def routing(kind, rows):
    rng = np.random.default_rng(4)
    ids = {
        "uniform": np.stack([rng.permutation(E)[:K] for _ in range(rows)]),
        "one expert": np.tile(np.array([3, 3 + E // 2]), (rows, 1)),
        "one row": np.where(np.arange(rows)[:, None] == 7, np.array([[1, 6]]), -1),
        "nobody": np.full((rows, K), -1),
    }[kind]
    return ids.astype(np.int32), rng.random((rows, K)).astype(np.float32)


@cache
def experts_on(name, rows_over, experts_over, columns_over, dispatch="gather"):
    spread = SpreadExperts(
        LOCAL.moe_experts, rows_over, experts_over, columns_over, dispatch=dispatch
    )
    by_row = DATA if rows_over else WHOLE
    e, f = experts_over or None, columns_over or None
    specs = ExpertWeights(PartitionSpec(e, f), PartitionSpec(e, f), PartitionSpec(e, None, f))
    shared_specs = ExpertWeights(PartitionSpec(f), PartitionSpec(f), PartitionSpec(None, f))
    return over(
        name,
        lambda *inputs: spread(*inputs, limit=LIMIT),
        (by_row, by_row, by_row, specs, shared_specs),
        by_row,
    )


@pytest.mark.parametrize("kind", ["uniform", "one expert", "one row", "nobody"])
@pytest.mark.parametrize(
    ("name", "rows_over", "experts_over", "columns_over"),
    [
        ("dep2", ("data",), ("data",), ()),
        ("dep8", ("data",), ("data",), ()),
        ("tp2", (), (), ("model",)),
        ("tp4", (), ("model",), ()),
        ("tp2xdep4", ("data",), ("data",), ("model",)),
        ("tp4xdep2", ("data",), ("data", "model"), ()),
    ],
)
def test_experts(name, rows_over, experts_over, columns_over, kind):
    """Rows whose ids are -1 hold NaN: they reach no expert and change no other row."""
    ranks = layout(name).data if rows_over else 1
    rows = R * ranks
    x, (ids, routed) = normal(5, rows, D), routing(kind, rows)
    live = ids[:, 0] >= 0
    experts, shared = weights(E), weights()
    want = np.asarray(LOCAL.moe_experts(x, ids, routed, experts, shared, limit=LIMIT))
    x = np.where(live[:, None], x, np.nan)
    run = experts_on(name, rows_over, experts_over, columns_over)
    got = np.asarray(run(x, ids, routed, experts, shared))
    assert_abs(got[live], want[live], 2e-4)


@pytest.mark.parametrize(
    ("name", "experts_over", "most"),
    [("tp2xdep2", ("data", "model"), 11), ("dep4", ("data",), 2)],
    ids=["enough room", "too little room"],
)
def test_rows_go_to_their_experts(name, experts_over, most, monkeypatch):
    """All to all, or all gather where one rank has more rows for another than it has room for."""
    monkeypatch.setattr(AllToAll, "most", lambda self, rows, k: most)
    rows = 12 * layout(name).data
    x, (ids, routed) = normal(5, rows, D), routing("uniform", rows)
    ids = np.where(np.arange(rows)[:, None] % 5 == 0, -1, ids)
    live = ids[:, 0] >= 0
    experts, shared = weights(E), weights()
    want = np.asarray(LOCAL.moe_experts(x, ids, routed, experts, shared, limit=LIMIT))
    x = np.where(live[:, None], x, np.nan)
    run = experts_on(name, ("data",), experts_over, (), "all_to_all")
    text = run.lower(x, ids, routed, experts, shared).compile().as_text()
    assert "all-to-all" in text and "conditional" in text
    assert_abs(np.asarray(run(x, ids, routed, experts, shared))[live], want[live], 2e-4)


@pytest.mark.parametrize(
    ("ranks", "rows", "k", "most"),
    [(8, 1024, 6, 629), (32, 1024, 6, 227), (8, 1, 6, 1), (2, 8, 2, 8)],
)
def test_room_for_rows(ranks, rows, k, most):
    assert AllToAll(12, ranks).most(rows, k) == most


def test_partial_sums_are_rounded_once():
    """Eight ranks' parts of a projection and of experts: summed as they are, or rounded first."""
    heads, k, n, d, f = 16, 64, 32, 256, 256
    sizes = {"num_attention_heads": heads, "o_groups": 8, "o_lora_rank": n}
    placement = place("tp8", replace(Config.preset("tiny"), moe_intermediate_size=f, **sizes))
    o, x = (jnp.asarray(normal(i, 16, *s), jnp.bfloat16) for i, s in enumerate([(heads, k), (d,)]))
    blocks, rows4 = jit(Fp8Blocks.quantize), jit(Fp4Rows.quantize)
    wo_a, wo_b = blocks(normal(2, 8 * n, heads * k // 8)), blocks(normal(3, d, 8 * n))
    up, down = normal(4, E, f, d), normal(5, E, d, f)
    experts = ExpertWeights(rows4(up), rows4(up[::-1]), rows4(down))
    shared = ExpertWeights(blocks(up[0]), blocks(up[1]), blocks(down[0]))
    inputs = o, wo_a, wo_b, x, *routing("uniform", 16), experts, shared

    def both(ops, o, wo_a, wo_b, *moe, **options):
        projected = ops.output_projection(o, wo_a, wo_b, groups=wo_a.shape[0] // n, **options)
        return projected, ops.moe_experts(*moe, limit=LIMIT, **options)

    local = local_ops(REFERENCE, "reference")
    want = jit(partial(both, local, out_dtype=jnp.float32))(*inputs)
    specs = [PartitionSpec(*spec) for spec in ((None, "model"), ("model",), (None, "model"))]
    stacked, one = (
        ExpertWeights(*(placement.spec(f".ffn.{kind}.{w}.weight") for w in ("w1", "w3", "w2")))
        for kind in ("experts", "shared_experts")
    )
    specs += [WHOLE] * 3 + [stacked, one]
    equal, error = {}, {}
    for kind, ops in (
        ("parts", build_ops(placement.division, REFERENCE, "reference")),
        ("rounded", rounded_ops(placement, REFERENCE)),
    ):
        got = over("tp8", partial(both, ops), tuple(specs), WHOLE)(*inputs)
        assert [y.dtype.name for y in got] == ["bfloat16"] * 2
        equal[kind] = float(jnp.mean(got[0] == want[0].astype(jnp.bfloat16)))
        error[kind] = float(jnp.std(got[1].astype(jnp.float32) - want[1]))
    assert equal["parts"] > 0.99 and equal["rounded"] < 0.7
    assert error["parts"] < 0.95 * error["rounded"]  # each expert is rounded either way


@pytest.mark.parametrize(
    ("name", "asking", "sharing"),
    [("tp4", (), ("model",)), ("dep4", ("data",), ()), ("tp2xdep4", ("data",), ("model",))],
)
def test_spread_rows_are_bit_equal(name, asking, sharing):
    ranks = layout(name).data if asking else 1
    table = Fp8Rows.quantize(jnp.asarray(normal(6, 40, 64)))
    ids = np.random.default_rng(7).integers(0, 40, (3 * ranks, 2, 6), np.int32)
    spread = SpreadRows(asking, sharing)
    by_row = DATA if asking else WHOLE
    run = over(name, spread, (PartitionSpec((*asking, *sharing)), by_row), by_row)
    got, want = run(table, ids), jax.tree.map(lambda plane: plane[ids], table)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def part_of(values, rank):
    return jax.tree.map(lambda leaf: leaf.addressable_shards[rank].data, values)


@pytest.mark.slow
def test_every_rank_repacks_its_own_columns():
    """What a rank unpacks is its part, bit for bit."""
    cfg = replace(Config.preset("flash"), moe_intermediate_size=512)
    placement = place("tp2", cfg)
    kinds = {"experts": (Fp4Rows, (2,)), "shared_experts": (Fp8Blocks, ())}
    whole, placed = [], []
    for kind, (encoding, stack) in kinds.items():
        values = [
            encoding.quantize(jnp.asarray(w))
            for w in (
                normal(1, *stack, 512, 256),
                normal(2, *stack, 512, 256),
                normal(3, *stack, 256, 512),
            )
        ]
        specs = [placement.sharding(f".ffn.{kind}.{name}.weight") for name in ("w1", "w3", "w2")]
        whole.append(ExpertWeights(*values))
        placed.append(ExpertWeights(*map(jax.device_put, values, specs)))
    assert repack.misfit(*local_shapes(*placed)) == ""
    packed = repacked(*placed, placement)
    assert packed.width == 256
    for rank in range(2):
        got = jax.device_get(repack.unpack(part_of(packed, rank), 2, 256, 256))
        want = part_of(tuple(placed), rank)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_mosaic_experts_are_refused_where_they_cannot_be():
    placed = Placed.of("tp2", numerics=REFERENCE)
    with pytest.raises(UserError, match="layout tp2: kernels 'mosaic': width f=32 must be"):
        repack_placed(placed.model, placed.placement, "mosaic")
    repack_placed(placed.model, placed.placement, "reference")
    assert isinstance(placed.model.layers[0].ffn.experts(), ExpertWeights)


def test_ranks_agree_on_the_values_of_the_first():
    """Every rank has its own scores; all take the first one's choice, -inf and NaN included."""

    def choose(scores):
        rank = jax.lax.axis_index("model")
        mine = scores + rank * 1e-3 * jnp.arange(8)
        mine = jnp.where(rank > 0, mine.at[:, 5].set(jnp.nan), mine.at[:, 5].set(-jnp.inf))
        agreed = from_first(
            {"scores": mine, "token": jnp.argmax(mine, 1), "odd": mine > 0}, ("model",)
        )
        return jax.tree.map(lambda leaf: leaf[None], agreed)

    scores = normal(8, 3, 8)
    got = over("tp8", choose, WHOLE, MODEL)(scores)
    want = scores.copy()
    want[:, 5] = -np.inf
    for leaf, values in (("scores", want), ("token", want.argmax(1)), ("odd", want > 0)):
        for rank in range(8):
            np.testing.assert_array_equal(np.asarray(got[leaf][rank]), values)


def test_one_rank_keeps_all_going():
    def going(flags):
        return anywhere(flags[0], ("data",))[None]

    run = over("dep4", going, DATA, DATA)
    assert np.asarray(run(np.array([False, False, True, False]))).all()
    assert not np.asarray(run(np.zeros(4, bool))).any()


def test_collectives_of_a_program_are_counted():
    def several(x):
        y = jax.lax.psum(x, "model")
        z = jax.lax.all_gather(x * 2, "model", axis=0, tiled=True)
        return y, jax.lax.psum_scatter(z.astype(jnp.bfloat16), "model", tiled=True)

    compiled = (
        over("tp4", several, WHOLE, (WHOLE, WHOLE)).lower(np.ones((8, 3), np.float32)).compile()
    )
    found = {kind: (t.count, t.nbytes) for kind, t in collectives(compiled.as_text()).items()}
    assert found["all-reduce"] == (1, 96)
    assert found["all-gather"] == (1, 384)
    assert found["reduce-scatter"][0] == 1


def test_a_stuck_collective_is_named():
    """One rank does not come: the step ends with an error that names it and the waiting ranks."""
    go = threading.Event()

    def stall(rank):
        if rank == 2:
            go.wait(30)
        return np.float32(0)

    def late(x):
        extra = jax.pure_callback(
            stall, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.axis_index("model")
        )
        return jax.lax.psum(x + extra, "model")

    y = over("tp4", late, WHOLE, WHOLE)(np.ones(8, np.float32))
    began = time.monotonic()
    with pytest.raises(StuckStep, match=r"step 12 \(decode 8 x 1\) .* process 0 .* rank .*2"):
        Watchdog(0.5).wait(y, "12 (decode 8 x 1)")
    assert time.monotonic() - began < 10
    go.set()
    Watchdog(30).wait(y, "12 again")
    np.testing.assert_array_equal(np.asarray(y), 4)
