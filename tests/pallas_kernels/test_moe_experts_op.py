"""Which kernel ``moe_experts`` runs, what it refuses, and how a model's weights come to it."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv41_jax import moe
from dsv41_jax.config import Config
from pallas_kernels import dispatch
from pallas_kernels.addends import Addends
from pallas_kernels.mhc.site_ptx import MAX_ROWS, MIXES
from pallas_kernels.moe_experts import cases, kernel_sm90, op, ref, repack
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING

PREFILL = kernel_sm90.moe_experts_prefill
LIMIT = 2.0


def _routing(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.random((rows, 2)).argsort(-1).astype(np.int32)
    ids[rng.random((rows, 2)) < 0.1] = -1
    return ids, rng.random((rows, 2)).astype(np.float32)


@cache
def _drawn():
    return jax.jit(cases.random_weights, static_argnums=(1, 2, 3))(jax.random.key(0), 2, 256, 256)


def _small():
    routed, shared = _drawn()
    ids, weights = _routing(4)
    return jnp.ones((4, 256), jnp.bfloat16), ids, weights, routed, shared


def test_a_kernel_asked_for_by_name_takes_only_its_weights(monkeypatch):
    x, ids, weights, routed, shared = _small()
    options = {"limit": LIMIT, "numerics": SERVING}
    packed = repack.pack(routed, shared)
    with pytest.raises(ValueError, match="PackedExperts of 'reference' moe_experts must be unpack"):
        op.build("reference")(x, ids, weights, packed, shared, **options)
    with pytest.raises(ValueError, match="needs an sm_90 GPU"):
        op.build("mosaic")
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    with pytest.raises(ValueError, match="ExpertWeights of 'mosaic' moe_experts must be packed"):
        op.build("mosaic")(x, ids, weights, routed, shared, **options)
    # "auto" goes by the weights: these are the reference's.
    got, want = (
        jax.jit(partial(op.build(kind), **options))(x, ids, weights, routed, shared)
        for kind in ("auto", "reference")
    )
    np.testing.assert_array_equal(got, want)


def test_packed_weights_of_other_sizes_are_refused():
    _, _, _, routed, shared = _small()
    packed = repack.pack(routed, shared)
    assert repack.packed_count(packed, 256) == 2
    with pytest.raises(ValueError, match="chunks=6 of packed experts must be a multiple of 12"):
        repack.packed_count(packed, 1024)
    x, ids, weights = jnp.ones((200, 512), jnp.bfloat16), *_routing(200)
    sizes = {"experts": 1, "width": 256, "limit": LIMIT}
    for kernel, shared in ((kernel_sm90.moe_experts_decode, ()), (PREFILL, (None,))):
        with pytest.raises(ValueError, match=r"packed down shape=\(4, .*\) must be \(3, "):
            kernel(x, ids, weights, packed, *shared, numerics=SERVING, **sizes)


def test_the_kernels_refuse_other_dtypes_and_shapes():
    x, ids, weights, routed, shared = _small()
    packed = repack.pack(routed, shared)
    sizes = {"experts": 2, "width": 256, "limit": LIMIT}
    for kernel, last in ((kernel_sm90.moe_experts_decode, ()), (PREFILL, (shared,))):
        with pytest.raises(ValueError, match="must be of bfloat16"):
            kernel(x, ids, weights, packed, *last, numerics=FLOAT32, **sizes)
        with pytest.raises(ValueError, match=r"ids.shape=\(3, 2\) .* must be \[4, k\]"):
            kernel(x, ids[:3], weights, packed, *last, numerics=SERVING, **sizes)


@pytest.mark.parametrize("wrong", [-2, 2])
def test_ids_are_checked_when_checks_are_on(wrong):
    x, ids, weights, routed, shared = _small()
    ids[2, 1] = wrong
    run = op.build("reference")
    run(x, ids, weights, routed, shared, limit=LIMIT, numerics=SERVING)
    with jax.enable_checks(True), pytest.raises(Exception, match=rf"id {wrong} must be -1 or in"):
        y = run(x, ids, weights, routed, shared, limit=LIMIT, numerics=SERVING)
        jax.block_until_ready(y)
        jax.effects_barrier()


@pytest.mark.parametrize(
    "rows,name", [(128, "moe_experts_decode"), (129, "moe_experts_prefill"), (3, "shared_expert")]
)
def test_rows_choose_the_kernel(rows, name, monkeypatch):
    _, _, _, routed, shared = _small()
    packed, (ids, weights) = repack.pack(routed, shared), _routing(rows)
    if name == "shared_expert":  # no experts at all
        packed = jax.tree.map(lambda plane: plane[:0], packed)
    calls = []

    def recorder(kernel: str):
        return lambda *_, **options: calls.append((kernel, options))

    for kernel in ("moe_experts_decode", "moe_experts_prefill", "shared_expert"):
        monkeypatch.setattr(kernel_sm90, kernel, recorder(kernel))
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    x = jnp.ones((rows, 256), jnp.bfloat16)
    nothing = jax.tree.map(lambda plane: plane[:0], shared)
    for one in (shared, nothing):
        op.build("auto")(x, ids, weights, packed, one, limit=LIMIT, numerics=SERVING)
    assert [kernel for kernel, _ in calls] == [name, name]
    if name == "moe_experts_decode":
        assert [options["shared"] for _, options in calls] == [True, False]
    if name != "shared_expert":
        assert all((o["experts"], o["width"]) == (2, 256) for _, o in calls)


def test_few_rows_in_serving_numerics_are_left_in_parts(monkeypatch):
    _, _, _, routed, shared = _small()
    packed, launched = repack.pack(routed, shared), []

    def launcher(s, phases, rounded):
        launched.append(s)
        return lambda *_: jnp.arange(s.sums * s.rows * s.d, dtype=jnp.float32).reshape(-1, s.d)

    monkeypatch.setattr(kernel_sm90, "launcher", launcher)
    monkeypatch.setattr(kernel_sm90, "arrange", lambda s, shared: lambda *_: (s, shared))
    monkeypatch.setattr(kernel_sm90, "moe_experts_decode", lambda *_, **options: options)
    monkeypatch.setattr(dispatch, "on_hopper", lambda: True)
    run = partial(op.build("auto"), limit=LIMIT)

    def leaves_parts(rows: int, numerics=SERVING, **options) -> bool:
        x = jnp.ones((rows, 256), jnp.bfloat16)
        options |= {"limit": LIMIT, "numerics": numerics}
        y = run(x, *_routing(rows), packed, shared, **options)
        if isinstance(y, Addends):
            s = launched[-1]
            flat = np.arange(s.sums * rows * 256).reshape(s.sums, rows, 256)
            np.testing.assert_array_equal(y.parts, flat)
        return isinstance(y, Addends)

    assert kernel_sm90.MOST_ROWS == MAX_ROWS and kernel_sm90.MOST_PARTS == MIXES
    assert all(leaves_parts(rows, parts=True) for rows in (1, 2, MAX_ROWS))
    s = launched[0]
    assert s.joint and s.sums == 2 * s.down.splits + s.down8.splits
    assert not leaves_parts(1) and not leaves_parts(2)
    assert not leaves_parts(0, parts=True) and not leaves_parts(MAX_ROWS + 1, parts=True)
    assert not leaves_parts(1, REFERENCE, parts=True)
    assert not leaves_parts(1, parts=True, out_dtype=jnp.float32)
    monkeypatch.setattr(kernel_sm90, "MOST_PARTS", s.sums - 1)
    assert not leaves_parts(1, parts=True)
    x = jnp.ones((1, 256), jnp.bfloat16)
    y = op.build("reference")(
        x, *_routing(1), routed, shared, limit=LIMIT, numerics=SERVING, parts=True
    )
    assert isinstance(y, jax.Array)


def test_checks_of_parts_add_them_up():
    x, ids, weights, routed, shared = _small()
    rows = x, jnp.asarray(ids), jnp.asarray(weights)
    case = cases.Case(4, cases.Layout("small", 2, 256, 2, 256, 2))
    packed = repack.pack(routed, shared)

    def run(share, x, ids, weights, packed, shared, *, parts, **options):
        y = ref.moe_experts(x, ids, weights, routed, shared, out_dtype=jnp.float32, **options)
        return Addends(jnp.stack([0.75 * y, share * y]))

    for share in (0.25, 0.5):
        routes = {"drawn": rows[1]}
        near, *properties = cases.in_parts(
            case, 0, partial(run, share), rows, routes, packed, shared, routed
        )
        assert near.ok == (share == 0.25)
        assert len(properties) == 5 and all(one.ok for one in properties)


def test_a_models_experts_are_repacked_without_loss():
    cfg = dataclasses.replace(Config.preset("tiny"), hidden_size=256, moe_intermediate_size=256)
    model = nnx.List([moe.MoE(cfg, 2, 1, numerics=SERVING, rngs=nnx.Rngs(0))])
    before = [(m.experts(), m.shared_experts()) for m in model]
    moe.repack_experts(model)  # no Hopper GPU here: left as they are
    assert isinstance(model[0].experts(), ExpertWeights)
    moe.repack_experts(model, "mosaic")
    for layer, (experts, shared) in zip(model, before, strict=True):
        packed = layer.experts()
        assert isinstance(packed, repack.PackedExperts)
        back, shared_back = jax.jit(repack.unpack, static_argnums=(1, 2, 3))(packed, 2, 256, 256)
        assert isinstance(back, ExpertWeights)
        jax.tree.map(np.testing.assert_array_equal, back, experts)
        jax.tree.map(np.testing.assert_array_equal, shared_back, shared)
        jax.tree.map(np.testing.assert_array_equal, layer.shared_experts(), shared)
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert "0/experts/weight" in paths and "0/experts/w1/weight" not in paths


def test_experts_that_do_not_fit_stay_unless_the_kernel_was_asked_for(monkeypatch):
    monkeypatch.setattr(moe, "on_hopper", lambda: True)
    model = moe.MoE(Config.preset("tiny"), 2, 1, numerics=SERVING, rngs=nnx.Rngs(0))
    moe.repack_experts(model, "auto")
    assert isinstance(model.experts(), ExpertWeights)
    with pytest.raises(ValueError, match="must be a multiple of 256"):
        moe.repack_experts(model, "mosaic")
