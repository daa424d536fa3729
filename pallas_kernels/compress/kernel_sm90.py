"""Compress-and-store on Hopper: pooling, norm, RoPE, rounding and the stores into pages and rings,
two launches a layer around the projection of the index keys (ARCHITECTURE sections 5, 6.1 and 4.7).

The launches write the caches where they lie: inside a program that owns them (donated arguments)
nothing is copied. Rows that may not be stored are computed and change no stored byte.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.compress import encode_ptx, rows_ptx
from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Pairs, Window
from pallas_kernels.compress.store_shape import (
    KEY,
    KEYS,
    LATENT,
    LATENTS,
    ROPE,
    THREADS,
    WINDOW,
    WINDOW_WORDS,
    Job,
)
from pallas_kernels.quant.storage import KeyRows, LatentRows, StoredRows, WindowRows

Packed = TypeVar("Packed", bound=StoredRows)


def program(jobs: Sequence[Job], operand: int = 0, block: str = "") -> list[str]:
    """Operands, from number ``operand`` on: each job's in the order of ``names``, then the block's
    number if no register ``block`` has it.
    """
    block = block or f"${operand + sum(len(job.names) for job in jobs)}"
    lines, first = [rows_ptx.REGISTERS, ".reg .b32 blk;", f"mov.b32 blk, {block};"], 0
    for i, job in enumerate(jobs):
        at = {name: f"${operand + j}" for j, name in enumerate(job.names)}
        if i + 1 < len(jobs):
            lines.append(f"setp.ge.u32 p, blk, {first + job.blocks}; @p bra NEXT{i};")
        lines += rows_ptx.place(job, at, first)
        lines += rows_ptx.load(job, at)
        lines += rows_ptx.norm(job, at)
        lines += rows_ptx.emit(job, at)
        lines += rows_ptx.rotate(job, at, f"PLAIN{i}")
        lines += encode_ptx.store(job, at)
        lines.append("bra END;" if i + 1 < len(jobs) else "END:")
        if i + 1 < len(jobs):
            lines.append(f"NEXT{i}:")
        operand, first = operand + len(job.names), first + job.blocks
    return lines


@lru_cache(maxsize=64)
def launcher(jobs: tuple[Job, ...]) -> Callable:
    """The operands of ``program``, the stored planes as references, to a tuple of ``out`` of the
    last job, an operand no longer, if there is one.
    """
    operands = sum(len(job.names) for job in jobs)
    body = inline_ptx.block(program(jobs), gmem=operands, smem=0, scalars=1)

    def compress_store(*refs):
        body(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        compress_store,
        out_type=out_type(jobs),
        grid=(sum(job.blocks for job in jobs),),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def out_type(jobs: tuple[Job, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    assert not any("out" in job.names for job in jobs[:-1])
    last = jobs[-1]
    if "out" not in last.names:
        return ()
    latents = last.kind == LATENTS
    shape = (last.rows, LATENT if latents else WINDOW_WORDS)
    return (jax.ShapeDtypeStruct(shape, jnp.bfloat16 if latents else jnp.int32),)


def store_latents(
    chunk: Chunk, paged: Paged, job: Latents, *, eps: float
) -> tuple[Array, StoredRows]:
    """Normed latents bf16 [B, G, 512] before RoPE, which the index keys are projected from, and the
    pool with those of groups that close in the chunk, rotated and rounded to FP4 (FQ16).

    Equal to ``ref.store_latents`` but for the order of the norm's sum and, at ratio 2, the last
    bits of the gates. A latent of a group that is not live has no meaning. ``ValueError`` for other
    widths or dtypes than those of ``store``.
    """
    words = _packed("pool", job.pool, LatentRows).words
    source, (units, unit, _) = job.source, words.shape
    inputs = (source.u, source.g) if isinstance(source, Pairs) else (source.x,)
    requests, places, _ = inputs[0].shape
    shape = Job(
        LATENTS, requests, places, units, unit, paged.page_table.shape[1], source.ratio, eps
    )
    for name, x in zip("ug" if isinstance(source, Pairs) else "x", inputs, strict=True):
        _check(name, x, (requests, places, LATENT), _dtype(source.ratio))
    if isinstance(source, Pairs):
        inputs = (*inputs, source.before_u, source.before_g)
        for name, x in zip(("before_u", "before_g"), inputs[2:], strict=True):
            _check(name, x, (requests, LATENT), jnp.float32)
    _check("pool", words, (units, unit, 72), jnp.int32)
    if shape.rows == 0:
        return jnp.zeros((requests, shape.groups, LATENT), jnp.bfloat16), job.pool
    pool = jax.new_ref(words)
    common = _common(shape, chunk, job.weight, job.cos, job.sin)
    (latent,) = launcher((shape,))(*common, *inputs, *_paged(shape, paged), pool)
    return latent.reshape(requests, shape.groups, LATENT), LatentRows(jax.freeze(pool))


def store_rows(
    chunk: Chunk, *, window: Window, paged: Paged | None = None, keys: Keys | None = None,
    eps: float,
) -> tuple[WindowRows | None, StoredRows, Array, StoredRows | None]:  # fmt: skip
    """The chunk's window rows (AQ32) [B, T] if ``window.emit``, the rings with them, the tags, and
    the pool of index keys with the chunk's (FQ32), which need ``paged``; a layer that owns no
    global rows has no keys.

    Equal to ``ref.store_window`` and ``ref.store_keys`` but for the order of the norm's sum. A row
    that is not live has no meaning in the first result. ``ValueError`` for other widths or dtypes
    than those of ``store``.
    """
    lead = (*window.x.shape[:2], WINDOW_WORDS)
    if 0 in lead:
        rows = WindowRows(jnp.zeros(lead, jnp.int32)) if window.emit else None
        return rows, window.ring, window.tags, None if keys is None else keys.pool
    jobs, operands, refs = row_jobs(chunk, window, paged, keys, eps)
    out = launcher(jobs)(*operands)
    return WindowRows(out[0].reshape(lead)) if window.emit else None, *stored(refs)


def row_jobs(
    chunk: Chunk, window: Window, paged: Paged | None, keys: Keys | None, eps: float
) -> tuple[tuple[Job, ...], list, list]:
    """What ``store_rows`` launches, its operands and, of these, the planes that it writes."""
    ring_rows = _packed("ring", window.ring, WindowRows).words
    requests, places, _ = window.x.shape
    slots, size = window.tags.shape
    shape = Job(WINDOW, requests, places, slots, size, eps=eps, emit=window.emit)
    _check("x", window.x, (requests, places, LATENT), jnp.bfloat16)
    _check("ring", ring_rows, (slots, size, WINDOW_WORDS), jnp.int32)
    _check("tags", window.tags, (slots, size), jnp.int32)
    _check("slot", window.slot, (requests,), jnp.int32)
    refs = [jax.new_ref(plane) for plane in (ring_rows, window.tags)]
    common = _common(shape, chunk, window.weight, window.cos, window.sin)
    jobs, operands = (shape,), [*common, window.x, window.slot, *refs]
    if keys is not None:
        assert paged is not None
        job, key_refs, own = _keys(chunk, paged, keys, eps)
        jobs, operands, refs = (job, shape), [*own, *key_refs, *operands], [*refs, *key_refs]
    return jobs, operands, refs


def stored(refs: list) -> tuple[WindowRows, Array, KeyRows | None]:
    """The planes of ``row_jobs``, written: rings, tags and the pool of keys."""
    ring, tags, *planes = [jax.freeze(ref) for ref in refs]
    return WindowRows(ring), tags, KeyRows(*planes) if planes else None


def _keys(chunk: Chunk, paged: Paged, keys: Keys, eps: float) -> tuple[Job, list, list[Array]]:
    """Their job, the planes it writes and its other operands."""
    pool = _packed("pool", keys.pool, KeyRows)
    requests, (units, unit, _) = keys.x.shape[0], pool.codes.shape
    job = Job(KEYS, requests, keys.places, units, unit, paged.page_table.shape[1], keys.ratio, eps)
    _check("x", keys.x, (requests, job.groups, KEY), jnp.bfloat16)
    _check("codes", pool.codes, (units, unit, KEY // 8), jnp.int32)
    _check("scales", pool.scales, (units, unit, KEY // 128), jnp.int32)
    common = _common(job, chunk, keys.weight, keys.cos, keys.sin)
    refs = [jax.new_ref(plane) for plane in (pool.codes, pool.scales)]
    return job, refs, [*common, keys.x, *_paged(job, paged)]


def _packed(name: str, rows: StoredRows, kind: type[Packed]) -> Packed:
    if not isinstance(rows, kind):
        raise ValueError(f"compress: {name} of {type(rows).__name__} must be {kind.__name__}")
    return rows


def _dtype(ratio: int) -> jnp.dtype:
    return jnp.float32 if ratio == 2 else jnp.bfloat16


def _check(name: str, x: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"compress: {name} {x.dtype}{x.shape} must be {jnp.dtype(dtype)}{shape}")


def _common(job: Job, chunk: Chunk, weight: Array, cos: Array, sin: Array) -> list[Array]:
    for name, x in (("start", chunk.start), ("length", chunk.length)):
        _check(name, x, (job.requests,), jnp.int32)
    _check("weight", weight, (job.width,), jnp.bfloat16)
    for name, x in (("cos", cos), ("sin", sin)):
        _check(name, x, (job.requests, job.groups, ROPE // 2), jnp.float32)
    return [chunk.start, chunk.length, weight, cos, sin]


def _paged(job: Job, paged: Paged) -> list[Array]:
    _check("write_from", paged.write_from, (job.requests,), jnp.int32)
    _check("page_table", paged.page_table, (job.requests, job.pages), jnp.int32)
    return [paged.write_from, paged.page_table]
