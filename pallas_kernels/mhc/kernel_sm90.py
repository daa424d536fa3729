"""Hyper-connections on Hopper: the fused pass over the streams, and the coefficients with their
Sinkhorn iterations (ARCHITECTURE section 7).
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.addends import Addends
from pallas_kernels.columns import MAX_WIDTH
from pallas_kernels.mhc import (
    broad_ptx,
    broad_shape,
    coefficients_ptx,
    fused_ptx,
    planes_ptx,
    products_ptx,
    site_ptx,
    split_ptx,
)
from pallas_kernels.mhc.broad_shape import SMS, Broad
from pallas_kernels.mhc.fused_ptx import STREAMS, Fused
from pallas_kernels.mhc.site_ptx import Site
from pallas_kernels.mhc.split_ptx import Split

F32, BF16 = jnp.float32, jnp.bfloat16
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


@lru_cache(maxsize=64)
def fused_launcher(s: Fused) -> Callable:
    """(h, y, post, comb, pre, weight) to streams bf16 [R, 4, D] and normed bf16 [R, D]."""
    body = inline_ptx.block(fused_ptx.program(s), gmem=8, smem=1, scalars=1)

    def mhc_expand_collapse_norm(*refs):
        body(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        mhc_expand_collapse_norm,
        out_type=(
            jax.ShapeDtypeStruct((s.rows, STREAMS, s.width), BF16),
            jax.ShapeDtypeStruct((s.rows, s.width), BF16),
        ),
        grid=(s.grid,),
        grid_names=("block",),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=64)
def site_launcher(s: Site) -> Callable:
    """(h, y, post, comb, pre, weight, fn, base, scale) to streams bf16 [R, 4, D], normed bf16
    [R, D], pre f32 [R, 4], post f32 [R, 4] and comb f32 [R, 16].
    """
    body = inline_ptx.block(site_ptx.program(s), gmem=14, smem=1, scalars=2)

    def mhc_site(*refs):
        body(*refs, lax.axis_index("row"), lax.axis_index("part"))

    return plgpu.kernel(
        mhc_site,
        out_type=(
            jax.ShapeDtypeStruct((s.rows, STREAMS, s.width), BF16),
            jax.ShapeDtypeStruct((s.rows, s.width), BF16),
            *(jax.ShapeDtypeStruct((s.rows, n), F32) for n in (4, 4, 16)),
        ),
        grid=(s.rows,),
        grid_names=("row",),
        cluster=(site_ptx.BLOCKS,),
        cluster_names=("part",),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )


@lru_cache(maxsize=64)
def broad_launcher(s: Broad) -> Callable:
    """(h, fn, base, scale) to pre f32 [R, 4], post f32 [R, 4] and comb f32 [R, 16]."""
    order = inline_ptx.block(planes_ptx.program(s), gmem=4, smem=0, scalars=1)
    add = inline_ptx.block(broad_ptx.program(s), gmem=3, smem=1, scalars=2)
    finish = inline_ptx.block(coefficients_ptx.program(s), gmem=6, smem=1, scalars=1)

    def mhc_planes(*refs):
        order(*refs, lax.axis_index("block"))

    def mhc_sums(*refs):
        add(*refs, lax.axis_index("tile"), lax.axis_index("part"))

    def mhc_coefficients(*refs):
        finish(*refs, lax.axis_index("block"))

    planes = plgpu.kernel(
        mhc_planes,
        out_type=jax.ShapeDtypeStruct((s.k * products_ptx.MIXES * 3,), BF16),
        grid=(planes_ptx.blocks(s),),
        grid_names=("block",),
        compiler_params=WARPGROUP,
    )
    sums = plgpu.kernel(
        mhc_sums,
        out_type=jax.ShapeDtypeStruct((s.parts, products_ptx.SUMS, s.padded), F32),
        grid=(s.blocks, s.parts),
        grid_names=("tile", "part"),
        num_threads=s.threads // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )
    coefficients = plgpu.kernel(
        mhc_coefficients,
        out_type=tuple(jax.ShapeDtypeStruct((s.rows, n), F32) for n in (4, 4, 16)),
        grid=(-(-s.rows // coefficients_ptx.ROWS),),
        grid_names=("block",),
        scratch_types=(plgpu.SMEM((coefficients_ptx.WORDS,), jnp.int32),),
        compiler_params=WARPGROUP,
    )
    return lambda h, fn, base, scale: coefficients(sums(h, planes(fn, base, scale)), base, scale)


@lru_cache(maxsize=64)
def split_launcher(s: Split) -> Callable:
    """(h, fn, base, scale) to pre f32 [R, 4], post f32 [R, 4] and comb f32 [R, 16]."""
    add = inline_ptx.block(split_ptx.sums_program(s), gmem=5, smem=1, scalars=2)
    finish = inline_ptx.block(split_ptx.coefficients_program(s), gmem=6, smem=1, scalars=1)

    def mhc_sums(*refs):
        add(*refs, lax.axis_index("tile"), lax.axis_index("part"))

    def mhc_coefficients(*refs):
        finish(*refs, lax.axis_index("row"))

    sums = plgpu.kernel(
        mhc_sums,
        out_type=jax.ShapeDtypeStruct((s.rows, s.parts, split_ptx.WORDS), F32),
        grid=(-(-s.rows // s.tile), s.parts),
        grid_names=("tile", "part"),
        num_threads=split_ptx.THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.sum_words,), jnp.int32),),
        compiler_params=WARPGROUP,
    )
    coefficients = plgpu.kernel(
        mhc_coefficients,
        out_type=tuple(jax.ShapeDtypeStruct((s.rows, n), F32) for n in (4, 4, 16)),
        grid=(s.rows,),
        grid_names=("row",),
        num_threads=split_ptx.THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((split_ptx.THREADS,), jnp.int32),),
        compiler_params=WARPGROUP,
    )
    return lambda h, fn, base, scale: coefficients(sums(h, fn, base, scale), base, scale)


# Most rows, 16-row tiles of a block.
SPLITS = ((16, 1), (32, 2), (128, 4))


def tuned(rows: int, k: int, *, iters: int, eps: float, norm_eps: float) -> Split | Broad:
    """Few rows: two launches, so that all blocks take ``fn`` from memory at once."""
    for most, tiles in SPLITS:
        if rows <= most:
            return Split(rows, k, tiles, iters, eps, norm_eps)
    return broad_shape.tuned(rows, k, iters=iters, eps=eps, norm_eps=norm_eps)


def mix(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    """pre f32 [R, 4], post f32 [R, 4], comb f32 [R, 16] of h [R, K]; unchecked: of ``scale`` the
    first three words are read.
    """
    s = tuned(*h.shape, iters=iters, eps=eps, norm_eps=norm_eps)
    launch = split_launcher(s) if isinstance(s, Split) else broad_launcher(s)
    return launch(h, fn, base, scale)


def _checked(h: Array, width: int, **arrays: tuple[Array, tuple[int, ...]]) -> None:
    if h.dtype != BF16 or h.shape[-2:] != (STREAMS, width):
        raise ValueError(f"{h.shape=} {h.dtype=} must be bfloat16 [..., {STREAMS}, {width}]")
    for name, (array, shape) in arrays.items():
        if array.shape != shape:
            raise ValueError(f"{name}: {array.shape=} must be {shape}")
        dtype = BF16 if name in ("y", "weight") else F32
        if array.dtype != dtype:
            raise ValueError(f"{name}: {array.dtype=} must be {jnp.dtype(dtype).name}")


def coefficients(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    """``op.build_coefficients``'s contract on an sm_90 GPU: h bf16 of four streams, S * D a
    multiple of 4096, parameters f32; else ``ValueError``.

    A row has the same bits whatever the other rows; and whatever their number, as long as it stays
    up to 128 or above: few rows are added in another order.
    """
    *lead, _, d = h.shape
    k = STREAMS * d
    mixes = products_ptx.MIXES
    _checked(h, d, fn=(fn, (mixes, k)), base=(base, (mixes,)), scale=(scale, (3,)))
    rows = h.size // k
    shapes = ((*lead, STREAMS), (*lead, STREAMS), (*lead, STREAMS, STREAMS))
    if rows == 0:
        pre, post, comb = (jnp.zeros(shape, F32) for shape in shapes)
        return pre, post, comb
    out = mix(h.reshape(rows, k), fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)
    pre, post, comb = (a.reshape(shape) for a, shape in zip(out, shapes, strict=True))
    return pre, post, comb


def expand_collapse_norm(
    h: Array, y: Array, post: Array, comb: Array, pre: Array, weight: Array, *, norm_eps: float
) -> tuple[Array, Array]:
    """``op.build_expand_collapse_norm``'s contract on an sm_90 GPU: h, y and weight bf16 of four
    streams, D a multiple of 8 up to 6144; else ``ValueError``.

    A row has the same bits whatever the other rows and their number.
    """
    *lead, _, d = h.shape
    mix = (*lead, STREAMS)
    _checked(
        h, d, y=(y, (*lead, d)), post=(post, mix), comb=(comb, (*mix, STREAMS)), pre=(pre, mix),
        weight=(weight, (d,)),
    )  # fmt: skip
    rows = h.size // (STREAMS * d)
    if rows == 0:
        return h, y
    s = Fused(rows, d, min(rows, SMS), norm_eps)
    streams, normed = fused_launcher(s)(
        h.reshape(rows, STREAMS, d),
        y.reshape(rows, d),
        post.reshape(rows, STREAMS),
        comb.reshape(rows, STREAMS * STREAMS),
        pre.reshape(rows, STREAMS),
        weight,
    )
    return streams.reshape(h.shape), normed.reshape(y.shape)


def site_unfit(h: Array, y: Array | Addends | None) -> str:
    """Why ``site`` refuses these operands; empty if it does not."""
    *lead, streams, d = h.shape
    if h.dtype != BF16 or streams != STREAMS or d % site_ptx.WIDTH or d > MAX_WIDTH:
        return (
            f"{h.shape=} {h.dtype=} must be four bfloat16 streams of 1024 n columns to {MAX_WIDTH}"
        )
    if not 0 < prod(lead) <= site_ptx.MAX_ROWS:
        return f"{h.shape=} must have 1 to {site_ptx.MAX_ROWS} rows"
    if isinstance(y, Addends):
        shape = (len(y.parts), *lead, d)
        fits = (
            y.parts.dtype == F32
            and y.parts.shape == shape
            and 0 < len(y.parts) <= products_ptx.MIXES
        )
        return "" if fits else f"{y.parts.shape=} must be float32 [P, ..., {d}], P 1 to 24"
    return "" if y is None or y.dtype == BF16 else f"{y.dtype=} must be bfloat16"


def site(
    h: Array, y: Array | Addends | None, post: Array | None, comb: Array | None, pre: Array,
    weight: Array, fn: Array, base: Array, scale: Array, *,
    norm_eps: float, iters: int, eps: float, mix_eps: float,
) -> tuple[Array, Array, tuple[Array, Array, Array]]:  # fmt: skip
    """``op.build_site``'s contract on an sm_90 GPU in one launch, for up to seven rows;
    ``ValueError`` for what ``site_unfit`` names.

    A row has the same bits whatever the other rows and their number; its streams are those of
    ``expand_collapse_norm``.
    """
    if why := site_unfit(h, y):
        raise ValueError(f"mhc_site: {why}")
    *lead, _, d = h.shape
    rows, mix, mixes = prod(lead), (*lead, STREAMS), products_ptx.MIXES
    stay = y is None
    if y is None or post is None or comb is None:
        y, post = jnp.zeros((*lead, d), BF16), jnp.zeros(mix, F32)
        comb = jnp.broadcast_to(jnp.eye(STREAMS, dtype=F32), (*mix, STREAMS))
    _checked(
        h, d, post=(post, mix), comb=(comb, (*mix, STREAMS)), pre=(pre, mix),
        weight=(weight, (d,)), fn=(fn, (mixes, STREAMS * d)), base=(base, (mixes,)),
        scale=(scale, (3,)),
    )  # fmt: skip
    parts = len(y.parts) if isinstance(y, Addends) else 0
    y = y.parts.reshape(parts, rows, d) if isinstance(y, Addends) else y.reshape(rows, d)
    s = Site(rows, d, parts, iters, eps, norm_eps, mix_eps)
    streams, normed, *mixed = site_launcher(s)(
        h.reshape(rows, STREAMS, d), y, post.reshape(rows, STREAMS),
        comb.reshape(rows, STREAMS * STREAMS), pre.reshape(rows, STREAMS), weight, fn, base, scale,
    )  # fmt: skip
    first, second, third = mixed
    mixed = first.reshape(mix), second.reshape(mix), third.reshape(*mix, STREAMS)
    return h if stay else streams.reshape(h.shape), normed.reshape(*lead, d), mixed
