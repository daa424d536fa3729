"""The PTX of the Engram kernels on a host machine, against float64 and stored values; op and
checks.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chosen
from pallas_kernels.engram import gate_ptx, kernel_sm90, op, ref, rows_ptx
from pallas_kernels.engram.cases import EPS, FLASH_TABLE, Case, checks, problem
from pallas_kernels.engram.gate_ptx import Gate
from pallas_kernels.engram.rows_ptx import Gather, gather
from pallas_kernels.engram.staged import StagedRows
from pallas_kernels.quant import Fp8Rows
from tests.pallas_kernels.ptx_machine import Cluster
from tests.pallas_kernels.ptx_operations import OPERATIONS, U64
from tests.pallas_kernels.ptx_strict import Guarded, Strict
from tests.pallas_kernels.test_engram import oracle_gate

BF16 = jnp.bfloat16
CANARY = -7.0


def inverse_root(rest, value):
    x = value.astype(np.uint32).view(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (x**-0.5).astype(np.float32).view(np.uint32).astype(U64)


@pytest.fixture(autouse=True)
def operations(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "rsqrt", inverse_root)


def place_output(memory: Guarded, rows: int, width: int) -> tuple[int, np.ndarray]:
    """An output between two canary rows: the address of the whole, and the whole."""
    out = np.full((rows + 2, width), CANARY, BF16)
    return memory.place(out), out


def read(memory: Guarded, at: int, out: np.ndarray) -> np.ndarray:
    values = memory.read(at, out)
    assert (values[[0, -1]] == out[[0, -1]]).all()
    return values[1:-1]


def run_rows(s: Gather, codes, scales, ids, machine=Cluster) -> np.ndarray:
    memory = Guarded(1 << 20)
    inputs = [memory.place(a) for a in (codes, scales, ids)]
    at, out = place_output(memory, s.count, rows_ptx.WIDTH)
    lines = rows_ptx.program(s)
    for block in range(s.blocks):
        operands = [*inputs, at + out.strides[0], block]
        machine(
            lines,
            memory,
            threads=rows_ptx.THREADS,
            shared=256,
            operands=lambda rank, operands=operands: operands,
        ).run()
    return read(memory, at, out)


def table_of(rng, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Every code but NaN and every scale byte but that of NaN."""
    codes = rng.integers(0, 256, (rows, 256)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    scales = (np.arange(8 * rows) % 255).astype(np.uint8).reshape(rows, 8)
    return codes, scales


@pytest.mark.parametrize(("count", "unroll"), [(24, 1), (21, 2), (75, 8)])
def test_rows_are_those_of_the_table(count, unroll, rng):
    codes, scales = table_of(rng, 40)
    ids = rng.integers(0, 40, count).astype(np.int32)
    ids[:3] = 39, 0, 39
    with np.errstate(over="ignore"):
        got = run_rows(Gather(count, 40, unroll), codes, scales, ids)
    scale = np.exp2(np.repeat(scales, 32, axis=1).astype(np.float64) - 127)
    with np.errstate(over="ignore"):
        want = (codes.view(jnp.float8_e4m3fn).astype(np.float64) * scale).astype(BF16)[ids]
    assert got.tobytes() == want.tobytes()


def test_ids_outside_the_table_give_its_ends(rng):
    codes, scales = table_of(rng, 40)
    ids = np.array([-1, -(2**31), 40, 2**31 - 1], np.int32)
    got = run_rows(Gather(4, 40, 1), codes, scales, ids)
    want = run_rows(Gather(4, 40, 1), codes, scales, np.array([0, 0, 39, 39], np.int32))
    assert got.tobytes() == want.tobytes()


def test_scale_byte_255_is_nan_and_0_the_smallest_power():
    codes = np.full((2, 256), 0x7E, np.uint8)  # 448
    scales = np.array([[255] * 8, [0] * 8], np.uint8)
    got = run_rows(Gather(2, 2, 1), codes, scales, np.arange(2, dtype=np.int32))
    got = got.astype(np.float32)
    assert np.isnan(got[0]).all() and (got[1] == np.float32(448 * 2.0**-127)).all()


def test_row_warps_in_any_order(rng):
    codes, scales = table_of(rng, 40)
    s, ids = Gather(21, 40, 2), rng.integers(0, 40, 21).astype(np.int32)
    with np.errstate(over="ignore"):
        strict = run_rows(s, codes, scales, ids, partial(Strict, seed=1))
        assert strict.tobytes() == run_rows(s, codes, scales, ids).tobytes()


def test_launches_of_rows():
    shapes = [gather(24 * rows, FLASH_TABLE) for rows in (1, 128, 512, 1024, 8192)]
    assert [(s.unroll, s.blocks) for s in shapes] == [
        (1, 3), (1, 384), (2, 768), (4, 768), (8, 3072),
    ]  # fmt: skip


def run_gate(s: Gate, arrays, machine=Cluster) -> np.ndarray:
    memory = Guarded(1 << 20)
    inputs = [memory.place(np.asarray(a)) for a in arrays]
    at, out = place_output(memory, s.rows, s.streams * s.width)
    lines = gate_ptx.program(s)
    for first in range(s.stride):
        for stream in range(s.streams):
            operands = [*inputs, at + out.strides[0], 0, stream, first]
            machine(
                lines,
                memory,
                threads=s.threads,
                shared=4 * s.words,
                operands=lambda rank, operands=operands: operands,
            ).run()
    return read(memory, at, out).reshape(s.rows, s.streams, s.width)


def gate_inputs(rng, rows: int, streams: int, d: int) -> list[np.ndarray]:
    h, kv = (rng.standard_normal((rows, n * d)).astype(BF16) for n in (streams, streams + 1))
    q, k = (1 + rng.standard_normal((streams, d)) / 4 for _ in "qk")
    live = (np.arange(rows) % 3 != 1).astype(np.int32)
    return [h.reshape(rows, streams, d), kv, q.astype(BF16), k.astype(BF16), live]


@pytest.mark.parametrize(
    ("rows", "streams", "d", "stride"), [(1, 4, 1024, 1), (7, 2, 264, 2), (5, 1, 2048, 5)]
)
def test_gate_and_addition_equal_float64(rows, streams, d, stride, rng):
    arrays = gate_inputs(rng, rows, streams, d)
    got = run_gate(Gate(rows, streams, d, stride, EPS), arrays).astype(np.float64)
    h, kv, q, k, live = arrays
    keys, value = kv[:, : streams * d].reshape(h.shape), kv[:, streams * d :].astype(np.float64)
    gate = oracle_gate(h, keys, q, k, live.astype(bool))
    want = h.astype(np.float64) + gate[..., None] * value[:, None]
    half = 2.0 ** (np.floor(np.log2(np.abs(want) + 1e-30)) - 8)
    # The root is steep near 0; see test_engram.
    assert (np.abs(got - want) <= half + 5e-5 * np.abs(value[:, None])).all()
    dead = live == 0
    assert (got[dead] == h[dead].astype(np.float64)).all()


def test_gate_rows_have_the_same_bits_in_any_batch(rng):
    arrays = gate_inputs(rng, 5, 2, 264)
    many = run_gate(Gate(5, 2, 264, 2, EPS), arrays)
    alone = run_gate(
        Gate(1, 2, 264, 1, EPS), [a[3:4] for a in arrays[:2]] + arrays[2:4] + [arrays[4][3:4]]
    )
    assert alone[0].tobytes() == many[3].tobytes()
    arrays[0][:3], arrays[1][:3] = np.nan, np.nan
    poisoned = run_gate(Gate(5, 2, 264, 1, EPS), arrays)
    assert poisoned[3:].tobytes() == many[3:].tobytes()


def test_gate_warps_in_any_order(rng):
    s, arrays = Gate(5, 1, 264, 1, EPS), gate_inputs(rng, 5, 1, 264)
    assert run_gate(s, arrays, partial(Strict, seed=1)).tobytes() == run_gate(s, arrays).tobytes()


def test_orthogonal_rows_get_the_smallest_root():
    """sigmoid(+-1e-3) with the sign of the dot, -0 included; the value is large beside h."""
    h, kv = np.zeros((3, 1, 64)), np.zeros((3, 128))
    h[:, 0, 0], kv[:, 1], kv[:, 64:] = 2.0**-20, 1, 2.0**10
    kv[1:, 0] = 1e-9, -1e-9
    arrays = [h.astype(BF16), kv.astype(BF16), *[np.ones((1, 64), BF16)] * 2, np.ones(3, np.int32)]
    got = run_gate(Gate(3, 1, 64, 3, EPS), arrays)[:, 0, 1].astype(np.float64) / 2**10
    high, low = 1 / (1 + np.exp(-1e-3)), 1 / (1 + np.exp(1e-3))
    assert np.abs(got - [high, high, low]).max() <= 2.0**-9


def test_fused_reference_is_the_chain(rng):
    h, kv, q, k, live = (jnp.asarray(a) for a in gate_inputs(rng, 3, 2, 64))
    gate = ref.engram_gate(h, kv[:, :128].reshape(h.shape), q, k, live, eps=EPS)
    want = ref.engram_add(h, gate, kv[:, 128:])
    got = op.build_gate_add("reference")(h, kv, q, k, live, eps=EPS)
    assert jnp.array_equal(got, want)


def test_bad_operands_name_the_value(rng):
    h, kv, q, k, live = (jnp.asarray(a) for a in gate_inputs(rng, 2, 2, 64))
    run = partial(kernel_sm90.engram_gate_add, eps=EPS)
    with pytest.raises(ValueError, match=r"h.dtype=dtype\('float32'\).* must be bfloat16"):
        run(h.astype(jnp.float32), kv, q, k, live)
    with pytest.raises(ValueError, match=r"kv.shape=\(2, 128\) must be \(2, 192\)"):
        run(h, kv[:, 64:], q, k, live)
    with pytest.raises(ValueError, match=r"live.shape=\(1,\) must be \(2,\)"):
        run(h, kv, q, k, live[:1])
    with pytest.raises(ValueError, match=r"width=60 must be a multiple of 8 up to 6144"):
        run(h[..., :60], kv[:, :180], q[:, :60], k[:, :60], live)
    table, ids = Fp8Rows.quantize(jnp.ones((4, 64))), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"table.shape=\(4, 64\) must be Fp8Rows \[rows, 256\]"):
        kernel_sm90.engram_rows(table, ids, dtype=BF16)
    with pytest.raises(ValueError, match=r"dtype=.*float32.* must be bfloat16"):
        kernel_sm90.engram_rows(Fp8Rows.quantize(jnp.ones((4, 256))), ids, dtype=jnp.float32)


def test_no_rows():
    table = Fp8Rows.quantize(jnp.ones((4, 256)))
    got = kernel_sm90.engram_rows(table, jnp.zeros((0, 24), jnp.int32), dtype=BF16)
    assert got.shape == (0, 6144) and got.dtype == BF16
    h, weight = jnp.zeros((0, 2, 64), BF16), jnp.ones((2, 64), BF16)
    kv, live = jnp.zeros((0, 192), BF16), jnp.zeros(0, bool)
    assert kernel_sm90.engram_gate_add(h, kv, weight, weight, live, eps=EPS).shape == h.shape


def test_the_kernels_are_taken_by_name(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setattr(kernel_sm90, "engram_rows", lambda table, ids, dtype: dtype)
    monkeypatch.setattr(kernel_sm90, "engram_gate_add", lambda *_, eps: eps)
    assert op.build_rows("mosaic")(None, None, dtype=BF16) == BF16
    assert op.build_gate_add("mosaic")(*[None] * 5, eps=3) == 3


def test_auto_takes_the_rows_of_the_table(monkeypatch):
    """And only what fits the kernels; tables on the host are looked into at their rows."""
    monkeypatch.setattr("pallas_kernels.dispatch.on_hopper", lambda: True)
    monkeypatch.setitem(chosen.ROWS, "engram_rows", range(2, 3))
    monkeypatch.setitem(chosen.ROWS, "engram_gate_add", range(2, 3))
    monkeypatch.setattr(kernel_sm90, "engram_rows", lambda table, ids, dtype: "kernel")
    monkeypatch.setattr(kernel_sm90, "engram_gate_add", lambda *_, eps: "kernel")
    rows, gate = op.build_rows("auto"), op.build_gate_add("auto")

    def looked_up(count, table, dtype=BF16):
        return rows(table, jnp.zeros((count, 3), jnp.int32), dtype=dtype)

    wide, narrow = (Fp8Rows.quantize(jnp.ones((4, n))) for n in (256, 64))
    assert looked_up(2, wide) == "kernel"
    assert looked_up(2, StagedRows(wide, jnp.zeros((2, 3), jnp.int32))) == "kernel"
    assert looked_up(1, wide).shape == looked_up(1, wide, jnp.float32).shape == (1, 768)
    assert looked_up(2, narrow).shape == (2, 192)
    assert looked_up(2, wide, jnp.float32).dtype == jnp.float32

    def gated(count, dtype=BF16):
        h, kv = jnp.zeros((count, 2, 64), dtype), jnp.zeros((count, 192), dtype)
        return gate(h, kv, *[jnp.ones((2, 64), BF16)] * 2, jnp.zeros(count, bool), eps=EPS)

    assert gated(2) == "kernel"
    assert gated(1).shape == (1, 2, 64) and gated(2, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("part", ["rows", "gate"])
def test_bench_problem_keeps_its_carry(part):
    def run():
        one = problem(Case(2, 64, table=50, part=part), "xla", 0)
        return one.carry, one.call(1, one.carry, one.data)

    before, after = jax.eval_shape(run)
    assert (before.shape, before.dtype) == (after.shape, after.dtype)


def test_least_bytes_and_their_time():
    """What each array moves once takes at the copy rate, in microseconds."""
    floors = [Case(8192, part=part).nbytes / 4.3e6 for part in ("rows", "gate")]
    assert [round(us) for us in floors] == [36, 254]


@pytest.mark.parametrize("part", ["rows", "gate"])
def test_checks_tell_right_from_wrong(part):
    case = Case(3, 64, 2, 4, table=70, part=part)
    right = op.build_rows("reference") if part == "rows" else op.build_gate_add("reference")
    assert all(check.ok for check in checks(case, 0, right))

    def wrong(*args, **options):
        return jnp.roll(right(*args, **options), 1, 0)

    assert not next(checks(case, 0, wrong)).ok
