"""The hyper-connection kernels' own PTX on a host machine, against float64 and themselves."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mhc import fused_ptx, kernel_sm90, op, ref, split_ptx
from pallas_kernels.mhc.cases import PARTS, Case, checks, problem
from pallas_kernels.mhc.fused_ptx import Fused
from pallas_kernels.mhc.split_ptx import Split
from pallas_kernels.norm import rms_norm
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_operations import OPERATIONS, U64
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_mhc import EPS, NORM_EPS, oracle_split
from tests.tolerances import F32_REL

CANARY = -7.0
BF16 = jnp.bfloat16
APPROXIMATE = 2.0**-23  # rcp, rsqrt and ex2: relative error, about


def _floats(*values):
    return [v.astype(np.uint32).view(np.float32).astype(np.float64) for v in values]


def _result(value):
    return value.astype(np.float32).view(np.uint32).astype(U64)


def fused_multiply_add(rest, *values):
    a, b, c = _floats(*values)
    return _result(a * b + c)


def approximate(f):
    """f with an error as the hardware's, the same for the same operand."""

    def run(rest, value):
        (x,) = _floats(value)
        error = APPROXIMATE * ((value.astype(np.int64) * 2654435761 >> 7) % 3 - 1)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return _result(f(x) * (1 + error))

    return run


FLOATS = {
    "fma": fused_multiply_add,
    "rcp": approximate(lambda x: 1 / x),
    "rsqrt": approximate(lambda x: x**-0.5),
    "ex2": approximate(np.exp2),
}


@pytest.fixture(autouse=True)
def float_operations(monkeypatch):
    for name, function in FLOATS.items():
        monkeypatch.setitem(OPERATIONS, name, function)


@pytest.fixture(autouse=True)
def prefetches(monkeypatch):
    inner = Cluster.execute

    def execute(self, b, opcode, args, active):
        if not opcode.startswith("prefetch.global"):
            inner(self, b, opcode, args, active)

    monkeypatch.setattr(Cluster, "execute", execute)


def place_outputs(memory: Guarded, *shapes: tuple) -> list[tuple[int, np.ndarray]]:
    """Outputs between two canary rows: the address of row 0 and the whole."""
    outs = []
    for rows, width, dtype in shapes:
        out = np.full((rows + 2, width), CANARY, dtype)
        outs.append((memory.place(out), out))
    return outs


def row_address(out: tuple[int, np.ndarray]) -> int:
    return out[0] + out[1].strides[0]


def read(memory: Guarded, out: tuple[int, np.ndarray]) -> np.ndarray:
    values = memory.read(*out)
    assert (values[[0, -1]] == out[1][[0, -1]]).all()
    return values[1:-1]


def run_fused(s: Fused, arrays, machine=Cluster) -> tuple[np.ndarray, np.ndarray]:
    memory = Guarded(1 << 20)
    at = [memory.place(np.asarray(a)) for a in arrays]
    outs = place_outputs(memory, (s.rows, 4 * s.width, BF16), (s.rows, s.width, BF16))
    lines = fused_ptx.program(s)
    for block in range(s.grid):
        operands = [*at, *map(row_address, outs), 0, block]
        size = {"threads": s.threads, "shared": 4 * s.words}
        machine(lines, memory, operands=lambda rank, at=operands: at, **size).run()
    streams, normed = (read(memory, out) for out in outs)
    return streams.reshape(s.rows, 4, s.width), normed


def fused_inputs(rng, rows: int, d: int) -> list[np.ndarray]:
    h, y = (rng.standard_normal(shape).astype(BF16) for shape in ((rows, 4, d), (rows, d)))
    post, comb, pre = (rng.random((rows, n)).astype(np.float32) for n in (4, 16, 4))
    return [h, y, post, comb, pre, rng.standard_normal(d).astype(BF16)]


def close_bf16(got, want) -> None:
    """One rounding of a float32 value: half a unit and what float32 adds."""
    half = 2.0 ** (np.floor(np.log2(np.abs(want) + 1e-30)) - 8)
    size = np.maximum(np.abs(want), 1)
    assert (np.abs(got.astype(np.float64) - want) <= half + F32_REL * size).all()


@pytest.mark.parametrize(("rows", "d", "grid"), [(1, 1024, 1), (5, 264, 2), (4, 2048, 3)])
def test_fused_equals_float64(rows, d, grid, rng):
    arrays = fused_inputs(rng, rows, d)
    streams, normed = run_fused(Fused(rows, d, grid, NORM_EPS), arrays)
    h, y, post, comb, pre, weight = (a.astype(np.float64) for a in arrays)
    mixed = np.einsum("rij,rid->rjd", comb.reshape(rows, 4, 4), h)
    close_bf16(streams, post[..., None] * y[:, None] + mixed)
    # What follows takes the rounded streams, and the rounded sum of them.
    x = np.einsum("ri,rid->rd", pre, streams.astype(np.float64)).astype(np.float32)
    x = x.astype(BF16).astype(np.float64)
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS) * weight
    close_bf16(normed, norm)


def test_fused_rows_have_the_same_bits_in_any_batch(rng):
    arrays = fused_inputs(rng, 4, 264)
    streams, normed = run_fused(Fused(4, 264, 2, NORM_EPS), arrays)
    alone = [a[2:3] for a in arrays[:-1]] + [arrays[-1]]
    one, one_normed = run_fused(Fused(1, 264, 1, NORM_EPS), alone)
    assert one.tobytes() == streams[2:3].tobytes()
    assert one_normed.tobytes() == normed[2:3].tobytes()
    arrays[0][1] = np.nan
    poisoned, poisoned_normed = run_fused(Fused(4, 264, 1, NORM_EPS), arrays)
    others = [0, 2, 3]
    assert poisoned[others].tobytes() == streams[others].tobytes()
    assert poisoned_normed[others].tobytes() == normed[others].tobytes()
    assert np.isnan(poisoned_normed[1].astype(np.float32)).all()


def test_fused_warps_in_any_order(rng):
    s, arrays = Fused(5, 264, 1, NORM_EPS), fused_inputs(rng, 5, 264)
    for got, want in zip(
        run_fused(s, arrays, partial(Strict, seed=1)), run_fused(s, arrays), strict=True
    ):
        assert got.tobytes() == want.tobytes()


def run_split(s: Split, arrays, machine=Cluster) -> list[np.ndarray]:
    memory = Guarded(1 << 23)
    h, fn, base, scale = (memory.place(np.asarray(a)) for a in arrays)
    sums = memory.place(np.full((s.rows, s.parts, split_ptx.WORDS), np.nan, np.float32))
    outs = place_outputs(memory, *((s.rows, n, np.float32) for n in (4, 4, 16)))

    def launch(lines: list[str], words: int, operands: list[int]) -> None:
        size = {"threads": split_ptx.THREADS, "shared": 4 * words}
        machine(lines, memory, operands=lambda rank: operands, **size).run()

    lines = split_ptx.sums_program(s)
    for tile in range(-(-s.rows // s.tile)):
        for part in range(s.parts):
            launch(lines, s.sum_words, [h, fn, base, scale, sums, 0, tile, part])
    lines = split_ptx.coefficients_program(s)
    for row in range(s.rows):
        launch(lines, split_ptx.THREADS, [sums, base, scale, *map(row_address, outs), 0, row])
    return [read(memory, out) for out in outs]


def few(rows: int, tiles: int, k: int = 4096) -> Split:
    return Split(rows, k, tiles, 20, EPS, NORM_EPS)


def mix_inputs(rng, rows: int, k: int = 4096) -> list[np.ndarray]:
    h = (rng.standard_normal((rows, k)) * 3).astype(BF16)
    fn = (rng.standard_normal((24, k)) * 0.05).astype(np.float32)
    return [h, fn, *(rng.standard_normal(n).astype(np.float32) for n in (24, 3))]


def coefficients_close(arrays, results) -> None:
    h, fn, base, scale = (a.astype(np.float64) for a in arrays)
    mixes = h @ fn.T / np.sqrt((h**2).mean(-1, keepdims=True) + NORM_EPS)
    want = oracle_split(mixes, base, scale, 4)
    for got, value in zip(results, want, strict=True):
        assert np.abs(got - value.reshape(got.shape)).max() <= 10 * F32_REL


@pytest.mark.parametrize("s", [few(1, 1), few(3, 2, 8192)], ids=str)
def test_coefficients_equal_float64(s, rng):
    arrays = mix_inputs(rng, s.rows, s.k)
    coefficients_close(arrays, run_split(s, arrays))


def test_coefficients_of_few_rows_have_the_same_bits_in_any_launch(rng):
    """Whatever the tile and the other rows, of which one is NaN."""
    arrays = mix_inputs(rng, 20)
    arrays[0][3] = np.nan
    wide = run_split(few(20, 2), arrays)
    for s in (few(1, 1), few(1, 4)):
        for got, want in zip(run_split(s, [arrays[0][18:19], *arrays[1:]]), wide, strict=True):
            assert got.tobytes() == want[18:19].tobytes()
    for value in wide:
        assert np.isnan(value[3]).all() and not np.isnan(np.delete(value, 3, 0)).any()


@pytest.mark.parametrize("s", [few(2, 1), pytest.param(few(3, 1), marks=pytest.mark.slow)], ids=str)
def test_coefficients_of_few_rows_with_warps_in_any_order(s, rng):
    arrays = mix_inputs(rng, s.rows, s.k)
    strict = run_split(s, arrays, partial(Strict, seed=1))
    for got, want in zip(strict, run_split(s, arrays), strict=True):
        assert got.tobytes() == want.tobytes()


def keeps_all_bits_of_fn(run: Callable) -> None:
    """A product of one column is fn itself: units of 2^-23, which two bf16 numbers do not hold."""
    h, fn = np.zeros((1, 4096)), np.zeros((24, 4096), np.float32)
    h[0, 1234] = 1
    fn[:, 1234] = 1 + 2.0**-9 + np.arange(24) * 2.0**-23  # bits of all three bf16 numbers
    scale, base = np.ones(3, np.float32), np.full(24, -64.125, np.float32)
    _, post, _ = run([h.astype(BF16), fn, base, scale])
    # Mixes 64 fn - 64.125 are about 0, where a sigmoid rises by 1/4.
    step = 2 * 0.25 * 64 * 2.0**-23
    assert np.abs(np.diff(post[0]) - step).max() <= step / 8


def takes_zero_streams_and_extreme_mixes(run: Callable) -> None:
    h, fn = np.zeros((2, 4096)), np.zeros((24, 4096), np.float32)
    h[1, 0], fn[:, 0] = 1, 5 * np.where(np.arange(24) % 2, 1, -1)  # mixes of 320
    arrays = [h.astype(BF16), fn, np.zeros(24, np.float32), np.ones(3, np.float32)]
    pre, post, comb = run(arrays)
    assert np.abs(pre - [[0.5 + EPS] * 4, [EPS, 1 + EPS] * 2]).max() <= F32_REL
    assert np.abs(post - [[1] * 4, [0, 2] * 2]).max() <= F32_REL
    assert np.abs(comb.reshape(2, 4, 4).sum(1) - 1).max() <= 4 * EPS


def test_products_of_few_rows_keep_all_bits_of_fn():
    keeps_all_bits_of_fn(partial(run_split, few(1, 1)))


def test_few_zero_streams_and_extreme_mixes():
    takes_zero_streams_and_extreme_mixes(partial(run_split, few(2, 1)))


def test_fused_reference_is_the_chain(rng):
    h, y, post, comb, pre, weight = (jnp.asarray(a) for a in fused_inputs(rng, 3, 64))
    comb = comb.reshape(3, 4, 4)
    fused = op.build_expand_collapse_norm("reference")
    streams, normed = fused(h, y, post, comb, pre, weight, norm_eps=NORM_EPS)
    want = op.build_expand("reference")(h, y, post, comb)
    x = op.build_collapse("reference")(want, pre)
    assert jnp.array_equal(streams, want)
    assert jnp.array_equal(normed, rms_norm(x, weight, NORM_EPS))


def test_bad_arguments_name_the_value():
    f32, bf16 = partial(jnp.zeros, dtype=jnp.float32), partial(jnp.zeros, dtype=BF16)
    fused = partial(kernel_sm90.expand_collapse_norm, norm_eps=NORM_EPS)
    mixed = partial(kernel_sm90.coefficients, iters=20, eps=EPS, norm_eps=NORM_EPS)
    rest = f32((2, 4)), f32((2, 4, 4)), f32((2, 4))
    with pytest.raises(ValueError, match=r"h.shape=\(2, 2, 64\).* must be bfloat16 \[..., 4, 64\]"):
        fused(bf16((2, 2, 64)), bf16((2, 64)), *rest, bf16(64))
    with pytest.raises(ValueError, match=r"weight: array.dtype=.*float32.* must be bfloat16"):
        fused(bf16((2, 4, 64)), bf16((2, 64)), *rest, f32(64))
    with pytest.raises(ValueError, match=r"self.width=60 must be a multiple of 8 up to 6144"):
        fused(bf16((2, 4, 60)), bf16((2, 60)), *rest, bf16(60))
    with pytest.raises(ValueError, match=r"self.k=256 must be a multiple of 4096"):
        mixed(bf16((1, 4, 64)), f32((24, 256)), f32(24), f32(3))
    with pytest.raises(ValueError, match=r"fn: array.shape=\(24, 64\) must be \(24, 4096\)"):
        mixed(bf16((1, 4, 1024)), f32((24, 64)), f32(24), f32(3))


def test_no_rows():
    empty = jnp.zeros((0, 4, 1024), BF16)
    args = jnp.zeros((24, 4096)), jnp.zeros(24), jnp.zeros(3)
    got = kernel_sm90.coefficients(empty, *args, iters=20, eps=EPS, norm_eps=NORM_EPS)
    assert [a.shape for a in got] == [(0, 4), (0, 4), (0, 4, 4)]
    y, mixed = jnp.zeros((0, 1024), BF16), jnp.zeros((0, 4))
    streams, normed = kernel_sm90.expand_collapse_norm(
        empty, y, mixed, got[2], mixed, jnp.zeros(1024, BF16), norm_eps=NORM_EPS
    )
    assert streams.shape == (0, 4, 1024) and normed.shape == (0, 1024)


def test_the_kernels_are_taken_by_name(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "coefficients", lambda *_, iters, eps, norm_eps: iters)
    monkeypatch.setattr(kernel_sm90, "expand_collapse_norm", lambda *_, norm_eps: norm_eps)
    mixed = op.build_coefficients("mosaic")
    assert mixed(None, None, None, None, iters=3, eps=0, norm_eps=0) == 3
    fused = op.build_expand_collapse_norm("mosaic")
    assert fused(*[None] * 6, norm_eps=5) == 5


def test_auto_on_hopper_takes_the_reference_for_other_shapes(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    for name in ("coefficients", "expand_collapse_norm"):
        monkeypatch.setattr(ref, name, lambda *_, **__: "ref")
        monkeypatch.setattr(kernel_sm90, name, lambda *_, **__: "kernel")
    mixed = partial(op.build_coefficients("auto"), iters=20, eps=EPS, norm_eps=NORM_EPS)
    fused = partial(op.build_expand_collapse_norm("auto"), norm_eps=NORM_EPS)

    def kind(width: int, streams: int = 4, dtype=BF16) -> tuple:
        h, y, weight = (jnp.zeros(s, dtype) for s in ((3, streams, width), (3, width), width))
        return mixed(h, *[None] * 3), fused(h, y, *[None] * 3, weight)

    assert kind(1024) == ("kernel", "kernel") and kind(1000) == ("ref", "kernel")
    assert {*kind(1028), *kind(7168)[1:], *kind(1024, 2)} == {"ref"}
    assert kind(1024, dtype=jnp.float32) == ("ref", "ref")


@pytest.mark.parametrize("part", PARTS)
def test_bench_problem_keeps_its_carry(part):
    def run():
        one = problem(Case(2, width=64, part=part), "xla", 0)
        return one.carry, one.call(1, one.carry, one.data)

    before, after = (jax.tree.map(lambda a: (a.shape, a.dtype), a) for a in jax.eval_shape(run))
    assert before == after


def test_least_bytes_and_their_time():
    """What each array moves once takes at the copy rate, in microseconds."""
    floors = {part: Case(8192, part=part).nbytes / 4.3e6 for part in PARTS}
    assert {part: round(us) for part, us in floors.items()} == {
        "fused": 195,
        "coefficients": 78,
        "site": 274,
    }


@pytest.mark.parametrize("part", ["fused", "coefficients"])
def test_checks_tell_right_from_wrong(part):
    case = Case(2, width=64, iters=2, part=part)
    build = op.build_coefficients if part == "coefficients" else op.build_expand_collapse_norm
    right = build("reference")
    assert all(check.ok for check in checks(case, 0, right))

    def wrong(h, *args, **options):
        return right(jnp.flip(h, 0), *args, **options)

    assert not any(check.ok for check in checks(case, 0, wrong))
