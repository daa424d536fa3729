"""RoPE frequencies with YaRN and the angles of positions (ARCHITECTURE 4.1)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.config import Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Angles:
    """cos and sin, float32 [..., Rd/2]."""

    cos: Array
    sin: Array


def frequencies(cfg: Config, ratio: int) -> np.ndarray:
    """float32 [Rd/2]. Ratio 0: ``rope_theta`` plain; otherwise ``compress_rope_theta`` with YaRN,
    without any mscale.
    """
    dim = cfg.qk_rope_head_dim
    theta = np.float32(cfg.compress_rope_theta if ratio else cfg.rope_theta)
    base = np.float32(1) / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    if not ratio:
        return base
    low, high = yarn_range(cfg)
    ramp = np.clip(
        (np.arange(dim // 2, dtype=np.float32) - low) / np.float32(max(high - low, 1e-3)), 0, 1
    )
    return (base / np.float32(cfg.rope_factor) * ramp + base * (1 - ramp)).astype(np.float32)


def yarn_range(cfg: Config) -> tuple[int, int]:
    """First and last frequency index of YaRN's ramp; (15, 25) in the release."""
    dim, theta = cfg.qk_rope_head_dim, cfg.compress_rope_theta

    def index(rotations: float) -> float:
        return (
            dim
            * math.log(cfg.rope_original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    return max(math.floor(index(cfg.rope_beta_fast)), 0), min(
        math.ceil(index(cfg.rope_beta_slow)), dim - 1
    )


def angles(cfg: Config, ratio: int, position: Array) -> Angles:
    """Angles of int32 positions [...] in a layer of this compression ratio; the product is
    float32.
    """
    angle = position.astype(jnp.float32)[..., None] * frequencies(cfg, ratio)
    return Angles(jnp.cos(angle), jnp.sin(angle))
