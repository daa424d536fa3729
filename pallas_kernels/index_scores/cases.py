"""Cases of ``index_scores``: shapes shared by tests and ``pallas_kernels.bench``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.check import Check, Program, exact, ones, rows_alone, same, take
from pallas_kernels.check.bounds import SCORE_BF16_ULPS
from pallas_kernels.index_scores import ref
from pallas_kernels.index_scores.op import build
from pallas_kernels.numerics import SERVING
from pallas_kernels.paging import take_entries
from pallas_kernels.quant import Fp4Rows
from pallas_kernels.quant.storage import KeyRows

COLD_BYTES = 200_000_000  # keys taken in turn, several times the L2
KEY_BYTES = 68


@dataclass(frozen=True)
class Case:
    """requests B of rows T over ``pages`` pages of ``page`` entries; the last row sees ``visible``
    entries. candidates: block ids a row, 0 for a layer without them.
    """

    requests: int
    rows: int
    pages: int
    visible: int
    candidates: int = 0
    page: int = 64
    heads: int = 32
    width: int = 128
    block_size: int = 8

    def __str__(self) -> str:
        return (
            f"requests={self.requests},rows={self.rows},visible={self.visible},"
            f"candidates={self.candidates}"
        )


CASES = (
    *(
        Case(requests, 1, context // 64, context, candidates)
        for requests in (1, 32)
        for context in (8192, 131072, 524288, 1048576)
        for candidates in (0, 2048)
    ),
    *(Case(requests, 6, 2048, 131072, c) for requests in (1, 32) for c in (0, 2048)),
    Case(1, 512, 512, 32768),
    Case(1, 128, 512, 32768, 2048),
)
_small = {"heads": 4, "width": 32, "page": 8, "block_size": 4}
CORNERS = (
    Case(1, 1, 1, 0, **_small),
    Case(1, 1, 1, 1, **_small),
    Case(2, 3, 3, 17, **_small),
    Case(2, 3, 3, 24, 5, **_small),
    Case(2, 2, 2, 11, 2, heads=4, width=32, page=7, block_size=4),
    Case(1, 2, 2, 100, 3),
)
CHECKED = (
    *CASES,
    *(Case(8, rows, 16, 1000) for rows in (1, 2, 3, 4, 5, 6)),
    *(Case(2, 1, -(-visible // 64), visible) for visible in (512, 513, 16384, 16392)),
    Case(2, 1, 257, 16392, 2048),
    Case(8, 1, 16, 1000, 300),
    Case(2, 6, 512, 32768, 2048),
    Case(7, 1, 33, 1056, page=32),
    Case(1, 40, 32, 2048),
)
COMPARED = 4  # requests


def xla_path(
    q: Array,
    weights: Array,
    pool: KeyRows,
    table: Array,
    visible: Array,
    candidates: Array | None,
    *,
    block_size: int,
) -> Array:
    """Plain XLA without [T, H, N] dots in memory: a loop over 4096 entries of every request; of
    candidates, their scores alone.
    """
    b, t, *_ = q.shape
    if candidates is None:
        entries = table.shape[1] * pool.codes.shape[1]
        positions = jnp.broadcast_to(jnp.arange(entries), (b, 1, entries))
        group = q, weights
    else:
        inside = jnp.arange(block_size)
        positions = (candidates[..., None] * block_size + inside).reshape(b, t, -1)
        group = (x.reshape(b * t, 1, *x.shape[2:]) for x in (q, weights))
    q, weights = group
    step = min(4096, positions.shape[-1])

    def chunk(at: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(positions, at, step, axis=2)
        rows = take_entries(pool, table, jnp.maximum(part, 0).reshape(b, -1))
        keys = rows.decode(jnp.bfloat16).reshape(-1, step, q.shape[-1])
        dots = jnp.einsum("gthk,gnk->gthn", q, keys, preferred_element_type=jnp.float32)
        products = jax.nn.relu(dots.astype(jnp.bfloat16)) * weights[..., None]
        scores = jnp.sum(products.astype(jnp.float32), axis=2).astype(jnp.bfloat16)
        seen = (part >= 0) & (part < visible[..., None])
        return jnp.where(seen, scores.astype(jnp.float32).reshape(b, t, step), -jnp.inf)

    parts = jax.lax.map(chunk, jnp.arange(0, positions.shape[-1], step))
    return jnp.moveaxis(parts, 0, 2).reshape(b, t, -1)


@lru_cache(maxsize=1)
def _pool(pages: int, page: int, width: int, seed: int) -> KeyRows:
    """Random codes, scales near 1."""

    @jax.jit
    def make(key: Array) -> KeyRows:
        a, b = jax.random.split(key)
        codes = jax.random.bits(a, (pages, page, width // 8), jnp.uint32)
        scales = jax.random.randint(b, (pages, page, width // 32, 1), 124, 129)
        shifts = 8 * jnp.arange(width // 32)[:, None]
        words = jnp.sum(scales << shifts, axis=2)
        return KeyRows(jax.lax.bitcast_convert_type(codes, jnp.int32), words)

    return make(jax.random.key(seed))


def inputs(case: Case, seed: int) -> tuple:
    """q, weights, pool, tables (several, over different pages), visible, candidates."""
    pages = case.requests * case.pages
    sets = max(1, min(32, COLD_BYTES // (KEY_BYTES * case.page * pages)))
    q, weights, *rest = _queries(case, sets, seed)
    return q, weights, _pool(sets * pages, case.page, case.width, seed), *rest


@partial(jax.jit, static_argnums=(0, 1, 2))
def _queries(case: Case, sets: int, seed: int) -> tuple:
    pages = case.requests * case.pages
    keys = jax.random.split(jax.random.key(seed + 1), 4)
    order = jax.random.permutation(keys[0], sets * pages).astype(jnp.int32)
    tables = tuple(order.reshape(sets, case.requests, case.pages))
    lead = case.requests, case.rows
    q = jax.random.normal(keys[1], (*lead, case.heads, case.width), jnp.float32)
    q = Fp4Rows.quantize(q).dequantize(jnp.bfloat16)
    weights = jax.random.normal(keys[2], (*lead, case.heads), jnp.bfloat16) / 64
    visible = jnp.maximum(case.visible - jnp.arange(case.rows)[::-1], 0)
    visible = jnp.broadcast_to(visible, lead).astype(jnp.int32)
    candidates = None
    if case.candidates:
        blocks = case.visible // case.block_size
        count = min(case.candidates, blocks)
        order = jax.random.uniform(keys[3], (*lead, blocks)).argsort(-1)[..., :count]
        missing = ((0, 0), (0, 0), (0, case.candidates - count))
        candidates = jnp.pad(jnp.sort(order).astype(jnp.int32), missing, constant_values=-1)
    return q, weights, tables, visible, candidates


def problem(case: Case, impl: str, seed: int) -> Problem:
    q, weights, pool, tables, visible, candidates = inputs(case, seed)
    if impl == "pallas":
        from pallas_kernels.index_scores import kernel_sm90

        kernel = kernel_sm90.index_scores if candidates is None else kernel_sm90.candidate_scores
        run = partial(kernel, block_size=case.block_size, numerics=SERVING)
    else:
        run = partial(xla_path, block_size=case.block_size)

    def call(i: int, carry: Array, data: tuple) -> Array:
        q, weights, pool, tables, visible, candidates = data
        # A score is no infinity: each execution waits for the one before it.
        visible = jnp.where(carry[..., 0] == jnp.inf, 0, visible)
        return run(q, weights, pool, tables[i % len(tables)], visible, candidates)

    rows = case.requests * case.rows
    scored = rows * (8 * case.candidates if case.candidates else case.visible)
    read = scored if case.candidates else case.requests * case.visible
    outputs = 8 * case.candidates or case.pages * case.page
    return Problem(
        call=call,
        carry=jnp.zeros((case.requests, case.rows, outputs), jnp.float32),
        data=(q, weights, pool, tables, visible, candidates),
        nbytes=float(KEY_BYTES * read + 4 * rows * outputs),
        flops=2.0 * case.heads * case.width * scored,
        executions={"pallas": 8 if scored > 1 << 22 else 32, "xla": 2}[impl],
    )


@jax.jit
def _bf16_steps(got: Array, want: Array) -> Array:
    """The largest distance of two bf16 values (as float32) in steps of their grid, infinite where
    one alone is -inf or NaN.
    """

    def order(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) >> 16
        return jnp.where(bits < 0, -(bits & 0x7FFF), bits)

    steps = jnp.abs(order(got) - order(want)).astype(jnp.float32)
    odd = ~jnp.isfinite(got) | ~jnp.isfinite(want) | (got != got.astype(jnp.bfloat16))
    return jnp.max(jnp.where(odd, jnp.where(got == want, 0, jnp.inf), steps), initial=0)


def _arguments(case: Case, seed: int) -> list:
    """As ``inputs``, of one table, with requests of many lengths."""
    q, weights, pool, tables, _, candidates = inputs(case, seed)
    odd = [n for n in (case.visible, 0, 1, 511, 512, 513, 16384, 16392) if n <= case.visible]
    longest = np.resize(np.array(odd), case.requests)[:, None]
    visible = np.maximum(longest - np.arange(case.rows)[::-1], 0)
    return [q, weights, pool, tables[0], jnp.asarray(visible, jnp.int32), candidates]


@jax.jit
def _poisoned(pool: KeyRows, table: Array, visible: Array) -> KeyRows:
    """All bits set in entries that no row of a request sees."""
    entry = jnp.arange(table.shape[1] * pool.codes.shape[1]).reshape(table.shape[1], -1)
    seen = entry < jnp.max(visible, axis=1)[:, None, None]
    used = jnp.zeros(pool.codes.shape[:2], bool).at[table].set(seen)
    return jax.tree.map(lambda plane: jnp.where(used[..., None], plane, ones(plane)), pool)


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """``COMPARED`` requests are compared with the reference."""
    options = {"block_size": case.block_size, "numerics": SERVING}
    arguments = q, weights, pool, table, visible, _ = _arguments(case, seed)
    program = Program(partial(run or build("mosaic"), **options), *arguments)
    got = program(*arguments)
    rng = np.random.default_rng(seed)
    some = rng.permutation(case.requests)[:COMPARED]
    some[0] = 0
    few = [a if a is pool else take(a, some) for a in arguments]
    want = exact(partial(ref.index_scores, **options))(*few)
    steps = float(_bf16_steps(take(got, some), want))
    yield Check("drawn requests, bf16 steps", steps, SCORE_BF16_ULPS)
    del want
    yield same("another run", program(*arguments), got)
    bad = _poisoned(pool, table, visible)
    yield same("entries nobody sees poisoned", program(q, weights, bad, *arguments[3:]), got)
    del bad
    rows = case.requests * case.rows

    def hide(live: Array) -> tuple:
        at = live.reshape(case.requests, case.rows)
        hidden = jnp.where(at[..., None, None], q, ones(q)), jnp.where(at[..., None], weights, 0)
        return *hidden, *arguments[2:]

    def flat(*arguments: object) -> Array:
        return program(*arguments).reshape(rows, -1)

    yield from rows_alone(flat, hide, rows, got.reshape(rows, -1), rng)
    order = rng.permutation(case.requests)
    mixed = [a if a is pool else take(a, order) for a in arguments]
    yield same("requests in another order", program(*mixed), take(got, order))
