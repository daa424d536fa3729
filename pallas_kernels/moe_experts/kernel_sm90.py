"""Decode kernel of ``moe_experts`` on Hopper: FP4 experts streamed once, at memory bandwidth
(ARCHITECTURE section 8).

XLA builds a plan (which experts run on which rows) and the token images, one persistent launch does
both projections of every touched expert and of the shared one (``decode_kernel``), XLA sums a row's
experts.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts.decode_kernel import launcher
from pallas_kernels.moe_experts.decode_shape import Shape, Tuning, tuned
from pallas_kernels.moe_experts.repack import TILE_BLOCKS, DecodeWeights
from pallas_kernels.numerics import Numerics


def moe_experts_decode(
    x: Array,
    ids: Array,
    weights: Array,
    packed: DecodeWeights,
    *,
    experts: int,
    width: int,
    limit: float,
    numerics: Numerics,
    blocks: int = 132,
    tuning: Tuning | None = None,
) -> Array:
    """``op.build``'s contract for few rows on an sm_90 GPU, with the weights of ``repack.pack``.

    x bf16 [R, D], ids int32 [R, k], different within a row (one outside 0 .. E - 1 reaches no
    expert), weights f32 [R, k]; ``experts`` E and ``width`` F of the packed stack, ``blocks`` the
    GPU's multiprocessors. Returns bf16 [R, D]. Rows that reach no expert may hold NaN and change no
    other row. A row's result has the same bits whatever the other rows, within up to 8 rows and
    above, as long as ``tuning`` is the same.

    Serving numerics round SwiGLU outputs to bf16 and nothing else. Reference numerics round
    activations, gates and expert outputs as the reference does, in two launches. float32 numerics:
    ``ValueError``.
    """
    rows, d = x.shape
    if x.dtype != jnp.bfloat16 or numerics.dtype != jnp.bfloat16:
        raise ValueError(f"{x.dtype=} and {numerics.name=} must be of bfloat16")
    if ids.shape != weights.shape or ids.shape[0] != rows:
        raise ValueError(f"{ids.shape=} and {weights.shape=} must be [{rows}, k]")
    if rows == 0:
        return x
    tuning = tuning or tuned(rows, experts, width)
    s = Shape(rows, ids.shape[1], experts, d, width, limit, blocks, tuning)
    _check_weights(s, packed)
    plan = dp.make_plan(ids, weights, experts)
    rounded = numerics.round_activations
    if rounded:
        x = dp.round_activations(x)
    routed_x = dp.image(dp.token_tiles(x, plan, s.k), s.up.chunk.bk)
    shared_x = dp.image(dp.shared_tiles(x, s.shared_tokens), s.up8.chunk.bk)
    args = s.plan.flatten(plan, rows), routed_x, shared_x
    if rounded:
        t = launcher(s, (True, False), True)(*args, packed)
        y, shared_y = launcher(s, (False, True), True)(*args, *_round_t(s, *t), packed)
    else:
        y, shared_y = launcher(s, (True, True), False)(*args, packed)
    return dp.combine(y, shared_y, ids, experts, rounded)


def _check_weights(s: Shape, packed: DecodeWeights) -> None:
    parts = {"up": s.up, "down": s.down, "shared_up": s.up8, "shared_down": s.down8}
    for name, part in parts.items():
        stack = 1 if part.shared else s.experts
        want = (stack * part.tiles * part.depth, TILE_BLOCKS * part.chunk.rows, 64)
        shape = getattr(packed, name).shape
        if shape != want:
            raise ValueError(
                f"packed {name} {shape=} must be {want} for {s.experts=}, {s.d=}, {s.f=}"
            )


def _round_t(s: Shape, *images: Array) -> list[Array]:
    """SwiGLU outputs through the FP8 rounding of activations."""
    out = []
    for words, part in zip(images, (s.down, s.down8), strict=True):
        t = dp.from_image(words, part.chunk.bk, part.tokens, s.f)
        out.append(dp.image(dp.round_activations(t), part.chunk.bk))
    return out
