"""The ``linear`` kernels' own PTX on a host machine, against float64 and themselves."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import chosen
from pallas_kernels.linear import kernel_sm90, op, ref, skinny_ptx, skinny_shape, sweep
from pallas_kernels.linear.cases import CASES, CHECKED, Case, checks, problem
from pallas_kernels.linear.skinny_shape import SMEM_BYTES, THREADS, Skinny, tuned
from pallas_kernels.numerics import FLOAT32, REFERENCE, SERVING
from pallas_kernels.quant import Fp4Rows, Fp8Blocks
from tests.pallas_kernels.ptx_machine import COLLECTIVE, Cluster
from tests.pallas_kernels.ptx_operations import OPERATIONS
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_mhc_kernel import approximate, fused_multiply_add
from tests.tolerances import F32_REL

BF16 = ml_dtypes.bfloat16
CANARY = -7.0


@pytest.fixture(autouse=True)
def orders(monkeypatch):
    """Instructions that order others but compute nothing."""
    for name in ("bar", "griddepcontrol"):
        monkeypatch.setitem(COLLECTIVE, name, lambda *_: None)
    monkeypatch.setitem(OPERATIONS, "rsqrt", approximate(lambda x: x**-0.5))
    monkeypatch.setitem(OPERATIONS, "fma", fused_multiply_add)


def weights(rng, n: int, k: int) -> Fp8Blocks:
    """Codes of every value, scales from 2^-20 to 2^7."""
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    scales = rng.integers(107, 135, (n // 32, k // 32)).astype(np.uint8)
    return Fp8Blocks(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scales))


def inputs(rng, rows: int, k: int) -> np.ndarray:
    return (rng.standard_normal((rows, k)) * np.exp(rng.standard_normal((rows, 1)))).astype(BF16)


def run_cluster(machine: Cluster) -> None:
    for block in machine.blocks:
        block.special["%cluster_ctarank"] = np.full(block.n, block.rank, np.uint32)
    machine.run()


def run_skinny(s: Skinny, x: np.ndarray, matrices: list[Fp8Blocks], machine=Cluster, norm=None):
    memory = Guarded(1 << 21)
    at = [memory.place(x)]
    for w in matrices:
        at += [memory.place(np.asarray(w.codes)), memory.place(np.asarray(w.scales))]
    outs, dtype = [], np.float32 if s.wide else BF16
    for n in s.outputs:
        whole = np.full((s.rows + 2, n), CANARY, dtype)
        outs.append((memory.place(whole), whole))
    at += [place + whole.strides[0] for place, whole in outs]
    at += [] if norm is None else [memory.place(norm)]
    for cluster in range(s.grid):
        run_cluster(
            machine(
                skinny_ptx.program(s),
                memory,
                threads=THREADS,
                shared=4 * s.words,
                operands=lambda rank, cluster=cluster: [*at, 0, cluster],
                blocks=s.splits,
            )
        )
    results = [memory.read(*out) for out in outs]
    for got in results:
        assert (got[[0, -1]] == CANARY).all()
    return [got[1:-1] for got in results]


def close(got: np.ndarray, x: np.ndarray, w: Fp8Blocks) -> None:
    a, b = x.astype(np.float64), np.asarray(w.dequantize(), np.float64)
    want = a @ b.T
    bound = F32_REL * (np.linalg.norm(a, axis=-1)[:, None] * np.linalg.norm(b, axis=-1))
    if got.dtype == BF16:
        bound = bound + 2.0**-8 * np.abs(want)
    assert (np.abs(got.astype(np.float64) - want) <= bound).all()


def norm_weight(rng, k: int) -> np.ndarray:
    return (1 + rng.standard_normal(k) / 4).astype(BF16)


def close_normed(got: np.ndarray, x: np.ndarray, norm: np.ndarray, eps: float, w) -> None:
    """bf16 results: x times the norm's weight is rounded, x's size divides the sums."""
    weighed = (x.astype(np.float32) * norm.astype(np.float32)).astype(BF16)
    size = np.sqrt((x.astype(np.float64) ** 2).mean(axis=1) + eps)[:, None]
    a, b = weighed.astype(np.float64) / size, np.asarray(w.dequantize(), np.float64)
    bound = F32_REL * (np.linalg.norm(a, axis=-1)[:, None] * np.linalg.norm(b, axis=-1))
    off = np.abs(got.astype(np.float64) - a @ b.T)
    assert (off <= bound + 2.0**-8 * np.abs(a @ b.T)).all()


SKINNY = (
    Skinny(1, 128, (64,), tokens=8, tiles=1, splits=1, depth=1),
    Skinny(5, 288, (96, 32), tokens=8, tiles=1, splits=2, depth=2),
    Skinny(19, 512, (160, 128), tokens=16, tiles=2, splits=4, depth=6, wide=True),
    Skinny(70, 1024, (64,), tokens=64, tiles=2, splits=8, depth=1),
    Skinny(8, 352, (32,), tokens=8, tiles=1, splits=1, depth=3),
    Skinny(4, 352, (96,), tokens=16, tiles=2, splits=2, depth=1),
)


@pytest.mark.parametrize("s", SKINNY, ids=str)
def test_few_rows_equal_float64(s, rng):
    x, matrices = inputs(rng, s.rows, s.k), [weights(rng, n, s.k) for n in s.outputs]
    for got, w in zip(run_skinny(s, x, matrices), matrices, strict=True):
        close(got, x, w)


NORMED = (
    Skinny(1, 128, (64,), tokens=8, tiles=1, splits=1, depth=1, norm=1e-6),
    Skinny(5, 288, (96, 32), tokens=8, tiles=1, splits=2, depth=2, norm=1e-2),
    Skinny(40, 128, (64,), tokens=64, tiles=1, splits=2, depth=1, norm=1e-6),
    Skinny(70, 128, (32,), tokens=64, tiles=1, splits=1, depth=2, norm=1e-6),
    Skinny(8, 352, (32,), tokens=8, tiles=1, splits=1, depth=3, norm=1e-6, early=True),
    Skinny(4, 352, (96, 32), tokens=8, tiles=2, splits=2, depth=2, norm=1e-6, early=True),
)


@pytest.mark.parametrize("s", NORMED, ids=str)
def test_normed_rows_equal_float64(s, rng):
    """The norm's weight is rounded in, its size divides the sums; a row of NaN stays alone."""
    x, matrices = inputs(rng, s.rows, s.k), [weights(rng, n, s.k) for n in s.outputs]
    norm = norm_weight(rng, s.k)
    whole = run_skinny(s, x, matrices, norm=norm)
    for got, w in zip(whole, matrices, strict=True):
        close_normed(got, x, norm, s.norm, w)
    if s.rows in (4, 5, 8):
        x[1] = np.nan
        mixed = run_skinny(s, x, matrices, partial(Strict, seed=1), norm=norm)
        keep = np.arange(s.rows) != 1
        for got, want in zip(mixed, whole, strict=True):
            assert got[keep].tobytes() == want[keep].tobytes()
            assert np.isnan(got[1].astype(float)).all()


@pytest.mark.parametrize(("rows", "tokens", "fewer"), [(13, 16, 5), (4, 8, 1)])
def test_rows_have_the_same_bits_in_any_batch(rows, tokens, fewer, rng):
    """Of one bucket, whatever the order of warps, the other matrices and rows, which are NaN or
    infinite.
    """
    s = Skinny(rows, 320, (64, 96), tokens=tokens, tiles=1, splits=2, depth=2)
    x, (one, two) = inputs(rng, rows, 320), [weights(rng, n, 320) for n in s.outputs]
    first, second = run_skinny(s, x, [one, two])
    x[0], x[1, 40] = np.nan, -np.inf
    mixed = run_skinny(s, x, [one, two], partial(Strict, seed=1))
    keep = ~np.isin(np.arange(rows), (0, 1))
    for got, want in zip(mixed, (first, second), strict=True):
        assert got[keep].tobytes() == want[keep].tobytes() and np.isnan(got[0].astype(float)).all()
        assert not np.isfinite(got[1].astype(float)).any()
    own = Skinny(fewer, 320, (96,), tokens=tokens, tiles=1, splits=2, depth=1, early=True)
    assert run_skinny(own, x[-fewer:], [two])[0].tobytes() == second[-fewer:].tobytes()


def test_scales_above_the_limit_show(rng):
    s, w = Skinny(5, 64, (64,), tokens=8, tiles=1, splits=1, depth=1), weights(rng, 64, 64)
    w = Fp8Blocks(w.codes, w.scales.at[1, 0].set(135))
    (got,) = run_skinny(s, inputs(rng, 5, 64), [w])
    assert np.isfinite(got[:, :32].astype(float)).all()
    assert not np.isfinite(got[:, 32:].astype(float)).any()


def test_every_size_has_a_launch():
    for rows in (1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128):
        for k in (32, 288, 1024, 1280, 5120, 8192, 15360, kernel_sm90.MAX_K):
            s = tuned(rows, k, (32, 4096))
            assert 4 * s.words <= SMEM_BYTES and s.units * s.splits * 64 >= k
    few = [tuned(rows, 5120, (1280, 512)) for rows in (1, 8, 16)]
    assert len({(s.tiles, s.splits, s.units) for s in few}) == 1


def test_measured_settings_are_taken(tmp_path, monkeypatch):
    best = {"tokens": 8, "tiles": 2, "splits": 4, "depth": 3}
    entries = [{"rows": rows, "k": 512, "outputs": [64, 32], **best} for rows in (8, 32)]
    entries[1]["tokens"] = 32
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"linear_few_rows": entries}))
    monkeypatch.setattr(skinny_shape, "TUNED", path)
    tuned.cache_clear()
    assert tuned(5, 512, (64, 32), wide=True) == Skinny(5, 512, (64, 32), **best, wide=True)
    assert tuned(9, 512, (64, 32)).tokens == 32 and tuned(9, 512, (64, 32)).tiles == 2
    assert tuned(33, 512, (64, 32)).tokens == 64 and tuned(5, 512, (64,)).tiles == 1
    tuned.cache_clear()


def fake(monkeypatch):
    """The launcher, in NumPy's place of a GPU."""

    def launcher(rows, k, outputs, *, wide, early):
        def launch(x, *planes):
            pairs = zip(planes[::2], planes[1::2], strict=True)
            sums = (x.astype(jnp.float32) @ Fp8Blocks(*pair).dequantize().T for pair in pairs)
            return tuple(y.astype(jnp.float32 if wide else jnp.bfloat16) for y in sums)

        return launch

    monkeypatch.setattr(kernel_sm90, "launcher", launcher)


@pytest.mark.parametrize("numerics", [REFERENCE, SERVING], ids=lambda n: n.name)
def test_linears_give_what_the_op_gives(numerics, rng, monkeypatch):
    fake(monkeypatch)
    x = jnp.asarray(inputs(rng, 6, 64)).reshape(2, 3, 64)
    matrices = [Fp8Blocks.quantize(jnp.asarray(rng.standard_normal((n, 64)))) for n in (32, 64)]
    for options in ({}, {"out_dtype": jnp.float32}):
        got = kernel_sm90.linears(x, matrices, numerics=numerics, **options)
        want = op.build_many("reference")(x, matrices, numerics=numerics, **options)
        for one, two in zip(got, want, strict=True):
            assert one.shape == two.shape and one.dtype == two.dtype
            np.testing.assert_allclose(one.astype(np.float32), two.astype(np.float32), rtol=2**-7)
    (empty,) = kernel_sm90.linears(x[:0], matrices[:1], numerics=numerics)
    assert empty.shape == (0, 3, 32)


def test_bad_operands_name_the_value():
    x, w = jnp.zeros((2, 64), jnp.bfloat16), Fp8Blocks.quantize(jnp.zeros((32, 64)))

    def refuses(message, x=x, weights=(w,), numerics=SERVING, **options):
        with pytest.raises(ValueError, match=message):
            kernel_sm90.linears(x, weights, numerics=numerics, **options)

    refuses(r"float32.*must be of bfloat16", x=x.astype(jnp.float32))
    refuses(r"numerics.name='float32' must be of bfloat16", numerics=FLOAT32)
    refuses(r"out_dtype=.*float16.* must be bfloat16 or float32", out_dtype=jnp.float16)
    refuses(r"Fp4Rows must be Fp8Blocks", weights=(Fp4Rows.quantize(jnp.zeros((32, 64))),))
    refuses(r"ArrayImpl must be Fp8Blocks", weights=(x,))
    refuses(r"w.shape=\(32, 64\).* must be \[N, 32\]", x=x[:, :32])
    refuses(r"must end in at most 16384", x=jnp.zeros((1, 16416), jnp.bfloat16))
    refuses("weights must be one at least", weights=())
    assert kernel_sm90.unfit(x, (w, w), SERVING, jnp.float32) == ""


def test_the_kernel_is_taken_by_name(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "linears", lambda x, w, *, numerics, out_dtype: (numerics,))
    assert op.build("mosaic")(None, None, numerics=SERVING) is SERVING
    assert op.build_many("mosaic")(None, (), numerics=SERVING) == (SERVING,)


def test_auto_takes_the_rows_of_the_table(rng, monkeypatch):
    """Others, and what the kernel refuses, go through XLA; float32 operands as the reference."""
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setitem(chosen.ROWS, ("linear", (64,), 64), range(2, 3))
    taken = []

    def kernel(x, w, *, numerics, out_dtype=None):
        taken.append((*x.shape, len(w)))
        return ref.linears(x, w, numerics=numerics, out_dtype=out_dtype)

    monkeypatch.setattr(kernel_sm90, "linears", kernel)
    linear, linears, normed = op.build("auto"), op.build_many("auto"), op.build_normed("auto")
    w = [Fp8Blocks.quantize(jnp.asarray(rng.standard_normal((n, 64)))) for n in (32, 64)]
    x = jnp.asarray(inputs(rng, 129, 64))
    for rows in (1, 2, 128, 129):
        linear(x[:rows], w[1], numerics=SERVING)
        linears(x[:rows], w, numerics=SERVING)
    assert taken == [(1, 64, 2), (2, 64, 1), (2, 64, 2), (128, 64, 2)]
    for weight, y in ((Fp4Rows.quantize(w[0].dequantize()), x), (w[0].dequantize(), x[:3])):
        linear(y.astype(jnp.float32), weight, numerics=FLOAT32)
    few, norm = x[:4], jnp.asarray((1 + rng.standard_normal(64) / 4).astype(BF16))
    monkeypatch.setitem(chosen.ROWS, "normed_linear", range(0))
    for run, options in ((linears, {}), (partial(normed, norm=norm, eps=1e-6), {})):
        want = ref.linears if run is linears else partial(ref.normed_linears, norm=norm, eps=1e-6)
        for one, two in zip(
            run(few, weights=w, numerics=SERVING, **options),
            want(few, weights=w, numerics=SERVING),
            strict=True,
        ):
            np.testing.assert_allclose(one.astype(np.float32), two.astype(np.float32), rtol=2**-7)
    assert len(taken) == 6


def test_bench_problem_keeps_its_carry():
    def run():
        one = problem(Case("pair", 3, (64, 32), 96), "xla", 0)
        assert one is not None
        return one.carry, one.call(1, one.carry, one.data)

    before, after = (jax.tree.map(lambda a: (a.shape, a.dtype), a) for a in jax.eval_shape(run))
    assert before == after
    assert problem(Case("pair", 3, (64, 32), 96, early=True), "xla", 0) is None


def test_cases_differ_and_are_checked():
    names = [str(case) for case in CHECKED if case.matrix in {c.matrix for c in CASES}]
    assert len({*names}) == len(names) == len(CASES) and {*CASES} <= {*CHECKED}
    (wo_b,) = (case for case in CASES if str(case) == "matrix=wo_b,rows=1")
    assert round(wo_b.nbytes / 4.3e6, 1) == 9.8  # microseconds at the copy rate


def test_a_sweep_begins_with_the_ops_own_launch(capsys):
    for case in (c for c in CASES if c.rows in (1, 32, 512)):
        found = sweep.launches(case)
        assert len({*found}) == len(found) >= 3
        few = case.rows <= 128
        own = kernel_sm90.few(case.rows, case.k, case.outputs, early=case.early) if few else None
        assert own is None or found[0] == own
    with pytest.raises(SystemExit):
        sweep.main(["wo_b"])
    assert "a sweep needs an sm_90 GPU" in capsys.readouterr().err


def test_checks_tell_right_from_wrong():
    case, right = Case("one", 2, (32,), 64), op.build_many("reference")
    made = list(checks(case, 0, right))
    assert all(check.ok for check in made) and len({check.name for check in made}) == len(made)

    def wrong(x, weights, **options):
        return right(x[::-1], weights, **options)

    failed = {check.name for check in checks(case, 0, wrong) if not check.ok}
    assert failed == {check.name for check in made} - {"another run", "rows in another order"}
