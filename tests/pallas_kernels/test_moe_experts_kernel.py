"""The decode kernel's repack, plan and bit layout on the CPU; the kernel itself needs an H200
(``tests/h200``).
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe_experts import cases, decode_plan, emulate, ref, repack
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import FLOAT32
from pallas_kernels.quant import Fp4Rows, Fp8Blocks

SMALL = [
    (3, 256, 256),
    (2, 288, 256),
]  # experts, width, hidden; 288 has 32-column units and a ragged row tile


LIMIT = 2.0  # clamps both gates and ups of the inputs here

random_weights = jax.jit(cases.random_weights, static_argnums=(1, 2, 3))
unpack = jax.jit(repack.unpack, static_argnums=(1, 2, 3))
reference = jax.jit(partial(ref.moe_experts, limit=LIMIT, numerics=FLOAT32))


@cache
def _weights(*shape: int) -> tuple:
    """Routed and shared experts, and both packed."""
    routed, shared = random_weights(jax.random.key(1), *shape)
    return routed, shared, repack.pack(routed, shared)


def _bits(tree) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def _every_code(experts: int, width: int, hidden: int) -> tuple[ExpertWeights, ExpertWeights]:
    """All codes, and scales over the whole legal range."""
    rng = np.random.default_rng(0)

    def fp4(n: int, k: int) -> Fp4Rows:
        codes = rng.integers(0, 256, (experts, n, k // 2))
        scales = rng.integers(0, repack.FP4.max_scale_byte + 1, (experts, n, k // 32))
        return Fp4Rows(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))

    def fp8(n: int, k: int) -> Fp8Blocks:
        codes = jnp.asarray(rng.integers(0, 256, (n, k)), jnp.uint8)
        scales = rng.integers(0, repack.FP8.max_scale_byte + 1, (n // 32, k // 32))
        as_fp8 = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return Fp8Blocks(as_fp8, jnp.asarray(scales, jnp.uint8))

    dims = ((width, hidden), (width, hidden), (hidden, width))
    return ExpertWeights(*(fp4(*d) for d in dims)), ExpertWeights(*(fp8(*d) for d in dims))


@pytest.mark.parametrize("shape", SMALL)
def test_repack_is_lossless(shape):
    experts, shared = _every_code(*shape)
    back = unpack(repack.pack(experts, shared), *shape)
    for a, b in zip(_bits((experts, shared)), _bits(back), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("encoding", [repack.FP4, repack.FP8])
def test_every_code_becomes_its_value(encoding):
    codes = jnp.arange(1 << encoding.bits, dtype=jnp.uint8)
    words = repack.words_of(jnp.repeat(codes[:, None], encoding.codes_per_word, 1), encoding)
    np.testing.assert_array_equal(repack.codes_of(words, encoding)[:, 0], codes)
    registers = np.asarray(repack.registers_of(words, encoding))
    lanes = (np.stack([registers & 0xFFFF, registers >> 16]).astype(np.uint32) << 16).view(
        np.float32
    )
    values = lanes.astype(np.float64) * 2.0**encoding.bias
    if encoding is repack.FP4:
        want = np.asarray(
            Fp4Rows(
                codes[:, None] * jnp.ones((1, 16), jnp.uint8), jnp.full((16, 1), 127, jnp.uint8)
            ).dequantize()
        )
        want = want[:, 0]
    else:
        want = np.asarray(
            jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        )
    finite = np.isfinite(want)
    np.testing.assert_array_equal(values.reshape(2, len(codes), -1)[0, finite, 0], want[finite])


@pytest.mark.parametrize(
    "rows,k,experts", [(1, 6, 20), (4, 6, 20), (8, 6, 48), (17, 6, 20), (128, 6, 384)]
)
def test_plan_covers_every_valid_pair_once(rows, k, experts):
    rng = np.random.default_rng(rows)
    ids = rng.random((rows, experts)).argsort(-1)[:, :k].astype(np.int32)
    ids[rng.random((rows, k)) < 0.1] = -1
    if rows == 17:
        ids[:, 0] = np.where((ids[:, 1:] == 3).any(1), -1, 3)  # more than eight pairs of one expert
    weights = rng.random((rows, k)).astype(np.float32)
    plan = jax.jit(decode_plan.make_plan, static_argnums=2)(ids, weights, experts)
    n, expert = int(plan.items[0]), np.asarray(plan.expert)
    assert n <= decode_plan.max_items(rows, k, experts)
    pairs = np.asarray(plan.pairs).reshape(-1, decode_plan.TILE)
    picked = np.asarray(plan.weights).reshape(-1, decode_plan.TILE)
    got = {
        int(p): (int(expert[i]), w)
        for i in range(n)
        for p, w in zip(pairs[i], picked[i], strict=True)
        if p >= 0
    }
    want = {p: (int(e), weights.reshape(-1)[p]) for p, e in enumerate(ids.reshape(-1)) if e >= 0}
    assert got == want
    assert (pairs[n:] < 0).all() and (picked[pairs < 0] == 0).all()


@pytest.mark.parametrize("bk", [96, 128, 256, 288])
def test_token_images_are_lossless(bk):
    x = jax.random.normal(jax.random.key(0), (2, 16, 2 * bk), jnp.bfloat16)
    words = decode_plan.image(x, bk)
    np.testing.assert_array_equal(decode_plan.from_image(words, bk, 16, 2 * bk), x)


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("rows", [1, 3, 10])
def test_host_emulation_equals_the_reference(shape, rows):
    experts, width, hidden = shape
    routed, shared, packed = _weights(*shape)
    rng = np.random.default_rng(rows)
    x = jnp.asarray(4 * rng.standard_normal((rows, hidden)), jnp.bfloat16)
    ids = rng.random((rows, 2 * experts)).argsort(-1)[:, :2].astype(np.int32)
    if rows == 10:
        ids[:, 0] = np.where(ids[:, 1] == 0, -1, 0)
    ids = jnp.asarray(np.where(ids < experts, ids, -1))
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    got = emulate.moe_experts_decode(
        x, ids, weights, packed, experts=experts, width=width, limit=LIMIT
    )
    want = reference(x, ids, weights, routed, shared)
    error = np.linalg.norm(np.asarray(got - want, np.float64)) / np.linalg.norm(
        np.asarray(want, np.float64)
    )
    assert error < 4e-3  # bf16 SwiGLU outputs and result: 2^-9 each


def test_refused_weights_name_the_value():
    routed, shared = random_weights(jax.random.key(0), 1, 256, 256)
    assert isinstance(routed.w1, Fp4Rows)
    huge = Fp4Rows(routed.w1.codes, jnp.full_like(routed.w1.scales, 129))
    with pytest.raises(ValueError, match=r"w1 scale byte 129 must be at most 128"):
        repack.pack(ExpertWeights(huge, routed.w3, routed.w2), shared)
    routed, shared = random_weights(jax.random.key(0), 1, 64, 256)
    with pytest.raises(ValueError, match=r"width f=64 must be a multiple of 256 or 288"):
        repack.pack(routed, shared)
    with pytest.raises(ValueError, match=r"w1 must be Fp4Rows with scales for 32 columns"):
        repack.pack(shared, shared)
