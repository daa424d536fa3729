"""Kernels of ``moe_experts`` on Hopper, FP4 weights dequantised in registers (ARCHITECTURE section
8).

Decode: one launch makes a plan (which experts run on which rows) and the token images
(``decode_arrange``), a persistent one does both projections of every touched expert and of the
shared one (``decode_kernel``), XLA sums a row's experts, or the next launch does
(``decode_addends``). Prefill: XLA sorts the pairs by expert, one launch gathers the rows, one a
projection multiplies (``prefill_kernel``); XLA runs the shared expert and sums.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.addends import Addends
from pallas_kernels.moe_experts import decode_plan as dp
from pallas_kernels.moe_experts import prefill_kernel as pk
from pallas_kernels.moe_experts import prefill_plan as pp
from pallas_kernels.moe_experts import prefill_shape, ref
from pallas_kernels.moe_experts.decode_arrange import arrange
from pallas_kernels.moe_experts.decode_kernel import launcher
from pallas_kernels.moe_experts.decode_shape import Part, Shape, Tuning, tuned
from pallas_kernels.moe_experts.prefill_shape import Product
from pallas_kernels.moe_experts.repack import TILE_BLOCKS, PackedExperts
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import dequantized

MOST_PARTS, MOST_ROWS = 24, 7  # that ``mhc_site`` adds, and of how many rows


def moe_experts_decode(
    x: Array,
    ids: Array,
    weights: Array,
    packed: PackedExperts,
    *,
    experts: int,
    width: int,
    limit: float,
    numerics: Numerics,
    shared: bool = True,
    blocks: int = 132,
    tuning: Tuning | None = None,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    """``op.build``'s contract for few rows on an sm_90 GPU, with the weights of ``repack.pack``.

    x bf16 [R, D], ids int32 [R, k], different within a row (one outside 0 .. E - 1 reaches no
    expert), weights f32 [R, k]; ``experts`` E and ``width`` F of the packed stack, ``blocks`` the
    GPU's multiprocessors. Returns [R, D] of ``out_dtype``, by default bf16. Rows that reach no
    expert may hold NaN and change no other row. A row's result has the same bits whatever the other
    rows, within up to 8 rows and above, as long as ``tuning`` is the same. Without ``shared`` the
    shared expert adds nothing; its weights are read all the same.

    Serving numerics round SwiGLU outputs to bf16 and nothing else. Reference numerics round
    activations, gates and expert outputs as the reference does, in two launches. float32 numerics:
    ``ValueError``.
    """
    _check_arguments(x, ids, weights, numerics)
    if len(x) == 0:
        return x.astype(out_dtype or jnp.bfloat16)
    s = _shape(x, ids, packed, experts, width, limit, blocks, tuning)
    rounded = numerics.round_activations
    if rounded:
        x = dp.round_activations(x)
    args = arrange(s, shared)(ids.reshape(-1), weights.reshape(-1), x)
    if rounded:
        t = launcher(s, (True, False), True)(*args, packed)
        y, shared_y = launcher(s, (False, True), True)(*args, *_round_t(s, *t), packed)
    else:
        y, shared_y = launcher(s, (True, True), False)(*args, packed)
    return dp.combine(y, shared_y, ids, experts, rounded).astype(out_dtype or jnp.bfloat16)


def decode_addends(
    x: Array,
    ids: Array,
    weights: Array,
    packed: PackedExperts,
    *,
    experts: int,
    width: int,
    limit: float,
    numerics: Numerics,
    shared: bool = True,
    blocks: int = 132,
    tuning: Tuning | None = None,
) -> Addends | None:
    """``moe_experts_decode`` of up to ``MOST_ROWS`` rows as the sums that it adds: the K splits of
    a row's experts, slot by slot, then those of the shared one. A slot that reaches no expert adds
    some expert's output times 0. None where these are more than ``MOST_PARTS``, for more rows or
    none and for numerics that round between sums.
    """
    _check_arguments(x, ids, weights, numerics)
    if not 0 < len(x) <= MOST_ROWS or numerics.round_activations:
        return None
    s = _shape(x, ids, packed, experts, width, limit, blocks, tuning)
    if s.sums > MOST_PARTS:
        return None
    s = replace(s, joint=True)
    args = arrange(s, shared)(ids.reshape(-1), weights.reshape(-1), x)
    return Addends(launcher(s, (True, True), False)(*args, packed).reshape(s.sums, *x.shape))


def _shape(
    x: Array,
    ids: Array,
    packed: PackedExperts,
    experts: int,
    width: int,
    limit: float,
    blocks: int,
    tuning: Tuning | None,
) -> Shape:
    (rows, d), k = x.shape, ids.shape[1]
    tuning = tuning or tuned(rows, experts, width)
    s = Shape(rows, k, experts, d, width, limit, blocks, tuning)
    parts = {"up": s.up, "down": s.down, "shared_up": s.up8, "shared_down": s.down8}
    _check_weights(packed, experts, parts)
    return s


def _check_arguments(x: Array, ids: Array, weights: Array, numerics: Numerics) -> None:
    if x.dtype != jnp.bfloat16 or numerics.dtype != jnp.bfloat16:
        raise ValueError(f"{x.dtype=} and {numerics.name=} must be of bfloat16")
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"{ids.shape=} and {weights.shape=} must be [{x.shape[0]}, k]")


def _check_weights(packed: PackedExperts, experts: int, parts: dict[str, Part | Product]) -> None:
    for name, part in parts.items():
        stack = 1 if name.startswith("shared") else experts
        want = (stack * part.tiles * part.depth, TILE_BLOCKS * part.chunk.rows, 64)
        shape = getattr(packed, name).shape
        if shape != want:
            raise ValueError(f"packed {name} {shape=} must be {want} for {experts=} of these sizes")


def _round_t(s: Shape, *images: Array) -> list[Array]:
    """SwiGLU outputs through the FP8 rounding of activations."""
    out = []
    for words, part in zip(images, (s.down, s.down8), strict=True):
        t = dp.from_image(words, part.chunk.bk, part.tokens, s.f)
        out.append(dp.image(dp.round_activations(t), part.chunk.bk))
    return out


def moe_experts_prefill(
    x: Array,
    ids: Array,
    weights: Array,
    packed: PackedExperts,
    shared: ExpertWeights | None,
    *,
    experts: int,
    width: int,
    limit: float,
    numerics: Numerics,
    blocks: int = 132,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    """As ``moe_experts_decode``, for many rows; ``shared`` is the shared expert as released, or
    None: it adds nothing then.

    Any number of rows may reach one expert, experts that none reaches cost nothing. Expert outputs
    are rounded to bf16. A row's result has the same bits whatever the other rows.
    """
    rows, d = x.shape
    _check_arguments(x, ids, weights, numerics)
    if rows == 0:
        return x.astype(out_dtype or jnp.bfloat16)
    s = prefill_shape.Shape(rows, ids.shape[1], experts, d, width, limit, blocks)
    _check_weights(packed, experts, {"up": s.product(down=False), "down": s.product(down=True)})
    plan = pp.make_plan(ids, weights, s)
    rounded = numerics.round_activations
    routed = dp.round_activations(x) if rounded else x
    tokens = pk.gather(routed, plan.rows, s)
    t = pk.product(s, False, rounded)(plan.items, tokens, packed.up, plan.weights)
    if rounded:
        t = _round_image(s, t)
    y = pk.product(s, True, rounded)(plan.items, t, packed.down)
    if shared is None:
        both = pp.combine(y, jnp.zeros_like(x), plan.places)
    else:
        own = shared_expert(x, shared, limit=limit, numerics=numerics)
        both = pp.combine(y, own, plan.places)
    return both.astype(out_dtype or jnp.bfloat16)


def shared_expert(x: Array, w: ExpertWeights, *, limit: float, numerics: Numerics) -> Array:
    """What the shared expert gives rows x bf16 [R, D], in XLA."""
    if numerics.round_activations:
        return ref.expert(x, w, None, limit=limit, numerics=numerics)
    w1, w3, w2 = (dequantized(m, jnp.bfloat16) for m in (w.w1, w.w3, w.w2))
    dot = partial(jnp.einsum, "tk,nk->tn", preferred_element_type=jnp.float32)
    up = jnp.clip(dot(x, w3), -limit, limit)
    t = (jax.nn.silu(jnp.minimum(dot(x, w1), limit)) * up).astype(jnp.bfloat16)
    return jnp.einsum("tk,nk->tn", t, w2)


def _round_image(s: prefill_shape.Shape, words: Array) -> Array:
    bk = s.product(down=True).chunk.bk
    t = pp.from_image(words, bk, s.groups, s.f)
    return pp.image(dp.round_activations(t), bk)
