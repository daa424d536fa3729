"""``sparse_attention`` on Hopper: one launch, which gathers and dequantises FP8 and FP4 rows once a
query row (ARCHITECTURE 4.5).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.numerics import Numerics
from pallas_kernels.quant.storage import LatentRows, StoredRows, WindowRows
from pallas_kernels.sparse_attention import seesaw_ptx
from pallas_kernels.sparse_attention.ahead import pieces
from pallas_kernels.sparse_attention.attend_ptx import arrays, program
from pallas_kernels.sparse_attention.attend_shape import (
    ROPE,
    THREADS,
    WIDTH,
    Attend,
    Seesaw,
    seesaw,
)

HEADS = (8, 16, 32, 64)
# Most rows, blocks of a cluster that share a row's list, clusters that share its heads: what runs
# at once, measured. Of 132 multiprocessors in unequal groups, 7 clusters of 16 blocks do, 15 of 8
# and 30 of 4. A cluster's outputs meet at 14 bytes a clock and multiprocessor: fewer heads each.
SHARED = ((1, 16, 4), (3, 16, 2), (7, 8, 2), (15, 8, 1), (30, 4, 1), (64, 2, 1))


@lru_cache(maxsize=64)
def launcher(s: Attend) -> Callable:
    """The inputs in the order of ``arrays``, queries [R * groups, heads, 512], to bf16 as those."""
    lines = seesaw_ptx.program(s) if isinstance(s, Seesaw) else program(s)
    body = inline_ptx.block(lines, gmem=len(arrays(s)), smem=1, scalars=2)

    def sparse_attention(*refs):
        body(*refs, lax.axis_index("row"), lax.axis_index("split"))

    return plgpu.kernel(
        sparse_attention,
        out_type=jax.ShapeDtypeStruct((s.rows * s.groups, s.heads, WIDTH), jnp.bfloat16),
        grid=(s.grid,),
        grid_names=("row",),
        cluster=(s.splits,),
        cluster_names=("split",),
        num_threads=THREADS // 128,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def shared(rows: int, slots: int, heads: int) -> tuple[int, int]:
    """Blocks that share a row's list, each with 32 slots or more, and clusters that share its
    heads, each with 8 or more and no fewer than its blocks.
    """
    splits, groups = next((rest for most, *rest in SHARED if rows <= most), (1, 1))
    splits = min(splits, heads)
    while splits > 1 and slots < 32 * splits:
        splits //= 2
    while groups > 1 and heads < max(8, splits) * groups:
        groups //= 2
    return splits, groups


def supports(
    q: Array, window: StoredRows, pool: StoredRows | None, window_size: int, numerics: Numerics
) -> str:
    """Why the kernel cannot take these arguments, or nothing."""
    *_, heads, width = q.shape
    if numerics.dtype != jnp.bfloat16 or q.dtype != jnp.bfloat16 or numerics.blockwise_softmax:
        return f"{numerics.name=} and {q.dtype=} must be serving and bfloat16"
    if heads not in HEADS or width != WIDTH:
        return f"{heads=} must be one of {HEADS} and {width=} must be {WIDTH}"
    if window_size < 8 or window_size % 8:
        return f"{window_size=} must be a positive multiple of 8"
    if not isinstance(window, WindowRows) or not isinstance(pool, LatentRows | None):
        return "window and pool must be packed rows"
    return ""


def sparse_attention(
    q: Array,
    cos: Array,
    sin: Array,
    window: StoredRows,
    written: Array,
    position: Array,
    floor: Array,
    pool: StoredRows | None,
    page_table: Array,
    selected: Array | None,
    sink: Array,
    *,
    window_size: int,
    numerics: Numerics,
) -> Array:
    """``op.build``'s contract on an sm_90 GPU, for serving numerics, heads of 512 dims of which 64
    rotate, 8, 16, 32 or 64 of them; else ``ValueError``.

    Window scale bytes may be at most ``attend_shape.MAX_SCALE_BYTE`` (2^55). A page id outside the
    pool and an entry outside the table hide their row. A row has the same bits whatever the others,
    as long as their number is in the same range of ``SHARED``.
    """
    return _launch(
        q, cos, sin, window, written.astype(jnp.int32), position, floor, floor, pool, page_table,
        selected, sink, window_size, numerics,
    )  # fmt: skip


def ring_attention(
    q: Array,
    cos: Array,
    sin: Array,
    ring: StoredRows,
    tags: Array,
    slot: Array,
    position: Array,
    floor: Array,
    pool: StoredRows | None,
    page_table: Array,
    selected: Array | None,
    sink: Array,
    *,
    window_size: int,
    numerics: Numerics,
    ahead: Sequence[Array] = (),
) -> Array:
    """``sparse_attention`` with its window read where it is stored, the query rows' own included.

    ring: rows [S, size] at position % size, tags int32 [S, size] their positions, slot int32 [B]
    the ring of each request, one outside 0 .. S - 1 has no window. size >= window_size - 1 + T.
    ahead: where several blocks share a list, they ask for ``ahead.pieces`` of these into L2.
    """
    return _launch(
        q, cos, sin, ring, tags, position, floor, slot, pool, page_table, selected, sink,
        window_size, numerics, ring=True, ahead=ahead,
    )  # fmt: skip


def _launch(
    q: Array, cos: Array, sin: Array, window: StoredRows, written: Array, position: Array,
    floor: Array, owners: Array, pool: StoredRows | None, page_table: Array,
    selected: Array | None, sink: Array, window_size: int, numerics: Numerics, *,
    ring: bool = False, ahead: Sequence[Array] = (),
) -> Array:  # fmt: skip
    if fault := supports(q, window, pool, window_size, numerics):
        raise ValueError(f"sparse_attention: {fault}")
    assert isinstance(window, WindowRows)
    b, t, heads, width = q.shape
    if 2 * cos.shape[-1] != ROPE:
        raise ValueError(f"sparse_attention: {cos.shape=} must end in {ROPE // 2}")
    if b * t == 0:
        return q
    if pool is None or selected is None:
        latents, pages, count = window.words, 1, 0
        pool_pages, page, chosen = 1, 1, position
    else:
        assert isinstance(pool, LatentRows)
        latents, pages, count = pool.words, page_table.shape[1], selected.shape[-1]
        (pool_pages, page), chosen = latents.shape[:2], selected
    splits, groups = shared(b * t, window_size + count, heads)
    counts = zip(ahead, pieces(ahead), strict=True)
    asked = [(array, n) for array, n in counts if n and splits > 1]
    s = Attend(
        b * t,
        t,
        heads // groups,
        window_size,
        count,
        pages,
        page,
        pool_pages,
        splits,
        groups=groups,
        ahead=tuple(n for _, n in asked),
    ).in_tiles()
    if not s.fits:
        raise ValueError(f"sparse_attention: {window_size=} + {count=} must fit shared memory")
    if ring:
        s = replace(s, owners=window.words.shape[0], ring=window.words.shape[1])
    out = launcher(seesaw(s) or s)(
        q.reshape(b * t * groups, heads // groups, width),
        cos.astype(jnp.float32).reshape(b * t, ROPE // 2),
        sin.astype(jnp.float32).reshape(b * t, ROPE // 2),
        window.words,
        written,
        position.astype(jnp.int32),
        floor.astype(jnp.int32),
        owners.astype(jnp.int32),
        latents,
        page_table.astype(jnp.int32),
        chosen.astype(jnp.int32),
        sink.astype(jnp.float32),
        *[array for array, _ in asked],
    )
    return out.reshape(q.shape)
