"""``compress``: pooled latents, and a chunk's rows normed, rotated, rounded and stored where they
belong (ARCHITECTURE 4.3, 4.7, sections 5 and 6.1); ``store.py`` says what the arguments hold.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array

from pallas_kernels.chosen import row_count, takes
from pallas_kernels.compress import ref
from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Pairs, Window
from pallas_kernels.compress.store_shape import KEY, LATENT, ROPE
from pallas_kernels.dispatch import choose
from pallas_kernels.linear import op as linear
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant import Packed
from pallas_kernels.quant.storage import KeyRows, LatentRows, StoredRows, WindowRows

F32 = jnp.float32


def build_latents(kernels: str) -> Callable:
    """store_latents(chunk, paged, job: ``Latents``, *, eps) -> latents [B, G, K] normed before
    RoPE, which the index keys are projected from, and the pool with those of groups that close in
    the chunk.

    Per channel of a group of two: softmax of g over its tokens, weighted sum of u, one rounding;
    then RMSNorm. Of a group that is not live the latent has no meaning. ``mosaic``: latents of 512
    of which 64 rotate, packed, bf16 weights, u and g float32 or x bf16, else ``ValueError``;
    ``auto`` takes the reference for others. It writes the pool where it lies.
    """
    chosen = _latents_where_fit if kernels == "auto" else _latents
    return choose("store_latents", kernels, {"reference": ref.store_latents, "mosaic": chosen})


def build_rows(kernels: str) -> Callable:
    """store_rows(chunk, *, window, paged=None, keys=None, eps) -> the chunk's window rows [B, T] if
    ``window.emit``, the rings with them, their tags, and the pool of index keys with the chunk's,
    which need ``paged``; None of keys for a layer that owns no global rows.

    ``mosaic``: as above, keys of 128; one launch for all.
    """
    chosen = _rows_where_fit if kernels == "auto" else _rows
    return choose("store_rows", kernels, {"reference": ref.store_rows, "mosaic": chosen})


def build_beside(kernels: str) -> Callable:
    """linears_beside_rows(x [..., K], norm [K], weights, chunk, *, window, paged=None, keys=None,
    eps, row_eps, numerics) -> results of ``linear.op.build_normed``'s operation, of ``store_rows``

    Neither needs the other, so ``mosaic`` has one launch for both where each has one of up to 128
    rows, ``window.emit`` is not set and activations are not rounded; elsewhere the two operations
    of these kernels.
    """
    run = partial(_beside, linear.build_normed(kernels), build_rows(kernels))
    one = partial(run, chosen=kernels == "auto")
    kinds = {"reference": partial(run, chosen=None), "mosaic": one}
    return choose("linears_beside_rows", kernels, kinds)


def _beside(
    linears: Callable,
    store: Callable,
    x: Array,
    norm: Array,
    weights: Sequence[Array | Packed],
    chunk: Chunk,
    *,
    window: Window,
    paged: Paged | None = None,
    keys: Keys | None = None,
    eps: float,
    row_eps: float,
    numerics: Numerics,
    chosen: bool | None,
) -> tuple[tuple[Array, ...], tuple]:
    """chosen: whether only the rows of ``chosen`` are taken in one launch; None for none."""
    jobs = {"window": window, "paged": paged, "keys": keys}
    if chosen is not None and _one_launch(x, norm, weights, numerics, window, keys, chosen):
        from pallas_kernels.compress import beside_sm90

        return beside_sm90.linears_beside_rows(
            x, norm, weights, chunk, **jobs, eps=eps, row_eps=row_eps, numerics=numerics
        )
    results = linears(x, norm, weights, eps=eps, numerics=numerics)
    return results, store(chunk, **jobs, eps=row_eps)


def _one_launch(
    x: Array,
    norm: Array,
    weights: Sequence[Array | Packed],
    numerics: Numerics,
    window: Window,
    keys: Keys | None,
    chosen: bool,
) -> bool:
    from pallas_kernels.compress import beside_sm90

    outputs = tuple(w.shape[0] for w in weights)
    taken = not chosen or takes("normed_linear", row_count(x), outputs, x.shape[-1])
    fits = not beside_sm90.unfit(x, norm, weights, numerics, window)
    return taken and fits and _rows_fit(window, keys)


def _latents(chunk: Chunk, paged: Paged, job: Latents, *, eps: float) -> tuple[Array, StoredRows]:
    from pallas_kernels.compress import kernel_sm90

    return kernel_sm90.store_latents(chunk, paged, job, eps=eps)


def _latents_where_fit(
    chunk: Chunk, paged: Paged, job: Latents, *, eps: float
) -> tuple[Array, StoredRows]:
    source = job.source
    x, dtype = (source.u, F32) if isinstance(source, Pairs) else (source.x, jnp.bfloat16)
    fit = isinstance(job.pool, LatentRows) and x.dtype == dtype and _fits(job, x, LATENT)
    run = _latents if fit else ref.store_latents
    return run(chunk, paged, job, eps=eps)


def _rows(
    chunk: Chunk, *, window: Window, paged: Paged | None = None, keys: Keys | None = None,
    eps: float,
) -> tuple[StoredRows | None, StoredRows, Array, StoredRows | None]:  # fmt: skip
    from pallas_kernels.compress import kernel_sm90

    return kernel_sm90.store_rows(chunk, window=window, paged=paged, keys=keys, eps=eps)


def _rows_where_fit(
    chunk: Chunk, *, window: Window, paged: Paged | None = None, keys: Keys | None = None,
    eps: float,
) -> tuple[StoredRows | None, StoredRows, Array, StoredRows | None]:  # fmt: skip
    run = _rows if _rows_fit(window, keys) else ref.store_rows
    return run(chunk, window=window, paged=paged, keys=keys, eps=eps)


def _rows_fit(window: Window, keys: Keys | None) -> bool:
    fit = isinstance(window.ring, WindowRows) and _fits(window, window.x, LATENT)
    fit = fit and window.x.dtype == jnp.bfloat16
    if keys is not None:
        fit = fit and isinstance(keys.pool, KeyRows) and _fits(keys, keys.x, KEY)
    return fit


def _fits(job: Latents | Keys | Window, x: Array, width: int) -> bool:
    rotated = 2 * job.cos.shape[-1]
    return x.shape[-1] == width and rotated == ROPE and job.weight.dtype == jnp.bfloat16
