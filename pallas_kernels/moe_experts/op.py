"""``moe_experts``: routed experts, SwiGLU, combine and the shared expert (ARCHITECTURE section 8,
steps 4 and 5).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.addends import Addends
from pallas_kernels.dispatch import choose
from pallas_kernels.moe_experts import ref
from pallas_kernels.moe_experts.repack import PackedExperts, packed_count
from pallas_kernels.moe_experts.weights import ExpertWeights
from pallas_kernels.numerics import Numerics

DECODE_ROWS = 128  # more rows run the prefill kernel


def build(kernels: str) -> Callable:
    """moe_experts(x [R, D], ids int32 [R, k], weights f32 [R, k], experts, shared, *, limit,
    numerics, out_dtype=None, parts=False) -> [R, D] of ``out_dtype``, by default
    ``numerics.dtype``; float32 keeps what a sum over ranks would else round twice.

    experts: ``ExpertWeights`` stacked [E, ...] (``Fp4Rows``) or, for the Mosaic kernels, what
    ``repack.pack`` makes of them; shared: one ``ExpertWeights`` (``Fp8Blocks``), of width 0 where
    it shall add nothing. Unpacked ones may be plain arrays. gate and up are clamped (up on both
    sides, gate above), the routing weight multiplies before w2, expert outputs are rounded to
    ``numerics.dtype`` (not those of up to 128 rows in serving numerics on Mosaic) and summed in
    float32, the shared expert is added unweighted. An id of -1 reaches no expert; such a row gets
    the shared expert alone. The valid ids of a row must differ. With ``jax_enable_checks`` an id
    that is neither -1 nor below E raises ``ValueError``. With ``parts`` and no ``out_dtype`` the
    result may be ``Addends`` f32 [P, R, D] whose sum rounds as the result would, but for the order
    in which it adds.

    ``auto`` on an sm_90 GPU runs packed weights through Mosaic and others through the reference; a
    kind asked for by name raises ``ValueError`` on weights that are not its own.
    """
    run = choose("moe_experts", kernels, {"reference": _reference, "mosaic": _mosaic})
    by_weights = kernels == "auto" and run is _mosaic

    def moe_experts(
        x: Array,
        ids: Array,
        weights: Array,
        experts: ExpertWeights | PackedExperts,
        shared: ExpertWeights,
        *,
        limit: float,
        numerics: Numerics,
        out_dtype: jnp.dtype | None = None,
        parts: bool = False,
    ) -> Array | Addends:
        packed = isinstance(experts, PackedExperts)
        if jax.config.jax_enable_checks:
            jax.debug.callback(_check_ids, ids, expert_count(experts, x.shape[-1]))
        chosen = _reference if by_weights and not packed else run
        options = {"limit": limit, "numerics": numerics, "out_dtype": out_dtype}
        if chosen is _mosaic:
            options["parts"] = parts
        return chosen(x, ids, weights, experts, shared, **options)

    return moe_experts


def expert_count(experts: ExpertWeights | PackedExperts, d: int) -> int:
    """How many experts of hidden size D the stack holds."""
    packed = isinstance(experts, PackedExperts)
    return packed_count(experts, d) if packed else experts.w1.shape[0]


def _check_ids(ids: np.ndarray, count: int) -> None:
    wrong = ids[(ids < -1) | (ids >= count)]
    if wrong.size:
        raise ValueError(f"expert id {wrong[0]} must be -1 or in 0..{count - 1}")


def _reference(
    x: Array,
    ids: Array,
    weights: Array,
    experts: ExpertWeights,
    shared: ExpertWeights,
    *,
    limit: float,
    numerics: Numerics,
    out_dtype: jnp.dtype | None,
) -> Array:
    if not isinstance(experts, ExpertWeights):
        raise ValueError(f"{type(experts).__name__} of 'reference' moe_experts must be unpacked")
    return ref.moe_experts(
        x, ids, weights, experts, shared, limit=limit, numerics=numerics, out_dtype=out_dtype
    )


def _mosaic(
    x: Array,
    ids: Array,
    weights: Array,
    experts: PackedExperts,
    shared: ExpertWeights,
    *,
    limit: float,
    numerics: Numerics,
    out_dtype: jnp.dtype | None,
    parts: bool,
) -> Array | Addends:
    from pallas_kernels.moe_experts import kernel_sm90

    if not isinstance(experts, PackedExperts):
        raise ValueError(f"{type(experts).__name__} of 'mosaic' moe_experts must be packed")
    count, present = packed_count(experts, x.shape[-1]), shared.w1.shape[0] > 0
    if count == 0:
        y = kernel_sm90.shared_expert(x, shared, limit=limit, numerics=numerics)
        return y if out_dtype is None else y.astype(out_dtype)
    options = {"experts": count, "width": experts.width, "limit": limit, "numerics": numerics}
    if parts and out_dtype is None:
        sums = kernel_sm90.decode_addends(x, ids, weights, experts, shared=present, **options)
        if sums is not None:
            return sums
    options["out_dtype"] = out_dtype
    if x.shape[0] <= DECODE_ROWS:
        return kernel_sm90.moe_experts_decode(x, ids, weights, experts, shared=present, **options)
    return kernel_sm90.moe_experts_prefill(
        x, ids, weights, experts, shared if present else None, **options
    )
