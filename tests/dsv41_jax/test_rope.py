"""RoPE frequencies and YaRN against float64."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.config import Config
from dsv41_jax.rope import angles, frequencies, yarn_range

FLASH, TINY = Config.preset("flash"), Config.preset("tiny")
# beta_slow so small that the ramp ends beyond Rd/2-1, and beyond Rd-1.
LONG = replace(FLASH, rope_beta_slow=0.01)
LONGER = replace(FLASH, rope_beta_slow=1e-9)


def oracle(cfg, ratio, high):
    dim = cfg.qk_rope_head_dim
    i = np.arange(dim // 2)
    if not ratio:
        return cfg.rope_theta ** (-2.0 * i / dim)
    base = cfg.compress_rope_theta ** (-2.0 * i / dim)
    low = yarn_range(cfg)[0]
    ramp = np.clip((i - low) / max(high - low, 1e-3), 0, 1)
    return base / cfg.rope_factor * ramp + base * (1 - ramp)


def test_release_ramp():
    assert yarn_range(FLASH) == (15, 25)


@pytest.mark.parametrize(("cfg", "high"), [(LONG, 38), (LONGER, 63)])
def test_the_ramp_ends_at_the_rope_width(cfg, high):
    """Capped at Rd-1, not at the number of frequencies."""
    assert yarn_range(cfg) == (15, high)
    assert np.allclose(frequencies(cfg, 1), oracle(cfg, 1, high), rtol=3e-6)
    assert not np.allclose(frequencies(cfg, 1), oracle(cfg, 1, 31), rtol=1e-3)


def test_the_ramp_never_starts_below_zero():
    assert yarn_range(replace(FLASH, rope_beta_fast=1e6))[0] == 0


@pytest.mark.parametrize(("cfg", "high"), [(FLASH, 25), (TINY, yarn_range(TINY)[1])])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_frequencies(cfg, high, ratio):
    got = frequencies(cfg, ratio)
    assert got.dtype == np.float32 and got.shape == (cfg.qk_rope_head_dim // 2,)
    assert np.allclose(got, oracle(cfg, ratio, high), rtol=3e-6)


def test_ratios_one_and_two_share_a_table():
    assert np.array_equal(frequencies(FLASH, 1), frequencies(FLASH, 2))
    assert frequencies(FLASH, 0)[0] == frequencies(FLASH, 1)[0] == 1  # no mscale either
    slow = frequencies(FLASH, 1)[25:] * 16 * 160000 ** (np.arange(50, 64, 2) / 64)
    assert np.allclose(slow, 1, rtol=1e-5)


@pytest.mark.parametrize("ratio", [0, 2])
def test_angles_are_float32_products(ratio):
    position = np.array([[0, 1, 127, 128], [4095, 65_535, 100_000, 1_048_575]])
    got = angles(FLASH, ratio, jnp.asarray(position, jnp.int32))
    angle = position.astype(np.float32)[..., None] * frequencies(FLASH, ratio)
    assert got.cos.shape == (2, 4, 32) and got.cos.dtype == jnp.float32
    for value, function in ((got.cos, np.cos), (got.sin, np.sin)):
        assert np.abs(np.asarray(value) - function(angle.astype(np.float64))).max() < 2e-6
    assert np.array_equal(got.cos[0, 0], np.ones(32))
