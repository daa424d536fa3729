"""Single-pass manifold-constrained hyper-connections over S residual streams (ARCHITECTURE section
7).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from pallas_kernels.addends import Addends, whole
from pallas_kernels.chosen import row_count, takes
from pallas_kernels.dispatch import choose
from pallas_kernels.mhc import ref
from pallas_kernels.norm import rms_norm


def build_coefficients(kernels: str) -> Callable:
    """coefficients(h [..., S, D], fn f32 [(2+S)S, S*D], base f32 [(2+S)S], scale f32 [3], *, iters,
    eps, norm_eps)

    -> pre f32 [..., S], post f32 [..., S], comb f32 [..., S, S]; comb is doubly stochastic after
    ``iters`` Sinkhorn iterations that end on the columns. Always float32, whatever the dtype of h.
    ``mosaic``: four bf16 streams, S*D a multiple of 4096, else ``ValueError``; ``auto`` takes the
    reference for others.
    """
    chosen = _coefficients_where_fit if kernels == "auto" else _coefficients
    kinds = {"reference": ref.coefficients, "mosaic": chosen}
    return choose("mhc_coefficients", kernels, kinds)


def build_collapse(kernels: str) -> Callable:
    """collapse(h [..., S, D], pre f32 [..., S]) -> sum_i pre_i h_i in h's dtype [..., D], one
    rounding.
    """
    return choose("mhc_collapse", kernels, {"reference": ref.collapse})


def build_expand(kernels: str) -> Callable:
    """expand(h [..., S, D], y [..., D], post f32 [..., S], comb f32 [..., S, S]) -> [..., S, D].

    Stream j is post_j y + sum_i comb[i, j] h_i: the first index of comb is the source stream. One
    rounding. Here and below y may be ``Addends``.
    """
    return choose("mhc_expand", kernels, {"reference": _expand})


def build_expand_collapse_norm(kernels: str) -> Callable:
    """expand_collapse_norm(h [..., S, D], y [..., D], post f32 [..., S], comb f32 [..., S, S],
    pre f32 [..., S], weight [D], *, norm_eps) -> streams [..., S, D], normed [..., D]

    The expansion of one sublayer, its collapse by ``pre`` and that one's RMSNorm, each rounded to
    h's dtype. ``mosaic``: four bf16 streams, bf16 weight, D a multiple of 8 up to 6144, else
    ``ValueError``; ``auto`` takes the reference for others.
    """
    chosen = _expand_collapse_norm_where_fit if kernels == "auto" else _expand_collapse_norm
    kinds = {"reference": _reference, "mosaic": chosen}
    return choose("mhc_expand_collapse_norm", kernels, kinds)


def build_site(kernels: str) -> Callable:
    """site(h, y, post, comb, pre, weight, fn, base, scale, *, norm_eps, iters, eps, mix_eps) ->
    streams [..., S, D], normed [..., D], (pre, post, comb)

    ``expand_collapse_norm``, then ``coefficients`` of its streams by the parameters of the next
    sublayer, whose norm's eps is ``mix_eps``. Without a sublayer before it, y, post and comb are
    None and the streams stay what they are. ``mosaic``: what both take; one launch for up to
    seven rows, for more or for other widths those of the two. ``auto`` on an sm_90 GPU takes the
    launch for the rows of ``chosen``.
    """
    chosen = _site_where_faster if kernels == "auto" else _site
    return choose("mhc_site", kernels, {"reference": _site_reference, "mosaic": chosen})


def _expand(h: Array, y: Array | Addends, post: Array, comb: Array) -> Array:
    return ref.expand(h, whole(y, h), post, comb)


def _reference(
    h: Array, y: Array | Addends, post: Array, comb: Array, pre: Array, weight: Array, *,
    norm_eps: float,
) -> tuple[Array, Array]:  # fmt: skip
    y = whole(y, h)
    return ref.expand_collapse_norm(h, y, post, comb, pre, weight, norm_eps=norm_eps)


def _four_bf16(h: Array) -> bool:
    return h.dtype == jnp.bfloat16 and h.shape[-2] == 4


def _coefficients(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    from pallas_kernels.mhc import kernel_sm90

    return kernel_sm90.coefficients(h, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)


def _coefficients_where_fit(
    h: Array, fn: Array, base: Array, scale: Array, *, iters: int, eps: float, norm_eps: float
) -> tuple[Array, Array, Array]:
    fits = _four_bf16(h) and h.shape[-2] * h.shape[-1] % 4096 == 0
    run = _coefficients if fits else ref.coefficients
    return run(h, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)


def _expand_collapse_norm(
    h: Array, y: Array | Addends, post: Array, comb: Array, pre: Array, weight: Array, *,
    norm_eps: float,
) -> tuple[Array, Array]:  # fmt: skip
    from pallas_kernels.mhc import kernel_sm90

    y = whole(y, h)
    return kernel_sm90.expand_collapse_norm(h, y, post, comb, pre, weight, norm_eps=norm_eps)


def _expand_collapse_norm_where_fit(
    h: Array, y: Array | Addends, post: Array, comb: Array, pre: Array, weight: Array, *,
    norm_eps: float,
) -> tuple[Array, Array]:  # fmt: skip
    from pallas_kernels.columns import COLUMNS, MAX_WIDTH

    y = whole(y, h)
    width, dtypes = h.shape[-1], {y.dtype, weight.dtype}
    fit = _four_bf16(h) and dtypes == {h.dtype} and width % COLUMNS == 0 and width <= MAX_WIDTH
    run = _expand_collapse_norm if fit else ref.expand_collapse_norm
    return run(h, y, post, comb, pre, weight, norm_eps=norm_eps)


def _in_two(pass_over: Callable, mix: Callable) -> Callable:
    """``site`` by the two operations that it is made of."""

    def site(
        h: Array, y: Array | Addends | None, post: Array | None, comb: Array | None, pre: Array,
        weight: Array, fn: Array, base: Array, scale: Array, *,
        norm_eps: float, iters: int, eps: float, mix_eps: float,
    ) -> tuple[Array, Array, tuple[Array, Array, Array]]:  # fmt: skip
        if y is None:
            x = rms_norm(ref.collapse(h, pre), weight, norm_eps)
        else:
            h, x = pass_over(h, y, post, comb, pre, weight, norm_eps=norm_eps)
        return h, x, mix(h, fn, base, scale, iters=iters, eps=eps, norm_eps=mix_eps)

    return site


_site_reference = _in_two(_reference, ref.coefficients)


def _site(
    h: Array, y: Array | Addends | None, post: Array | None, comb: Array | None, pre: Array,
    weight: Array, fn: Array, base: Array, scale: Array, *,
    norm_eps: float, iters: int, eps: float, mix_eps: float,
) -> tuple[Array, Array, tuple[Array, Array, Array]]:  # fmt: skip
    from pallas_kernels.mhc import kernel_sm90

    fits = not kernel_sm90.site_unfit(h, y)
    run = kernel_sm90.site if fits else _in_two(_expand_collapse_norm, _coefficients)
    return run(
        h, y, post, comb, pre, weight, fn, base, scale,
        norm_eps=norm_eps, iters=iters, eps=eps, mix_eps=mix_eps,
    )  # fmt: skip


def _site_where_faster(
    h: Array, y: Array | Addends | None, post: Array | None, comb: Array | None, pre: Array,
    weight: Array, fn: Array, base: Array, scale: Array, *,
    norm_eps: float, iters: int, eps: float, mix_eps: float,
) -> tuple[Array, Array, tuple[Array, Array, Array]]:  # fmt: skip
    from pallas_kernels.mhc import kernel_sm90

    run = _in_two(_expand_collapse_norm_where_fit, _coefficients_where_fit)
    if takes("mhc_site", row_count(h, 2)) and weight.dtype == h.dtype:
        run = run if kernel_sm90.site_unfit(h, y) else kernel_sm90.site
    return run(
        h, y, post, comb, pre, weight, fn, base, scale,
        norm_eps=norm_eps, iters=iters, eps=eps, mix_eps=mix_eps,
    )  # fmt: skip
