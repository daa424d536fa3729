"""The PTX of the grouped projection on a host machine, against exact sums; its launches and op."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chosen
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.output_projection import grouped_ptx, kernel_sm90, op, ref
from pallas_kernels.output_projection.cases import CASES, CHECKED, Case, checks, problem
from pallas_kernels.output_projection.grouped_shape import (
    MAX_ROWS,
    SMEM_BYTES,
    THREADS,
    Grouped,
    launch,
)
from pallas_kernels.quant import Fp8Blocks
from tests.pallas_kernels.ptx_machine import COLLECTIVE, Cluster
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.tolerances import F32_REL

BF16 = jnp.bfloat16
CANARY = -7.0


@pytest.fixture(autouse=True)
def orders(monkeypatch):
    """Instructions that order others but compute nothing."""
    monkeypatch.setitem(COLLECTIVE, "griddepcontrol", lambda *_: None)


def run(s: Grouped, o: np.ndarray, weight: Fp8Blocks, machine=Cluster) -> np.ndarray:
    memory = Guarded(1 << 22)
    codes, scales = (np.asarray(a) for a in (weight.codes, weight.scales))
    at = [memory.place(a) for a in (o, codes.view(np.uint8), scales)]
    out = np.full((s.rows + 2, s.groups * s.rank), CANARY, BF16)
    at.append(memory.place(out))
    lines = grouped_ptx.program(s)
    for slab in range(s.slabs):
        for tile in range(s.token_tiles):
            fixed = [*at[:3], at[3] + out.strides[0], 0, slab, tile]
            machine(
                lines,
                memory,
                threads=THREADS,
                shared=4 * s.words,
                operands=lambda rank, fixed=fixed: [*fixed, rank],
                blocks=s.splits,
            ).run()
    values = memory.read(at[3], out)
    assert (values[[0, -1]] == out[[0, -1]]).all()
    return values[1:-1]


def operands(rng, s: Grouped) -> tuple[np.ndarray, Fp8Blocks]:
    """Blocks of scales from 2^-37 to 2^20, whose rows have values of both signs and zeros."""
    o = rng.standard_normal((s.rows, s.groups * s.k)).astype(BF16)
    codes = rng.integers(0, 256, (s.groups * s.rank, s.k)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scales = rng.integers(90, 148, (s.groups * s.rank // 32, s.k // 32)).astype(np.uint8)
    return o, Fp8Blocks(codes.view(jnp.float8_e4m3fn), scales)


def oracle(s: Grouped, o, weight: Fp8Blocks) -> np.ndarray:
    x = np.asarray(o, np.float64).reshape(len(o), s.groups, s.k)
    w = np.asarray(weight.dequantize(), np.float64).reshape(s.groups, s.rank, s.k)
    return np.einsum("tgk,gnk->tgn", x, w).reshape(len(o), -1)


SHAPES = (
    Grouped(3, 2, 64, 1024, 64, 2, False),
    Grouped(9, 1, 256, 1024, 256, 2, False),
    Grouped(70, 1, 128, 512, 128, 1, False),
    Grouped(2, 2, 32, 1024, 32, 1, False, early=True),
)


@pytest.mark.parametrize("s", SHAPES, ids=str)
def test_sums_are_those_of_float64(s, rng):
    o, weight = operands(rng, s)
    got, want = run(s, o, weight).astype(np.float64), oracle(s, o, weight)
    size = np.abs(np.asarray(o, np.float64)).max() * np.abs(weight.dequantize()).max()
    # One rounding to bf16, and float32 sums of s.k products.
    assert (np.abs(got - want) <= 2.0**-8 * np.abs(want) + F32_REL * s.k**0.5 * size).all()


def test_rounded_outputs_are_the_reference_ones(rng):
    """Sums of integers are exact, so both round the same numbers; one group is all zero, one tiny,
    one not finite.
    """
    s = Grouped(5, 2, 128, 512, 128, 1, True)
    o = rng.integers(-16, 17, (s.rows, s.groups * s.k)).astype(BF16)
    codes = rng.integers(-15, 16, (s.groups * s.rank, s.k)).astype(jnp.float8_e4m3fn)
    scales = np.full((s.groups * s.rank // 32, s.k // 32), 127, np.uint8)
    scales[1], codes[32:64] = 90, codes[32:64].astype(np.float32).astype(jnp.float8_e4m3fn)
    codes[64:96] = 0
    o[3, 2] = np.inf
    weight = Fp8Blocks(jnp.asarray(codes), jnp.asarray(scales))
    want = ref.grouped_projection(
        jnp.asarray(o).reshape(s.rows, 2, s.k), weight, groups=s.groups, numerics=REFERENCE
    )
    got, want = run(s, o, weight), np.asarray(want)
    finite = np.arange(s.rows) != 3
    assert got[finite].tobytes() == want[finite].tobytes()
    assert np.isnan(got[3, :32]).all() and not np.isnan(got[3, s.rank :]).any()
    assert np.abs(got[0, 32:64].astype(np.float32)).max() < 1e-4  # below the floor of a scale


def test_a_row_has_the_same_bits_in_any_batch(rng):
    s = Grouped(9, 1, 64, 1024, 64, 2, True)
    o, weight = operands(rng, s)
    many = run(s, o, weight)
    alone = run(Grouped(1, 1, 64, 1024, 64, 2, True), o[8:], weight)
    assert alone[0].tobytes() == many[8].tobytes()
    o[:8] = np.nan
    poisoned = run(s, o, weight)
    assert poisoned[8].tobytes() == many[8].tobytes() and np.isnan(poisoned[:8]).all()


def test_warps_and_blocks_in_any_order(rng):
    s = Grouped(2, 1, 64, 1024, 64, 2, True)
    o, weight = operands(rng, s)
    strict = run(s, o, weight, partial(Strict, seed=1))
    assert strict.tobytes() == run(s, o, weight).tobytes()


def test_bits_do_not_depend_on_the_division_of_k_over_blocks(rng):
    """As many parts by a cluster, by the warps of one block and by both."""
    shapes = [
        Grouped(3, 1, 256, 512, tile, splits, True)
        for tile, splits in ((256, 4), (128, 2), (64, 1))
    ]
    o, weight = operands(rng, shapes[0])
    first, *others = (run(s, o, weight).tobytes() for s in shapes)
    assert all(other == first for other in others)


def test_every_case_has_a_launch_that_fits():
    for case in {*CASES, *CHECKED}:
        found = [
            launch(rows, case.groups, case.rank, case.k, round=True)
            for rows in range(1, MAX_ROWS + 1)
        ]
        for rows, s in enumerate(found, 1):
            assert s is not None and 4 * s.words <= SMEM_BYTES
            assert s.token_tiles * s.tokens >= rows
        assert len({s.addends for s in found if s}) == 1


def test_launches_of_the_ranks():
    """Tile, splits and blocks of few rows and of many; one GPU needs no cluster for few."""
    few, many = (
        [launch(rows, groups, 1024, 4096, round=True) for groups in (8, 4, 2, 1)]
        for rows in (1, 32)
    )
    assert [(s.tile, s.splits, s.blocks) for s in few if s] == [
        (64, 1, 128), (32, 1, 128), (32, 2, 128), (32, 4, 128),
    ]  # fmt: skip
    assert [(s.tile, s.splits, s.blocks) for s in many if s] == [
        (256, 4, 128), (256, 8, 128), (128, 8, 128), (64, 8, 128),
    ]  # fmt: skip


def weights(case: Case) -> Fp8Blocks:
    return Fp8Blocks.quantize(jnp.ones((case.outputs, case.k)))


def test_many_rows_are_multiplied_by_xla(rng):
    case = Case(MAX_ROWS + 1, 4, 128, 2, 64)
    shape = (1, case.rows, case.heads, case.width)
    o = jnp.asarray(rng.standard_normal(shape), BF16)
    w = rng.standard_normal((case.outputs, case.k))
    weight = Fp8Blocks.quantize(jnp.asarray(w, jnp.float32))
    for numerics in (SERVING, REFERENCE):
        got = kernel_sm90.grouped_projection(o, weight, groups=2, numerics=numerics)
        want = ref.grouped_projection(o, weight, groups=2, numerics=numerics)
        error = jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want)
        assert got.shape == want.shape and got.dtype == BF16 and error < 2.0**-8


def test_bad_operands_name_the_value():
    o, weight = jnp.zeros((2, 4, 256), BF16), Fp8Blocks.quantize(jnp.ones((128, 512)))
    project = partial(kernel_sm90.grouped_projection, groups=2)
    with pytest.raises(ValueError, match=r"numerics.name='float32'.* must be bfloat16"):
        project(o, weight, numerics=FLOAT32)
    with pytest.raises(ValueError, match=r"wo_a.shape=\(128, 256\) must be \[2 \* N, 512\]"):
        project(o, Fp8Blocks.quantize(jnp.ones((128, 256))), numerics=SERVING)
    with pytest.raises(ValueError, match=r"wo_a.shape=\(128, 32\) of groups=2 has no launch"):
        project(o[..., :16], Fp8Blocks.quantize(jnp.ones((128, 32))), numerics=SERVING)
    with pytest.raises(ValueError, match=r"self.tile=48 must be 32, 64, 128 or 256"):
        Grouped(1, 1, 96, 1024, 48, 1, False)
    with pytest.raises(ValueError, match=r"self.k=1000 must be a multiple of 128"):
        Grouped(1, 1, 256, 1000, 256, 1, False)


def test_no_rows():
    o, weight = jnp.zeros((0, 4, 512), BF16), Fp8Blocks.quantize(jnp.ones((64, 1024)))
    got = kernel_sm90.grouped_projection(o, weight, groups=2, numerics=SERVING)
    assert got.shape == (0, 64) and got.dtype == BF16


def test_the_kernel_is_taken_by_name(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "grouped_projection", lambda o, w, groups, numerics: groups)
    grouped = op.build_grouped("mosaic")
    assert grouped(None, None, groups=3, numerics=None) == 3
    monkeypatch.setattr(op.linear, "build", lambda kernels: lambda z, w, **options: (z, options))
    z, options = op.build("mosaic")(
        None, None, None, groups=3, numerics=None, out_dtype=jnp.float32
    )
    assert z == 3 and options == {"numerics": None, "out_dtype": jnp.float32}


def test_auto_takes_the_rows_of_the_table(rng, monkeypatch):
    """Other rows go through XLA in bf16, other types through the reference."""
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setitem(chosen.ROWS, "grouped_projection", range(2, 3))
    taken = []

    def kernel(o, w, *, groups, numerics):
        taken.append(o.shape)
        return ref.grouped_projection(o, w, groups=groups, numerics=numerics)

    monkeypatch.setattr(kernel_sm90, "grouped_projection", kernel)
    grouped = op.build_grouped("auto")
    weight = Fp8Blocks.quantize(jnp.asarray(rng.standard_normal((256, 256))))
    o = jnp.asarray(rng.standard_normal((3, 2, 256)), BF16)
    for rows in (1, 2, 3):
        got = grouped(o[:rows], weight, groups=2, numerics=SERVING)
        want = ref.grouped_projection(o[:rows], weight, groups=2, numerics=SERVING)
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2**-7)
    plain = grouped(o[:2].astype(jnp.float32), weight.dequantize(), groups=2, numerics=FLOAT32)
    assert plain.dtype == jnp.float32 and taken == [(2, 2, 256)]


def test_bench_problem_keeps_its_carry():
    def run():
        one = problem(Case(2, 2, 64, 1, 32), "xla", 0)
        assert one is not None
        return one.carry, one.call(1, one.carry, one.data)

    before, after = jax.eval_shape(run)
    assert (before.shape, before.dtype) == (after.shape, after.dtype)
    assert problem(Case(MAX_ROWS + 1), "pallas", 0) is None


def test_least_bytes():
    assert round(Case(32).nbytes / 1e6, 1) == 36.2  # 33.6 of weights


def test_checks_tell_right_from_wrong():
    case = Case(3, 4, 64, 2, 32)
    right = op.build_grouped("reference")
    assert all(check.ok for check in checks(case, 0, right))

    def wrong(o, weight, **options):
        return right(jnp.roll(o, 1, 0), weight, **options)

    failed = [not check.ok for check in checks(case, 0, wrong) if "second" not in check.name]
    assert all(failed)
