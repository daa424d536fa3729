"""The three numeric modes (ARCHITECTURE section 17, decision 8)."""

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Numerics:
    """Where a computation rounds.

    dtype: of activations between operations and of unquantised weights. round_activations: FP8
    (AQ32) rounding in front of every FP8 or FP4 linear. round_cache: FP8 window rows, FP4 latents,
    FP4 index keys and queries. blockwise_softmax: probabilities rounded to bf16 relative to the
    running maximum of 64-slot blocks (4.5). cache: what ``round_cache`` rounds to: "fp4" as above;
    for comparisons "fp8", of latents and index keys and queries, too, or "bf16", of all three.
    """

    name: str
    dtype: jnp.dtype
    round_activations: bool
    round_cache: bool
    blockwise_softmax: bool
    cache: str = "fp4"

    @classmethod
    def named(cls, name: str) -> "Numerics":
        if name not in MODES:
            raise ValueError(f"numerics {name!r} must be one of {', '.join(MODES)}")
        return MODES[name]

    @property
    def packed_weights(self) -> bool:
        """Whether FP8 and FP4 weights stay packed; ``float32`` holds them dequantised."""
        return self.round_cache


FLOAT32 = Numerics("float32", jnp.dtype(jnp.float32), False, False, False)
REFERENCE = Numerics("reference", jnp.dtype(jnp.bfloat16), True, True, True)
SERVING = Numerics("serving", jnp.dtype(jnp.bfloat16), False, True, False)
MODES = {mode.name: mode for mode in (FLOAT32, REFERENCE, SERVING)}
