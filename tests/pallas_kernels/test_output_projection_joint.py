"""Both halves of the output projection in one launch: its PTX on a host machine, its launches and
where the op takes it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.addends import Addends
from pallas_kernels.linear.box_ptx import COLUMNS, STRIP
from pallas_kernels.numerics import REFERENCE, SERVING
from pallas_kernels.output_projection import joint_ptx, kernel_sm90, op, ref
from pallas_kernels.output_projection.cases import CASES, CHECKED, Case, checks, problem
from pallas_kernels.output_projection.joint_shape import (
    BLOCKS,
    THREADS,
    Joint,
    joint,
)
from pallas_kernels.quant import Fp8Blocks
from tests.pallas_kernels.ptx_machine import COLLECTIVE, Cluster
from tests.pallas_kernels.ptx_strict import Guarded
from tests.pallas_kernels.ptx_tensor import FIRST, Map, Mapped
from tests.pallas_kernels.test_linear_broad import Ring

BF16 = jnp.bfloat16
CANARY = -7.0
LOOKING = 3000  # what a thread waits for


@pytest.fixture(autouse=True)
def orders(monkeypatch):
    """An instruction that orders others but computes nothing."""
    monkeypatch.setitem(COLLECTIVE, "bar", lambda *_: None)


def shape(rows: int, groups: int = 1, *, k: int = 1024, round: bool = True) -> Joint:
    return Joint(rows, groups, 512, k, 1024, round)


# Slots are used again in both halves, scales are more than a warp's lanes, two parts a group.
AGAIN = Joint(2, 1, 1024, 3072, 5120, True)


def matrix(rng, n: int, k: int) -> Fp8Blocks:
    """Small integers times one of four powers of two a block: sums of their products are exact."""
    codes = rng.integers(-15, 16, (n, k)).astype(jnp.float8_e4m3fn)
    scales = rng.integers(120, 124, (n // 32, k // 32)).astype(np.uint8)
    return Fp8Blocks(jnp.asarray(codes), jnp.asarray(scales))


def operands(rng, s: Joint) -> tuple[np.ndarray, Fp8Blocks, Fp8Blocks]:
    o = rng.integers(-16, 17, (s.rows, s.groups, s.k)).astype(BF16)
    return o, matrix(rng, s.outputs, s.k), matrix(rng, s.hidden, s.outputs)


def rng_bytes(s: Joint) -> np.ndarray:
    """What blocks exchange, before they do."""
    return np.random.default_rng(s.rows).integers(0, 256, s.parts * s.part_bytes, np.uint8)


class Stream(Mapped):
    """A warp at a time, for as long as it does not wait."""

    def barrier(self, b, kind, args, active) -> None:
        super().barrier(b, kind, args, active)
        if kind[0] == "try_wait" and not b.read(args[0])[active].all():
            self.steps = 0  # another warp's turn


class Turns(Stream):
    """So short ones that blocks are done with an exchange while some warp of another still runs."""

    def run(self, limit: int = 20_000_000) -> None:
        while not all(b.done.all() for b in self.blocks):
            b = self.blocks[self.rng.integers(len(self.blocks))]
            self.steps = 0
            limit -= sum(self.step(b) for _ in range(self.rng.integers(1, 60)))
            assert limit > 0, "no end in sight"


class Together(Stream):
    """All warps at once, the quicker machine; who waits for a barrier in shared memory looks again
    when something arrives.
    """

    def step(self, b) -> bool:
        ready = ~b.done & (b.waiting < 0)
        return Cluster.step(self, b) if ready.any() else self.release(b)

    def release(self, b) -> bool:
        return not (b.waiting == LOOKING).any() and super().release(b)

    def barrier(self, b, kind, args, active) -> None:
        if kind[0] == "init" or kind[1:] == ["expect_tx"]:
            for lane in np.flatnonzero(active):
                Ring.barrier(self, b, kind, args, np.arange(b.n) == lane)
        else:
            Ring.barrier(self, b, kind, args, active)
        if kind[0] == "try_wait":
            late = active & ~b.read(args[0]).astype(bool)
            b.pc[late] -= 1
            b.waiting[late] = LOOKING
        else:
            b.waiting[b.waiting == LOOKING] = -1

    def landed(self, b, bar: int, size: int) -> None:
        super().landed(b, bar, size)
        b.waiting[b.waiting == LOOKING] = -1


def run(
    s: Joint, o: np.ndarray, a: Fp8Blocks, b: Fp8Blocks, machine=Together, seed: int = 1
) -> np.ndarray:
    memory = Guarded(1 << 24)
    planes = (np.asarray(p) for w in (a, b) for p in (w.codes, w.scales))
    counters = np.zeros(s.parts, np.int32)
    at = [memory.place(array) for array in (o, *planes, counters)]
    box = (STRIP, COLUMNS)
    maps = [Map(at[1], a.shape, box, COLUMNS), Map(at[3], b.shape, box, COLUMNS)]
    out = np.full((s.parts * s.rows + 2, s.hidden), CANARY, np.float32)
    at.append(memory.place(out) + out.strides[0])
    at.append(memory.place(rng_bytes(s)))
    size = {"threads": THREADS, "shared": 4 * s.words, "blocks": BLOCKS}
    for part in range(s.parts):
        each = partial(lambda part, rank: [*at, 0, part, rank, FIRST, FIRST + 1], part)
        machine(joint_ptx.program(s), memory, operands=each, seed=seed, maps=maps, **size).run()
    assert (memory.read(at[5], counters) == BLOCKS).all()
    values = memory.read(at[6] - out.strides[0], out)
    assert (values[[0, -1]] == CANARY).all()
    return values[1:-1].reshape(s.parts, s.rows, s.hidden)


@pytest.mark.parametrize("s", [shape(7, k=2048), shape(1, 2, round=False), AGAIN], ids=str)
def test_parts_add_up_to_the_reference(s, rng):
    """Integers make the grouped half exact, so that both round the same numbers."""
    o, a, b = operands(rng, s)
    numerics = REFERENCE if s.round else SERVING
    z = ref.grouped_projection(jnp.asarray(o), a, groups=s.groups, numerics=numerics)
    z, w = np.asarray(z, np.float64), np.asarray(b.dequantize(), np.float64)
    for part, got in enumerate(run(s, o, a, b)):
        columns = slice(512 * part, 512 * (part + 1))
        want = z[:, columns] @ w[:, columns].T
        assert np.abs(got - want).max() <= 2.0**-20 * np.abs(want).max()


@pytest.mark.parametrize(
    ("rows", "round", "machine"), [(2, True, Stream), (6, False, Together)], ids=str
)
def test_a_row_has_the_same_bits_in_any_batch_with_warps_in_any_order(rows, round, machine, rng):
    o, a, b = operands(rng, shape(rows))
    o[0] = np.nan
    both = run(shape(rows, round=round), o, a, b)
    alone = run(shape(1, round=round), o[-1:], a, b, machine)
    assert alone.tobytes() == both[:, -1:].tobytes()
    assert np.isnan(both[:, 0]).all() and np.isfinite(both[:, 1:]).all()


@pytest.mark.parametrize("seed", [1, 3])
def test_a_block_counts_once_all_its_warps_have_stored(seed, rng):
    o, a, b = operands(rng, shape(7))
    late = run(shape(7), o, a, b, Turns, seed)
    assert late.tobytes() == run(shape(7), o, a, b).tobytes()


@pytest.mark.parametrize("round", [False, True])
def test_scales_and_inputs_of_any_size(round, rng):
    """Powers of two that cancel change no bit, those of a 32-column group or of all inputs."""
    s = shape(1, round=round)
    o, a, b = operands(rng, s)
    o[:, :, 32:64] = 0
    want = run(s, o, a, b)
    powers = rng.integers(-30, 30, s.k // 32)
    o = np.asarray(np.ldexp(o.astype(np.float64), 20 + powers.repeat(32)), BF16)
    a = Fp8Blocks(a.codes, jnp.asarray(np.asarray(a.scales) - powers, jnp.uint8))
    b = Fp8Blocks(b.codes, jnp.asarray(np.asarray(b.scales) - 20, jnp.uint8))
    assert run(s, o, a, b).tobytes() == want.tobytes()


def test_launches():
    for case in {c for c in (*CASES, *CHECKED) if c.both and c.rows <= 8}:
        s = joint(case.rows, case.groups, case.rank, case.k, case.hidden, round=True)
        assert s is not None and s.parts * BLOCKS <= 132
    assert joint(9, 8, 1024, 4096, 5120, round=True) is None
    assert joint(1, 8, 1000, 4096, 5120, round=True) is None
    assert joint(1, 16, 1024, 4096, 5120, round=True) is None
    assert joint(1, 2, 1024, 16384, 5120, round=True) is None  # more shared memory than there is
    with pytest.raises(ValueError, match=r"self.rows=9 must be 1 to 8"):
        shape(9)
    with pytest.raises(ValueError, match=r"self.k=1000 must be a multiple of 512"):
        Joint(1, 1, 512, 1000, 1024, True)


def test_where_the_op_takes_it(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "addends", lambda *_, **__: Addends(jnp.zeros(1)))
    monkeypatch.setattr(kernel_sm90, "grouped_projection", lambda *_, **__: "z")
    monkeypatch.setattr(op.linear, "build", lambda kernels: lambda *_, **__: "y")
    a, b = (Fp8Blocks.quantize(jnp.ones(s)) for s in ((512, 1024), (1024, 512)))

    def taken(kernels: str, rows: int, **options) -> object:
        o = jnp.zeros((rows, 2, 512), BF16)
        return op.build(kernels)(o, a, b, groups=1, numerics=SERVING, **options)

    assert isinstance(taken("auto", 7, parts=True), Addends)
    assert isinstance(taken("mosaic", 8, parts=True), Addends)
    assert taken("auto", 8, parts=True) == taken("mosaic", 9, parts=True) == "y"
    assert taken("auto", 1) == taken("auto", 1, parts=True, out_dtype=jnp.float32) == "y"
    assert op.build_addends("reference")(None, a, b, groups=1, numerics=SERVING) is None
    o = jnp.zeros((1, 2, 256), BF16)
    with pytest.raises(ValueError, match=r"output_projection: wo_a.shape=\(512, 1024\) must be"):
        monkeypatch.undo()
        kernel_sm90.addends(o, a, b, groups=1, numerics=SERVING)


def test_bench_problem_keeps_its_carry():
    def run():
        one = problem(Case(9, 2, 512, 1, 512, 1024, both=True), "xla", 0)
        assert one is not None
        return one.carry, one.call(1, one.carry, one.data)

    before, after = jax.eval_shape(run)
    assert (before.shape, before.dtype) == (after.shape, after.dtype)


def test_checks_tell_right_from_wrong():
    case = Case(2, 4, 64, 2, 32, 64, both=True)

    def right(o, a, b, **options):
        z = ref.grouped_projection(o, a, **options)
        y = op.linear.build("reference")(z, b, numerics=options["numerics"], out_dtype=jnp.float32)
        return Addends(y[None])

    assert all(check.ok for check in checks(case, 0, right))

    def wrong(o, a, b, **options):
        return right(jnp.roll(o, 1, 0), a, b, **options)

    assert not any(check.ok for check in checks(case, 0, wrong))
