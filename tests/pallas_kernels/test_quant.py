"""The encodings of ARCHITECTURE 0.1, bit by bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax import compiling
from pallas_kernels.quant import (
    Fp4KvRows,
    Fp4Rows,
    Fp8Blocks,
    Fp8Rows,
    dequantized,
    e2m1_decode,
    e2m1_encode,
    e4m3,
    pow2ceil_byte,
    ue8m0,
)
from pallas_kernels.quant.rounding import divide, nibbles_pack, nibbles_unpack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VECTORS = {
    "act_fp8": (Fp8Rows, "x"),
    "kv_fp4": (Fp4KvRows, "x"),
    "index_fp4": (Fp4Rows, "x"),
    "w_fp8": (Fp8Blocks, "w"),
    "w_fp4": (Fp4Rows, "w"),
}
ENCODINGS = (Fp8Rows, Fp8Blocks, Fp4Rows, Fp4KvRows)
ROUND = {e: compiling.jit(lambda x, e=e: e.quantize(x).dequantize()) for e in ENCODINGS}


def bits(array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_golden_vectors(goldens, name, compiled):
    g, (encoding, source) = goldens("quant_vectors.npz"), VECTORS[name]
    quantize = compiling.jit(encoding.quantize) if compiled else encoding.quantize
    packed = quantize(jnp.asarray(g[f"{name}.{source}"]))
    assert np.array_equal(bits(packed.codes), bits(g[f"{name}.bytes"]))
    assert np.array_equal(bits(packed.scales), bits(g[f"{name}.scale_bytes"]))
    assert np.array_equal(bits(packed.dequantize()), bits(g[f"{name}.dequant"]))
    rounded = compiling.jit(encoding.rounded) if compiled else encoding.rounded
    values = rounded(jnp.asarray(g[f"{name}.{source}"]))
    assert np.array_equal(bits(values), bits(g[f"{name}.dequant"]))
    assert packed.shape == g[f"{name}.{source}"].shape
    assert packed.nbytes == g[f"{name}.bytes"].nbytes + g[f"{name}.scale_bytes"].nbytes


def test_pow2ceil_takes_the_power_above(rng):
    r = np.exp2(rng.uniform(-126, 127, 100_000)).astype(np.float32)
    r[:4] = 1, 2, np.nextafter(np.float32(2), np.float32(3)), 2.0**-126
    mantissa, exponent = np.frexp(r.astype(np.float64))
    want = exponent - (mantissa == 0.5) + 127
    assert np.array_equal(np.asarray(pow2ceil_byte(jnp.asarray(r))), want)


def test_ue8m0_decodes_every_byte():
    got = np.asarray(ue8m0(jnp.arange(256, dtype=jnp.uint8)))
    assert np.isnan(got[255])
    # XLA's CPU may flush the subnormal 2^-127 in arithmetic, but its bits are right.
    assert np.array_equal(bits(got[:255]), bits(np.ldexp(np.float32(1), np.arange(-127, 128))))


def test_e4m3_saturates_and_rounds_to_even(rng):
    x = np.concatenate([rng.standard_normal(20_000) * 100, [464, 465, 1e9, -1e9, 0.0, -0.0]])
    x = x.astype(np.float32)
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(bits(e4m3(jnp.asarray(x))), bits(want))


def test_e2m1_rounds_to_the_nearest_code_ties_to_even():
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    x = np.concatenate([E2M1, middle, np.nextafter(middle, 9), np.nextafter(middle, 0), [7, 1e9]])
    x = np.concatenate([x, -x]).astype(np.float32)
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - E2M1)
    best = np.array([min(range(8), key=lambda c: (row[c], c % 2)) for row in distance])
    want = best | (np.signbit(x) << 3)
    assert np.array_equal(np.asarray(e2m1_encode(jnp.asarray(x))), want)
    assert np.array_equal(np.asarray(e2m1_decode(jnp.arange(8, dtype=jnp.uint8))), E2M1)
    assert np.signbit(np.asarray(e2m1_decode(jnp.uint8(8))))


def test_scaled_e2m1_equals_a_true_division(rng):
    """The midpoint comparison must never see a quotient that a reciprocal has rounded."""
    scale = np.arange(8, 16, dtype=np.float32)[:, None] * np.float32(2.0**-9)
    middle = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]) * scale
    x = np.stack([middle, np.nextafter(middle, 99), np.nextafter(middle, 0)])
    want = e2m1_encode(jnp.asarray(x / scale))
    got = compiling.jit(e2m1_encode)(jnp.asarray(x), jnp.asarray(scale))
    assert np.array_equal(got, want)


def test_divide_rounds_correctly_when_compiled(rng):
    x = (rng.standard_normal(100_000) * np.exp(rng.standard_normal(100_000))).astype(np.float32)
    got = compiling.jit(lambda v: divide(v, 6.0))(jnp.asarray(x))
    assert np.array_equal(got, x / np.float32(6))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: e.__name__)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-6, 448.0, 1e9])
def test_uniform_groups(encoding, value):
    """Nothing, next to nothing and a huge amax all stay finite; zeros stay zeros."""
    packed = encoding.quantize(jnp.full((32, 64), value, jnp.float32))
    back = np.asarray(packed.dequantize())
    assert np.isfinite(back).all() and (value != 0 or not back.any())
    assert not (np.asarray(packed.scales) == 255).any()
    if 1 <= value <= 448:
        assert np.allclose(back, value, rtol=0.2)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), spread=st.floats(0.1, 4))
def test_values_on_the_grid_come_back(seed, spread):
    """Quantising what was dequantised changes nothing (not so with E4M3 scales)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((32, 64)) * np.exp(spread * rng.standard_normal((32, 1)))
    for encoding in (Fp8Rows, Fp8Blocks, Fp4Rows):
        once = ROUND[encoding](jnp.asarray(x, jnp.float32))
        assert np.array_equal(ROUND[encoding](once), once), encoding.__name__


@pytest.mark.parametrize("encoding", [Fp8Rows, Fp4Rows, Fp4KvRows], ids=lambda e: e.__name__)
def test_a_row_does_not_depend_on_its_neighbours(encoding, rng):
    x = jnp.asarray(rng.standard_normal((16, 64)), jnp.float32)
    every = jax.jit(encoding.quantize)(x)
    for rows in (1, 2):
        few = jax.jit(encoding.quantize)(x[:rows])
        assert np.array_equal(bits(few.codes), bits(every.codes[:rows]))
        assert np.array_equal(few.scales, every.scales[:rows])


def test_block_scales_belong_to_their_own_block():
    n, k = np.meshgrid(np.arange(96) // 32, np.arange(64) // 32, indexing="ij")
    x = (2.0 ** (4 * n + 2 * k)).astype(np.float32)
    packed = Fp8Blocks.quantize(jnp.asarray(x))
    assert packed.scales.shape == (3, 2)
    assert np.array_equal(packed.dequantize(), x)
    shifted = Fp8Blocks(packed.codes, packed.scales.at[2, 1].add(1)).dequantize()
    assert np.array_equal(np.asarray(shifted) != x, (n == 2) & (k == 1))


def test_even_index_lies_in_the_low_nibble():
    codes = jnp.arange(8, dtype=jnp.uint8)
    packed = nibbles_pack(codes)
    assert np.array_equal(packed, [0x10, 0x32, 0x54, 0x76])
    assert np.array_equal(nibbles_unpack(packed), codes)


def test_public_byte_probes():
    """ARCHITECTURE 2.5: first bytes of two released tensors."""
    expert = Fp4Rows(
        jnp.asarray([0xA0, 0xA8, 0xEC, 0x4A, *[0] * 12], jnp.uint8), jnp.asarray([0x78], jnp.uint8)
    )
    want = np.float32([0, -1, -0.0, -1, -2, -4, -1, 2]) * np.float32(2.0**-7)
    assert np.array_equal(bits(expert.dequantize()[:8]), bits(want))
    codes = jnp.asarray([0xD8, 0x71, 0xF2, 0x79, *[0] * 28], jnp.uint8)
    row = Fp8Rows(
        jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), jnp.asarray([0x73], jnp.uint8)
    )
    want = [-0.00390625, 0.03515625, -0.0390625, 0.0703125]
    assert np.array_equal(row.dequantize()[:4], want)


def test_dequantized_passes_plain_weights_through():
    x = jnp.ones((2, 32), jnp.bfloat16)
    assert dequantized(x, jnp.float32).dtype == jnp.float32
    assert dequantized(Fp8Rows.quantize(x), jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("encoding", "shape", "message"),
    [(Fp8Rows, (2, 33), "k=33"), (Fp4KvRows, (2, 24), "k=24"), (Fp8Blocks, (33, 32), "n=33")],
)
def test_ragged_groups_are_refused(encoding, shape, message):
    with pytest.raises(ValueError, match=message):
        encoding.quantize(jnp.zeros(shape))
