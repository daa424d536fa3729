"""``index_scores`` on Hopper: FP4 keys stream once through registers into the matrix units
(ARCHITECTURE 6.4).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import inline_ptx
from pallas_kernels.index_scores.scores_ptx import program
from pallas_kernels.index_scores.scores_shape import HEADS, TILE, WIDTH, Scores
from pallas_kernels.numerics import Numerics
from pallas_kernels.paging import entries_per_page
from pallas_kernels.quant.storage import KeyRows, StoredRows

BLOCK_SIZE = 8
SMS = 132
SETTINGS = {1: (4, 3), 2: (3, 3), 3: (3, 3), 4: (3, 2)}  # warpgroups, depth by query rows


@lru_cache(maxsize=64)
def launcher(s: Scores) -> Callable:
    """(q, weights, codes, scales, table, visible, candidates) -> f32 scores, all flat but pools."""
    body = inline_ptx.block(program(s), gmem=8, smem=1, scalars=2)

    def index_scores(*refs):
        *gmem, out, smem = refs
        body(*gmem, out, smem, lax.axis_index("unit"), lax.axis_index("split"))

    return plgpu.kernel(
        index_scores,
        out_type=jax.ShapeDtypeStruct((s.requests, s.rows, s.outputs), jnp.float32),
        grid=(s.requests * s.row_tiles, s.splits),
        grid_names=("unit", "split"),
        num_threads=s.warpgroups,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((s.words,), jnp.int32),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def tuned(
    requests: int, rows: int, pages: int, page: int, pool_pages: int, *, blocks: int = 0
) -> Scores:
    """The measured setting of a shape; with candidates every row is a request of its own."""
    sharing = rows if blocks else 1
    requests, rows = requests * sharing, rows // sharing
    warpgroups, depth = SETTINGS.get(rows, (2, 3)) if not blocks else (4, 2)
    shape = Scores(requests, rows, pages, page, pool_pages, blocks, sharing)
    tiles = -(-shape.outputs // TILE)
    splits = max(1, min(SMS // (requests * shape.row_tiles), -(-tiles // warpgroups)))
    return replace(shape, splits=splits, warpgroups=warpgroups, depth=depth)


def supports(
    q: Array, pool: StoredRows, candidates: Array | None, block_size: int, numerics: Numerics
) -> str:
    """Why the kernel cannot take these arguments, or nothing."""
    *_, heads, width = q.shape
    if numerics.dtype != jnp.bfloat16 or q.dtype != jnp.bfloat16:
        return f"{numerics.name=} and {q.dtype=} must be of bfloat16"
    if (heads, width) != (HEADS, WIDTH):
        return f"{heads=} and {width=} must be {HEADS} and {WIDTH}"
    if not isinstance(pool, KeyRows) or pool.codes.dtype != jnp.int32:
        return f"pool of {type(pool).__name__} must be KeyRows of int32 words"
    page = entries_per_page(pool)
    if page < 8 or page & (page - 1):
        return f"{page=} entries must be a power of two and at least 8"
    if candidates is not None and block_size != BLOCK_SIZE:
        return f"{block_size=} must be {BLOCK_SIZE}"
    return ""


def index_scores(
    q: Array,
    weights: Array,
    pool: StoredRows,
    page_table: Array,
    visible: Array,
    candidates: Array | None,
    *,
    block_size: int,
    numerics: Numerics,
) -> Array:
    """``op.build``'s contract on an sm_90 GPU, for bf16 numerics, 32 heads of 128, pages of a power
    of two of at least 8 entries, and candidate blocks of 8; else ``ValueError``.

    Key scale bytes may be at most ``scores_shape.MAX_SCALE_BYTE`` (2^33). A page id outside the
    pool hides its entries: they score -inf.
    """
    if candidates is None:
        return _launch(q, weights, pool, page_table, visible, None, block_size, numerics)
    scores = candidate_scores(
        q, weights, pool, page_table, visible, candidates, block_size=block_size, numerics=numerics
    )
    entries = page_table.shape[1] * entries_per_page(pool)
    rows = visible.size
    blocks = jnp.full((rows, entries // block_size, block_size), -jnp.inf)
    ids = candidates.reshape(rows, -1)
    index = jnp.arange(rows)[:, None], jnp.where(ids < 0, blocks.shape[1], ids)
    blocks = blocks.at[index].set(scores.reshape(rows, -1, block_size), mode="drop")
    return blocks.reshape(*visible.shape, entries)


def candidate_scores(
    q: Array,
    weights: Array,
    pool: StoredRows,
    page_table: Array,
    visible: Array,
    candidates: Array,
    *,
    block_size: int,
    numerics: Numerics,
) -> Array:
    """f32 [B, T, C * block_size]: scores of the entries of each row's candidate blocks alone, in
    their order, -inf for a block of -1 and for entries >= visible. ``ValueError`` as above.
    """
    return _launch(q, weights, pool, page_table, visible, candidates, block_size, numerics)


def _launch(
    q: Array,
    weights: Array,
    pool: StoredRows,
    page_table: Array,
    visible: Array,
    candidates: Array | None,
    block_size: int,
    numerics: Numerics,
) -> Array:
    if fault := supports(q, pool, candidates, block_size, numerics):
        raise ValueError(f"index_scores: {fault}")
    assert isinstance(pool, KeyRows)
    b, t = visible.shape
    pages, page = pool.codes.shape[:2]
    blocks = 0 if candidates is None else candidates.shape[-1]
    s = tuned(b, t, page_table.shape[1], page, pages, blocks=blocks)
    lead = s.requests, s.rows
    among = page_table if candidates is None else candidates.reshape(s.requests, blocks)
    scores = launcher(s)(
        q.reshape(*lead, HEADS, WIDTH),
        weights.astype(jnp.bfloat16).reshape(*lead, HEADS),
        pool.codes,
        pool.scales,
        page_table.astype(jnp.int32),
        visible.astype(jnp.int32).reshape(lead),
        among.astype(jnp.int32),
    )
    return scores.reshape(b, t, s.outputs)
