"""The launch before the decode kernel: its PTX on a host machine (``ptx_machine``) against the plan
and the images that XLA makes.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_experts import decode_arrange_few_ptx as few_ptx
from pallas_kernels.moe_experts import decode_arrange_ptx as ptx
from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts import emulate
from pallas_kernels.moe_experts.decode_arrange import arrange
from pallas_kernels.moe_experts.decode_shape import Shape, Tuning
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict

F32, I32 = np.float32, np.int32
INVALID = [-1, -(2**31), 2**31 - 1]


def shape(rows: int, *, k=6, experts=20, d=512, f=256, blocks=132, splits=(1, 1)) -> Shape:
    return Shape(rows, k, experts, d, f, 10.0, blocks, Tuning(splits))


def routing(rng, rows: int, k: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Different ids in a row, some invalid."""
    ids = rng.random((rows, experts)).argsort(-1)[:, :k].astype(I32)
    ids[rng.random(ids.shape) < 0.2] = rng.choice([*INVALID, experts])
    return ids, rng.random(ids.shape, F32)


@cache
def _make_plan():
    return jax.jit(dp.make_plan, static_argnums=2)


class Launch:
    """The arrays of a launch and what XLA would put into them."""

    def __init__(self, s: Shape, ids: np.ndarray, weights: np.ndarray, rng):
        self.s, self.kind = s, few_ptx if s.few else ptx
        x = jnp.asarray(rng.standard_normal((s.rows, s.d)), jnp.bfloat16)
        self.inputs = [ids, weights, np.asarray(x)]
        self.plan = _make_plan()(ids, weights, s.experts)
        tiles = emulate.token_tiles(x, self.plan, s.k), emulate.shared_tiles(x, s.shared_tokens)
        pairs = zip(tiles, (s.up, s.up8), strict=True)
        self.images = [np.asarray(dp.image(t, p.chunk.bk)) for t, p in pairs]
        self.outs = [np.full(s.plan.counters + s.plan.counter_count, 77, I32)]
        self.outs += [np.full(image.shape, 77, I32) for image in self.images]

    def run(self, block: int, *, shared: bool = True, strict: bool = True) -> None:
        memory, size = Guarded(1 << 22), 16 + 4 * self.kind.Places(self.s).words
        at = [memory.place(x) for x in (*self.inputs, *self.outs)]
        options = {"threads": self.kind.THREADS, "shared": size}
        options["operands"] = lambda _: [*at, 16, block]
        lines = self.kind.program(self.s, shared=shared)
        if strict:
            Strict(lines, memory, seed=block, **options).run()
        else:
            Cluster(lines, memory, **options).run()
        for a, array in zip(at, self.inputs, strict=False):
            assert memory.read(a, array).tobytes() == array.tobytes()
        self.outs = [memory.read(a, out) for a, out in zip(at[3:], self.outs, strict=True)]

    def check_plan(self) -> None:
        to, plan, got = self.s.plan, self.plan, self.outs[0]
        n, row = int(plan.items[0]), np.arange(to.shared_tokens, dtype=I32)
        bits = np.asarray(plan.weights).view(I32)
        first = self.s.joint * self.s.k * self.s.down.splits * self.s.rows
        rows = np.where(row < self.s.rows, first + row, -1)
        want = np.concatenate([plan.items, plan.expert, plan.pairs, bits, rows])
        kept = np.r_[: 1 + n, to.pairs : to.counters]  # experts past the items nobody reads
        np.testing.assert_array_equal(got[kept], want[kept])
        assert not got[to.counters :].any()

    def check_images(self) -> None:
        used = None if self.s.few else int(self.plan.items[0]) * self.s.up.depth
        np.testing.assert_array_equal(self.outs[1][:used], self.images[0][:used])
        np.testing.assert_array_equal(self.outs[2], self.images[1])


FEW = [  # rows, k, experts, K splits
    (1, 6, 384, (2, 3)),
    (2, 6, 20, (1, 1)),
    (6, 6, 384, (1, 1)),
    (8, 6, 48, (2, 1)),
    (8, 6, 7, (1, 1)),
    (8, 16, 31, (1, 1)),
    (5, 3, 128, (1, 1)),
]


@pytest.mark.parametrize(("rows", "k", "experts", "splits"), FEW)
def test_plan_of_few_rows_equals_the_one_that_xla_makes(rows, k, experts, splits, rng):
    s = shape(rows, k=k, experts=experts, f=768, splits=splits)
    launch = Launch(s, *routing(rng, rows, k, experts), rng)
    launch.run(0)
    launch.check_plan()
    assert 0 < launch.outs[0][0] <= s.items


@pytest.mark.parametrize("rows", [1, 8])
def test_plan_of_few_rows_that_reach_no_expert(rows, rng):
    s = shape(rows)
    nobody = np.resize(np.array([*INVALID, s.experts], I32), (rows, s.k))
    launch = Launch(s, nobody, np.full((rows, s.k), np.nan, F32), rng)
    launch.run(0)
    launch.check_plan()
    assert launch.outs[0][0] == 0


def test_experts_that_rows_share_are_one_item(rng):
    s = shape(6)
    ids = np.tile(np.array([19, 0, 7, 3, -1, 12], I32), (6, 1))
    ids[3:] = ids[3:, ::-1]
    launch = Launch(s, ids, rng.random(ids.shape, F32), rng)
    launch.run(0)
    launch.check_plan()
    assert launch.outs[0][:6].tolist() == [5, 0, 3, 7, 12, 19]


@pytest.mark.parametrize(("rows", "d"), [(1, 512), (2, 288), (6, 1152), (8, 256), (8, 576)])
def test_images_of_few_rows_equal_those_that_xla_makes(rows, d, rng):
    s = shape(rows, d=d)
    launch = Launch(s, *routing(rng, rows, s.k, s.experts), rng)
    count = few_ptx.image_blocks(s)
    for block in rng.permutation(2 * count):
        launch.run(1 + block)
    launch.check_images()
    assert (launch.outs[0] == 77).all()
    for block in range(count):
        launch.run(1 + count + block, shared=False)
    assert not launch.outs[2].any()


MORE = [  # rows, experts, hidden, blocks, strict
    (9, 20, 288, 2, False),
    (17, 384, 256, 1, False),
    pytest.param(9, 7, 256, 1, True, marks=pytest.mark.slow),
    pytest.param(100, 50, 288, 1, True, marks=pytest.mark.slow),
    pytest.param(128, 100, 256, 1, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rows", "experts", "d", "blocks", "strict"), MORE)
def test_more_rows_get_the_plan_and_images_that_xla_makes(rows, experts, d, blocks, strict, rng):
    s = shape(rows, experts=experts, d=d, blocks=blocks)
    launch = Launch(s, *routing(rng, rows, s.k, experts), rng)
    for block in range(blocks):
        launch.run(block, strict=strict)
    launch.check_plan()
    launch.check_images()
    if blocks == 1:
        launch.run(0, shared=False, strict=strict)
        assert not launch.outs[2].any()


@pytest.mark.parametrize(
    ("by", "most"), [(6, 256), (36, 640), (12, 640), (8, 5120), (5120, 2_482_176), (7, 2**24)]
)
def test_quotients_are_exact_up_to_the_bound(by, most):
    edges = np.arange(by, most + 1, by)[-126:]
    numbers = np.resize(np.r_[most, edges - 1, edges, 0, 1], 256).astype(I32)
    lines = [
        ".reg .b32 low, n, q; .reg .b64 next, at; mov.u32 n, %tid.x; mul.wide.u32 at, n, 4;",
        "add.s64 at, at, $0; ld.global.b32 n, [at];",
        *ptx.divide("q", "n", by, most),
        "st.global.b32 [at], q;",
    ]
    memory = Guarded(1 << 12)
    at = memory.place(numbers)
    Cluster(lines, memory, threads=256, shared=0, operands=lambda _: [at]).run()
    np.testing.assert_array_equal(memory.read(at, numbers), numbers // by)


def test_few_rows_of_too_many_ids_are_refused():
    with pytest.raises(ValueError, match=r"s.k=33 must be at most 32 for s.rows=8"):
        arrange(shape(8, k=33, experts=384), True)
