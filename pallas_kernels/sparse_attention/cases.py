"""Cases of ``sparse_attention``: shapes shared by tests and ``pallas_kernels.bench``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem, has_triton
from pallas_kernels.check import (
    DRAWN,
    Check,
    Program,
    aligned,
    exact,
    near,
    ones,
    rows_alone,
    same,
    take,
)
from pallas_kernels.check.bounds import ATTENTION_ANGLE, ATTENTION_REL
from pallas_kernels.dispatch import on_hopper
from pallas_kernels.numerics import SERVING
from pallas_kernels.paging import take_entries
from pallas_kernels.quant.storage import LatentRows, WindowRows, words_of
from pallas_kernels.rotate import rotate
from pallas_kernels.sparse_attention import ref

COLD_BYTES = 200_000_000  # rows taken in turn, several times the L2
LATENT_BYTES, WINDOW_BYTES = 288, 528
TILE = 512  # query rows that the XLA path attends at a time
WORDS = {"NaN": -1, "1e30": 0x7149F2CA}  # of rows that nobody sees
F32 = jnp.float32


@dataclass(frozen=True)
class Case:
    """requests B of rows T from position ``start``; a window of ``window`` rows and ``selected``
    global entries, of which ``chosen`` exist (the others are -1). selected 0: no global pool.
    """

    requests: int
    rows: int
    start: int
    selected: int = 512
    chosen: int = 512
    window: int = 128
    heads: int = 64
    width: int = 512
    rope: int = 64
    page: int = 64

    def __str__(self) -> str:
        name = (
            f"requests={self.requests},rows={self.rows},start={self.start},selected={self.selected}"
        )
        return name if self.heads == 64 else f"{name},heads={self.heads}"


CASES = (
    *(Case(requests, 1, 4096, selected) for requests in (1, 8, 32, 128) for selected in (0, 512)),
    Case(1, 6, 4096),
    Case(32, 6, 4096),
    Case(1, 128, 4096),
    Case(1, 2048, 4096),
    Case(1, 8192, 4096),
)
_small = {"window": 16, "heads": 4, "width": 32, "rope": 16, "page": 8}
CORNERS = (
    Case(1, 1, 0, 0, 0, **_small),
    Case(1, 1, 0, 8, 0, **_small),
    Case(2, 3, 5, 8, 3, **_small),
    Case(2, 7, 16, 8, 8, **_small),
    Case(1, 20, 14, 0, 0, **_small),
    Case(1, 2, 100, 48, 48, **_small),
    Case(1, 2, 100, 49, 49, **_small),
    Case(1, 2, 300, 130, 70, **_small),
)

CHECKED = (
    *CASES,
    *(Case(rows, 1, 4096, heads=heads) for heads in (8, 16, 32) for rows in (1, 128)),
    *(Case(1, 200, 4096, heads=heads) for heads in (8, 64)),
    Case(3, 1, 511, chosen=511),
    *(Case(3, 1, start) for start in (512, 513, 16383, 16391)),
    Case(3, 2, 1, 0),
    Case(2, 5, 130, 64, 60),
    Case(3, 2, 70, 60, 60, window=64, page=7),
)


@partial(jax.jit, static_argnums=(1,))
def _pool(key: Array, rows: int) -> Array:
    """Random latents, int32 [rows, 72]: random codes, scales near 2^-3."""
    a, b = jax.random.split(key)
    codes = jax.random.bits(a, (rows, 256), jnp.uint8)
    scales = jax.random.randint(b, (rows, 32), 0x18, 0x28).astype(jnp.uint8)
    return words_of(jnp.concatenate([codes, scales], axis=1))


@partial(jax.jit, static_argnums=(1,))
def _window(key: Array, lead: tuple[int, ...]) -> Array:
    return WindowRows.encode(jax.random.normal(key, (*lead, 512), F32)).words


def inputs(case: Case, seed: int) -> tuple:
    """The arguments of the op up to its sink; of window, pool table and selection several sets over
    different rows, as tuples.
    """
    b, t, size = case.requests, case.rows, case.window
    entries = case.start + t if case.selected else 0
    pages = max(1, -(-entries // case.page))
    cold = b * (case.selected * t * LATENT_BYTES + (size - 1 + t) * WINDOW_BYTES)
    sets = max(1, min(16, -(-COLD_BYTES // cold)))
    keys = jax.random.split(jax.random.key(seed), 5)
    position = jnp.broadcast_to(case.start + jnp.arange(t, dtype=jnp.int32), (b, t))
    angle = position[..., None] * 160000.0 ** (-jnp.arange(0, case.rope, 2) / case.rope)
    q = jax.random.normal(keys[0], (b, t, case.heads, case.width), jnp.bfloat16)
    stored = b, size - 1 + t
    windows = tuple(WindowRows(_window(k, stored)) for k in jax.random.split(keys[1], sets))
    pool, tables, chosen = None, (jnp.zeros((b, 1), jnp.int32),), (None,)
    if case.selected:
        pool_pages = b * pages * sets
        words = _pool(keys[2], pool_pages * case.page).reshape(pool_pages, case.page, -1)
        pool = LatentRows(words)
        order = jax.random.permutation(keys[3], pool_pages).astype(jnp.int32)
        tables = tuple(order.reshape(sets, b, pages))
        among = jax.random.uniform(keys[4], (b, t, case.start)).argsort(-1)
        picks = jnp.sort(among[..., : case.chosen]).astype(jnp.int32)
        missing = ((0, 0), (0, 0), (0, case.selected - case.chosen))
        chosen = (jnp.pad(picks, missing, constant_values=-1),)
    return (
        q, jnp.cos(angle), jnp.sin(angle), windows, jnp.ones(stored, bool), position,
        jnp.zeros(b, jnp.int32), pool, tables, chosen[0], jnp.zeros(case.heads, F32),
    )  # fmt: skip


def xla_path(
    q: Array, cos: Array, sin: Array, window: WindowRows, written: Array, position: Array,
    floor: Array, pool: LatentRows | None, table: Array, selected: Array | None, sink: Array,
    *, window_size: int,
) -> Array:  # fmt: skip
    """Plain XLA in bf16: rows gathered and dequantised, at most ``TILE`` query rows at a time."""
    b, t, h, k = q.shape
    q = rotate(q, cos[:, :, None], sin[:, :, None])
    step = min(t, TILE)
    decoded = window.decode(jnp.bfloat16)

    def tile(at: Array) -> Array:
        part = partial(jax.lax.dynamic_slice_in_dim, start_index=at, slice_size=step, axis=1)
        p = part(position)
        low = jnp.maximum(p - (window_size - 1), floor[:, None])
        column = jnp.arange(window_size) + low[..., None]
        index = jnp.clip(column - position[:, :1, None] + window_size - 1, 0, decoded.shape[1] - 1)
        batch = jnp.arange(b)[:, None, None]
        kv, valid = [decoded[batch, index]], [(column <= p[..., None]) & written[batch, index]]
        if pool is not None and selected is not None:
            picks = part(selected)
            rows = take_entries(pool, table, jnp.maximum(picks, 0))
            kv.append(rows.decode(jnp.bfloat16))
            valid.append(picks >= 0)
        rows, seen = jnp.concatenate(kv, axis=2), jnp.concatenate(valid, axis=2)
        scores = jnp.einsum("bthk,btlk->bthl", part(q), rows, preferred_element_type=F32)
        scores = jnp.where(seen[:, :, None], scores * k**-0.5, -jnp.inf)
        top = jnp.maximum(jnp.max(scores, axis=-1), sink)
        weights = jnp.exp(scores - top[..., None])
        total = jnp.sum(weights, axis=-1) + jnp.exp(sink - top)
        out = jnp.einsum(
            "bthl,btlk->bthk", weights.astype(jnp.bfloat16), rows, preferred_element_type=F32
        )
        return (out / total[..., None]).astype(jnp.bfloat16)

    parts = jax.lax.map(tile, jnp.arange(0, t, step))
    out = jnp.moveaxis(parts, 0, 1).reshape(b, t, h, k)
    return rotate(out, cos[:, :, None], sin[:, :, None], inverse=True)


TRITON = True  # a kernel to compare with


def problem(case: Case, impl: str, seed: int) -> Problem:
    if impl == "pallas":
        from pallas_kernels.sparse_attention import kernel_sm90

        run = partial(kernel_sm90.sparse_attention, window_size=case.window, numerics=SERVING)
    elif impl == "triton":
        from pallas_kernels.sparse_attention import triton_path

        run = partial(triton_path.sparse_attention, window_size=case.window)
    else:
        run = partial(xla_path, window_size=case.window)

    def call(i: int, carry: Array, data: tuple) -> Array:
        """Each execution's queries are the outputs of the one before it."""
        cos, sin, windows, written, position, floor, pool, tables, selected, sink = data
        return run(
            carry, cos, sin, windows[i % len(windows)], written, position, floor, pool,
            tables[i % len(tables)], selected, sink,
        )  # fmt: skip

    q, *data = inputs(case, seed)
    rows = case.requests * case.rows
    touched = case.start * (1 - (1 - case.chosen / case.start) ** case.rows) if case.selected else 0
    stored = touched * LATENT_BYTES + (case.window - 1 + case.rows) * WINDOW_BYTES
    slots = case.window + (case.chosen if case.selected else 0)
    many = rows > 1024
    return Problem(
        call=call,
        carry=q,
        data=data,
        nbytes=float(case.requests * stored + 4 * q.size),
        flops=4.0 * rows * case.heads * case.width * slots,
        executions=(1 if many else 4) if impl == "xla" else (4 if many else 32),
    )


def _arguments(case: Case, seed: int) -> list:
    """As ``inputs``, of one set, with window rows that do not exist, a floor, rows that see fewer
    entries or nothing, and a sink.
    """
    q, cos, sin, windows, _, position, _, pool, tables, selected, _ = jax.jit(
        inputs, static_argnums=(0, 1)
    )(case, seed)
    rng = np.random.default_rng(seed)
    b, stored = case.requests, case.window - 1 + case.rows
    written = case.start - case.window + 1 + np.arange(stored) >= 0
    written = written & (rng.random((b, stored)) < 0.97)
    floor = np.maximum(rng.permutation(b) * 10 % 100 + case.start - case.window, 0)
    if b > 1:
        floor[-1] = case.start + case.rows  # its window is hidden
    if selected is not None:
        picks = np.array(selected)
        picks[0, 0, case.chosen // 2 :] = -1
        if b > 1:
            picks[-1, -1] = -1
        selected = jnp.asarray(picks)
    return [
        q, cos, sin, windows[0], jnp.asarray(written), position, jnp.asarray(floor, jnp.int32),
        pool, tables[0], selected, jnp.linspace(-2, 2, case.heads),
    ]  # fmt: skip


@partial(jax.jit, static_argnums=0)
def _poisoned(case: Case, arguments: list, word: int) -> list:
    """Stored rows that no query sees hold ``word``, table entries of unread pages are no pages."""
    window, written, position, floor, pool, table, selected = arguments[3:10]
    at = position[:, :1] - (case.window - 1) + jnp.arange(written.shape[1])
    seen = written & (at >= floor[:, None])
    arguments = [*arguments]
    arguments[3] = WindowRows(jnp.where(seen[..., None], window.words, word))
    if pool is not None:
        picks = selected.reshape(case.requests, -1)
        batch, live = jnp.arange(case.requests)[:, None], picks >= 0
        pages = table[batch, jnp.maximum(picks, 0) // case.page]
        pages = jnp.where(live, pages, pool.words.shape[0])
        used = jnp.zeros(pool.words.shape[:2], bool)
        used = used.at[pages, picks % case.page].set(True, mode="drop")
        arguments[7] = LatentRows(jnp.where(used[..., None], pool.words, word))
        arguments[8] = jnp.where(jnp.any(used, axis=1)[table], table, 1 << 30)
    return arguments


@partial(jax.jit, static_argnums=(0, 2, 3))
def _some_rows(case: Case, arguments: list, first: int, count: int) -> list:
    """The arguments of ``count`` consecutive rows of each request."""
    rows, stored = slice(first, first + count), slice(first, first + case.window - 1 + count)
    q, cos, sin, window, written, position, floor, pool, table, selected, sink = arguments
    return [
        q[:, rows], cos[:, rows], sin[:, rows], WindowRows(window.words[:, stored]),
        written[:, stored], position[:, rows], floor, pool, table,
        None if selected is None else selected[:, rows], sink,
    ]  # fmt: skip


@partial(jax.jit, static_argnums=0)
def _in_rings(case: Case, arguments: list) -> list:
    """The arguments of ``kernel_sm90.ring_attention``: the window in rings of other owners too."""
    q, cos, sin, window, written, position, *rest = arguments
    b, stored = written.shape
    size = 2 ** (stored - 1).bit_length()
    slot = b - jnp.arange(b, dtype=jnp.int32)
    at = position[:, :1] - (case.window - 1) + jnp.arange(stored)
    index = slot[:, None], at % size
    ring = jnp.full((b + 1, size, window.words.shape[-1]), -1).at[index].set(window.words)
    tags = jnp.full((b + 1, size), -1).at[index].set(jnp.where(written, at, at - size))
    return [q, cos, sin, WindowRows(ring), tags, slot, position, *rest]


def checks(
    case: Case, seed: int, run: Callable | None = None, ring: Callable | None = None
) -> Iterator[Check]:
    """Of many rows ``DRAWN`` consecutive ones a request are compared with the reference; ``ring``
    stands in for the kernel that reads rings.
    """
    if run is None:
        from pallas_kernels.sparse_attention import kernel_sm90

        run, ring = kernel_sm90.sparse_attention, kernel_sm90.ring_attention
    options = {"window_size": case.window, "numerics": SERVING}
    arguments = _arguments(case, seed)
    program = Program(partial(run, **options), *arguments)
    got = program(*arguments)
    rng = np.random.default_rng(seed)
    count = min(case.rows, DRAWN)
    first = int(rng.integers(case.rows - count + 1))
    reference = exact(partial(ref.sparse_attention, **options))
    want = reference(*_some_rows(case, arguments, first, count))
    some = got[:, first : first + count]
    yield near("drawn rows, relative error", some, want, ATTENTION_REL)
    yield aligned("drawn rows, 1 - cosine", some, want, ATTENTION_ANGLE)
    yield same("another run", program(*arguments), got)
    if on_hopper() and has_triton():
        from pallas_kernels.sparse_attention import triton_path

        other = jax.jit(partial(triton_path.sparse_attention, window_size=case.window))
        yield near("the Triton kernel to compare with", other(*arguments), got, ATTENTION_REL)
    if ring:
        stored = _in_rings(case, arguments)
        from_rings = Program(partial(ring, **options), *stored)(*stored)
        yield same("window rows in rings", from_rings, got)
        weights = [jnp.zeros(size, jnp.uint8) for size in (3 << 20, 30 << 20)]

        def asking(ahead: list[Array], *arguments: object) -> Array:
            return ring(*arguments, **options, ahead=ahead)

        asked = Program(asking, weights, *stored)(weights, *stored)
        yield same("weights asked for ahead", asked, got)
    for name, word in WORDS.items():
        poisoned = program(*_poisoned(case, arguments, word))
        yield same(f"what is not seen is {name}", poisoned, got)

    def hide(live: Array) -> list:
        q, *rest = arguments
        return [jnp.where(live.reshape(*q.shape[:2], 1, 1), q, ones(q)), *rest]

    def flat(*arguments: object) -> Array:
        return program(*arguments).reshape(-1, case.heads, case.width)

    rows = case.requests * case.rows
    yield from rows_alone(flat, hide, rows, got.reshape(-1, case.heads, case.width), rng)
    order = rng.permutation(case.requests)
    mixed = [a if i in (7, 10) else take(a, order) for i, a in enumerate(arguments)]
    yield same("requests in another order", program(*mixed), take(got, order))
