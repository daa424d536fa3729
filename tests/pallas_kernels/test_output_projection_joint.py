"""Both halves of the output projection in one launch: its PTX on a host machine, its launches and
where the op takes it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.addends import Addends
from pallas_kernels.numerics import REFERENCE, SERVING
from pallas_kernels.output_projection import joint_ptx, kernel_sm90, op, ref
from pallas_kernels.output_projection.cases import CASES, CHECKED, Case, checks, problem
from pallas_kernels.output_projection.joint_shape import BLOCKS, THREADS, Joint, joint
from pallas_kernels.quant import Fp8Blocks
from tests.pallas_kernels.ptx_machine import COLLECTIVE, Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict

BF16 = jnp.bfloat16
CANARY = -7.0
TWO_AT_ONCE = 113 * 1024  # bytes of shared memory of a block, of which a multiprocessor holds two


@pytest.fixture(autouse=True)
def orders(monkeypatch):
    """An instruction that orders others but computes nothing."""
    monkeypatch.setitem(COLLECTIVE, "bar", lambda *_: None)


def shape(rows: int, groups: int = 1, *, round: bool = True) -> Joint:
    return Joint(rows, groups, 512, 1024, 1024, round)


def matrix(rng, n: int, k: int) -> Fp8Blocks:
    """Small integers times one of four powers of two a block: sums of their products are exact."""
    codes = rng.integers(-15, 16, (n, k)).astype(jnp.float8_e4m3fn)
    scales = rng.integers(120, 124, (n // 32, k // 32)).astype(np.uint8)
    return Fp8Blocks(jnp.asarray(codes), jnp.asarray(scales))


def operands(rng, s: Joint) -> tuple[np.ndarray, Fp8Blocks, Fp8Blocks]:
    o = rng.integers(-16, 17, (s.rows, s.groups, s.k)).astype(BF16)
    return o, matrix(rng, s.outputs, s.k), matrix(rng, s.hidden, s.outputs)


def run(s: Joint, o: np.ndarray, a: Fp8Blocks, b: Fp8Blocks, machine=Cluster) -> np.ndarray:
    memory = Guarded(1 << 22)
    planes = (np.asarray(p) for w in (a, b) for p in (w.codes, w.scales))
    at = [memory.place(array) for array in (o, *planes)]
    out = np.full((s.parts * s.rows + 2, s.hidden), CANARY, np.float32)
    at.append(memory.place(out) + out.strides[0])
    size = {"threads": THREADS, "shared": 4 * s.words, "blocks": BLOCKS}
    for part in range(s.parts):
        each = partial(lambda part, rank: [*at, 0, part, rank], part)
        machine(joint_ptx.program(s), memory, operands=each, **size).run()
    values = memory.read(at[-1] - out.strides[0], out)
    assert (values[[0, -1]] == CANARY).all()
    return values[1:-1].reshape(s.parts, s.rows, s.hidden)


@pytest.mark.parametrize("s", [shape(3, 2), shape(1, round=False)], ids=str)
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


def test_a_row_has_the_same_bits_in_any_batch_with_warps_in_any_order(rng):
    o, a, b = operands(rng, shape(2))
    o[0] = np.nan
    both = run(shape(2), o, a, b)
    alone = run(shape(1), o[1:], a, b, partial(Strict, seed=1))
    assert alone.tobytes() == both[:, 1:].tobytes()
    assert np.isnan(both[:, 0]).all()


def test_launches_fit_twice():
    """All clusters of the release run at once only if a multiprocessor holds two blocks."""
    for case in {c for c in (*CASES, *CHECKED) if c.both and c.rows <= 8}:
        s = joint(case.rows, case.groups, case.rank, case.k, case.hidden, round=True)
        assert s is not None and 4 * s.words <= TWO_AT_ONCE
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
