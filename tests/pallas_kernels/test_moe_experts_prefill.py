"""The prefill kernel's plan and bit layout on the CPU; the kernel itself needs an H200
(``tests/h200``).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_experts import cases, emulate_prefill, ref, repack
from pallas_kernels.moe_experts import prefill_plan as pp
from pallas_kernels.moe_experts.prefill_shape import GROUP, MAX_GROUPS, TILE, Ring, Shape
from pallas_kernels.numerics import FLOAT32, SERVING

LIMIT = 2.0  # clamps both gates and ups of these inputs


def routing(rows: int, k: int, experts: int, hot: bool, seed: int = 0):
    """Ids with -1 among them; ``hot``: every row also asks for expert 0."""
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, experts)).argsort(-1)[:, :k].astype(np.int32)
    ids[rng.random((rows, k)) < 0.1] = -1
    if hot:
        ids[:, 1:] = np.where(ids[:, 1:] == 0, -1, ids[:, 1:])
        ids[:, 0] = 0
    return ids, rng.random((rows, k)).astype(np.float32)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("rows,k,experts", [(1, 2, 3), (40, 6, 384), (500, 3, 4), (1000, 1, 2)])
def test_plan_covers_every_valid_pair_once(rows, k, experts, hot):
    ids, weights = routing(rows, k, experts, hot)
    s = Shape(rows, k, experts, 256, 256, LIMIT, 1)
    plan = jax.jit(pp.make_plan, static_argnums=2)(ids, weights, s)
    count = int(plan.items[0])
    assert count <= s.items
    expert, first, groups = np.asarray(plan.items[1:]).reshape(3, -1)[:, :count]
    assert (groups >= 1).all() and (groups <= MAX_GROUPS).all()
    places, rows_at, picked = (np.asarray(a) for a in (plan.places, plan.rows, plan.weights))
    assert ((places >= 0) == (ids >= 0)).all()
    valid = ids >= 0
    assert len(np.unique(places[valid])) == valid.sum()
    np.testing.assert_array_equal(rows_at[places[valid]], np.nonzero(valid)[0])
    np.testing.assert_array_equal(picked[places[valid]], weights[valid])
    assert (rows_at >= 0).sum() == valid.sum()
    assert (picked[rows_at < 0] == 0).all()
    # Items lie side by side and hold exactly the positions of their experts.
    np.testing.assert_array_equal(first[1:], (first + groups)[:-1])
    owner = np.repeat(expert, groups * GROUP)
    np.testing.assert_array_equal(owner[places[valid]], ids[valid])
    assert len(owner) <= s.groups * GROUP


def test_an_experts_items_are_as_few_and_as_even_as_can_be():
    ids = np.zeros((2 * TILE + 1, 1), np.int32)
    s = Shape(len(ids), 1, 3, 256, 256, LIMIT, 1)
    plan = jax.jit(pp.make_plan, static_argnums=2)(ids, np.ones(ids.shape, np.float32), s)
    groups = np.asarray(plan.items[1:]).reshape(3, -1)[2][: int(plan.items[0])]
    assert list(groups) == [17, 17, 15]


@pytest.mark.parametrize("bk", [256, 288])
def test_images_are_lossless(bk):
    x = jax.random.normal(jax.random.key(0), (3, GROUP, 2 * bk), jnp.bfloat16)
    np.testing.assert_array_equal(pp.from_image(pp.image(x, bk), bk, 3, 2 * bk), x)


def test_gather_makes_the_image_of_the_rows_and_zeros_elsewhere():
    s = Shape(7, 2, 3, 512, 256, LIMIT, 1)
    x = jax.random.normal(jax.random.key(0), (7, 512), jnp.bfloat16)
    rows = np.random.default_rng(0).integers(-1, 7, s.groups * GROUP)
    tokens = jnp.where((rows >= 0)[:, None], x[rows], 0).reshape(-1, GROUP, 512)
    want = np.asarray(pp.image(tokens, 256)).view(np.uint8)
    np.testing.assert_array_equal(emulate_prefill.gather(x, rows, s), want)


@pytest.mark.parametrize("experts,width,rows", [(2, 288, 30), (3, 256, 210)])
def test_host_emulation_equals_the_reference(experts, width, rows):
    draw = jax.jit(cases.random_weights, static_argnums=(1, 2, 3))
    routed, shared = draw(jax.random.key(1), experts, width, 256)
    ids, weights = routing(rows, 2, experts, hot=rows > TILE)
    x = jnp.asarray(4 * np.random.default_rng(rows).standard_normal((rows, 256)), jnp.bfloat16)
    alone = jax.jit(partial(ref.expert, routing=None, limit=LIMIT, numerics=SERVING))(x, shared)
    packed = repack.pack(routed, shared)
    sizes = {"experts": experts, "width": width, "limit": LIMIT}
    got = emulate_prefill.moe_experts_prefill(
        x, jnp.asarray(ids), jnp.asarray(weights), packed, alone, **sizes
    )
    reference = jax.jit(partial(ref.moe_experts, limit=LIMIT, numerics=FLOAT32))
    want = reference(x, ids, weights, routed, shared)
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    # bf16 SwiGLU outputs, expert outputs and result: 2^-9 each.
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 6e-3


@pytest.mark.parametrize("bk", [256, 288])
def test_rings_leave_room_for_two_stages(bk):
    ring = Ring.fitting(repack.Chunk(repack.FP4, bk), Shape(1, 1, 1, 256, bk, 1.0, 1).weight_slots)
    assert ring.token_slots >= 2
    assert ring.weight_bytes % 128 == 0
