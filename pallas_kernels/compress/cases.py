"""Shapes of ``pool_pairs``, and what a layer compresses and stores in a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.bench import Problem
from pallas_kernels.check import Check, Program, exact, near, same
from pallas_kernels.check.bounds import SERVING_REL
from pallas_kernels.compress import ref
from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Pairs, Projected, Window
from pallas_kernels.numerics import SERVING
from pallas_kernels.quant import Fp8Blocks
from pallas_kernels.quant.storage import KeyRows, LatentRows, WindowRows

COLD_BYTES = 150_000_000  # inputs taken in turn, several times the L2
EPS = 1e-20
WIDTH, KEY = 512, 128


@dataclass(frozen=True)
class Case:
    groups: int
    width: int = 512

    def __str__(self) -> str:
        return f"groups={self.groups},width={self.width}"


CORNERS = (Case(0, 64), Case(1, 64), Case(19, 64), Case(3, 512))


@dataclass(frozen=True)
class StoreCase:
    """``rows`` tokens of each of ``requests``. ratio 1 and 2: layers that own global rows, whose
    latents, keys and window rows are stored; 0: window rows alone.
    """

    requests: int
    rows: int
    ratio: int
    page: int = 64  # tokens
    ring: int = 256

    def __str__(self) -> str:
        return f"requests={self.requests},rows={self.rows},ratio={self.ratio}"

    @property
    def groups(self) -> int:
        return -(-self.rows // max(1, self.ratio))

    @property
    def emit(self) -> bool:
        """The attention of longer chunks reads their own rows apart from the rings."""
        return self.rows > 8

    @property
    def start(self) -> int:
        """At ratio 2 one row a request closes a group."""
        return 64 + self.rows % 2

    @property
    def pages(self) -> int:
        return -(-(self.start + self.rows) // self.page)

    @property
    def nbytes(self) -> float:
        """Inputs and angles read once, stored rows and latents written once."""
        rows, groups = self.requests * self.rows, self.requests * self.groups
        stored = self.requests * min(self.rows, self.ring)
        window = rows * (2 * WIDTH + 256) + stored * (528 + 4) + (rows * 528 if self.emit else 0)
        if not self.ratio:
            return window
        source = 2 * WIDTH if self.ratio == 1 else 2 * 2 * 4 * WIDTH
        return window + groups * (source + 256 + 2 * WIDTH + 288 + 2 * KEY + 256 + 68)


CHECKED_ROWS = ((32, 6), (1, 128), (3, 1001))
CASES = tuple(
    StoreCase(requests, rows, ratio)
    for ratio in (2, 1, 0)
    for requests, rows in ((1, 1), (128, 1), (1, 8192))
)
CHECKED = (
    *CASES,
    *(StoreCase(requests, rows, ratio) for ratio in (2, 1) for requests, rows in CHECKED_ROWS),
    *(StoreCase(3, 7, ratio, page=6, ring=24) for ratio in (2, 1)),
    StoreCase(5, 300, 0),
)


def _angles(position: Array) -> tuple[Array, Array]:
    angle = position[..., None] * 160000.0 ** (-jnp.arange(0, 64, 2) / 64)
    return jnp.cos(angle), jnp.sin(angle)


def inputs(case: StoreCase, key: Array) -> tuple[Chunk, Paged, Latents | None, Keys | None, Window]:
    """Random projections, empty caches."""
    b, t, g = case.requests, case.rows, case.groups
    keys = jax.random.split(key, 5)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    starts = jnp.full(b, case.start, jnp.int32)
    chunk = Chunk(starts, jnp.full(b, t, jnp.int32))
    order = jax.random.permutation(keys[0], b * case.pages).astype(jnp.int32)
    paged = Paged(order.reshape(b, case.pages), jnp.zeros(b, jnp.int32))
    tokens = starts[:, None] + jnp.arange(t, dtype=jnp.int32)
    window = Window(
        normal(keys[1], (b, t, WIDTH)),
        jnp.ones(WIDTH, jnp.bfloat16),
        *_angles(tokens),
        WindowRows.zeros((b, case.ring), WIDTH),
        jnp.full((b, case.ring), -1, jnp.int32),
        jnp.arange(b, dtype=jnp.int32),
        case.emit,
    )
    if not case.ratio:
        return chunk, paged, None, None, window
    if case.ratio == 2:
        both = jax.random.normal(keys[2], (2, b, t, WIDTH), jnp.float32)
        before = jax.random.normal(keys[3], (2, b, WIDTH), jnp.float32)
        source: Pairs | Projected = Pairs(both[0], both[1], before[0], before[1])
    else:
        source = Projected(normal(keys[2], (b, t, WIDTH)))
    at = _angles(ref.closing_rows(starts, t, case.ratio) + starts[:, None] + 1 - case.ratio)
    lead = b * case.pages, case.page // case.ratio
    latents = Latents(source, jnp.ones(WIDTH, jnp.bfloat16), *at, LatentRows.zeros(lead, WIDTH))
    x, weight = normal(keys[4], (b, g, KEY)), jnp.ones(KEY, jnp.bfloat16)
    return (
        chunk,
        paged,
        latents,
        Keys(x, weight, *at, KeyRows.zeros(lead, KEY), t, case.ratio),
        window,
    )


def caches(latents: Latents | None, keys: Keys | None, window: Window) -> tuple:
    """What a layer writes in place: rings, their tags, pools of latents and keys."""
    if latents is None or keys is None:
        return window.ring, window.tags, None, None
    return window.ring, window.tags, latents.pool, keys.pool


def store_layer(cache: tuple, made: tuple, *, kernel: bool) -> tuple:
    """The caches after a layer has stored the rows of ``inputs``."""
    return stored(cache, made, kernel=kernel)[0]


def stored(cache: tuple, made: tuple, *, kernel: bool) -> tuple[tuple, Array | None, Any]:
    """The caches, the latents and, where the case wants them, the window rows apart from rings."""
    from pallas_kernels.compress import kernel_sm90

    chunk, paged, latents, keys, window = made
    (ring, tags, pool, key_pool), latent = cache, None
    window = replace(window, ring=ring, tags=tags)
    if latents is not None:
        latents, keys = replace(latents, pool=pool), replace(keys, pool=key_pool)
        path = kernel_sm90 if kernel else ref
        # The projection of the keys, left out here, reads the latents.
        latent, pool = lax.optimization_barrier(path.store_latents(chunk, paged, latents, eps=EPS))
    if kernel:
        rows, ring, tags, key_pool = kernel_sm90.store_rows(
            chunk, window=window, paged=paged, keys=keys, eps=EPS
        )
    else:
        key_pool = None if keys is None else ref.store_keys(chunk, paged, keys, eps=EPS)
        rows, ring, tags = ref.store_window(chunk, window, eps=EPS)
    if window.emit:
        rows, ring = lax.optimization_barrier((rows, ring))
    return (ring, tags, pool, key_pool), latent, rows if window.emit else None


def problem(case: StoreCase, impl: str, seed: int) -> Problem:
    """The inputs of few rows come from the step's own last kernel, so two sets of them do, and many
    executions hide what it costs to hand so many arrays over.
    """
    few = case.requests * case.rows <= 128
    sets = 2 if few else max(1, min(16, -(-COLD_BYTES // int(case.nbytes))))
    make = jax.jit(partial(inputs, case))
    data = tuple(make(key) for key in jax.random.split(jax.random.key(seed), sets))

    def call(i: int, carry: tuple, data: tuple) -> tuple:
        return store_layer(carry, data[i % sets], kernel=impl == "pallas")

    return Problem(
        call=call,
        carry=caches(*data[0][2:]),
        data=data,
        nbytes=case.nbytes,
        flops=0.0,
        executions=96 if few else 16,
    )


def _drawn(case: StoreCase, seed: int) -> tuple[tuple, tuple]:
    """Caches of random bits and the arguments that go with them: odd and even starts, requests
    without rows, rows that are not written and pages that do not exist.
    """
    b, rng = case.requests, np.random.default_rng(seed)
    made = jax.jit(partial(inputs, case))(jax.random.key(seed))
    chunk, paged, _, _, window = made
    starts = rng.integers(0, case.start + 1, b)
    lengths = rng.permutation(np.resize([case.rows, case.rows, case.rows - 1, 0], b))
    lengths[0] = case.rows
    table = np.array(paged.page_table)
    table[rng.random(table.shape) < 0.03] = -1
    floors = np.where(rng.random(b) < 0.5, 0, starts + rng.integers(0, case.rows + 1, b))
    slots = rng.permutation(window.ring.words.shape[0])[:b]
    if b > 2:
        slots[1], table[2, 0] = -1, 1 << 30
    to = partial(jnp.asarray, dtype=jnp.int32)
    cache = jax.tree.map(
        lambda plane: to(rng.integers(-(1 << 31), 1 << 31, plane.shape)), caches(*made[2:])
    )
    chunk, paged = Chunk(to(starts), to(lengths)), Paged(to(table), to(floors))
    return cache, (chunk, paged, *made[2:4], replace(window, slot=to(slots)))


@jax.jit
def _whole(made: tuple) -> tuple:
    """Whole numbers, and angles and gates that round nothing: every order of sums is exact."""
    chunk, paged, latents, keys, window = made

    def turned(job: Any) -> Any:
        return replace(job, cos=jnp.round(4 * job.cos) / 4, sin=jnp.round(4 * job.sin) / 4)

    def rounded(tree: Any) -> Any:
        """No zero has a sign: a sum may begin with zero."""
        whole = jax.tree.map(lambda a: jnp.round(6 * a), tree)
        return jax.tree.map(lambda a: jnp.where(a == 0, 0, a), whole)

    if latents is not None:
        source = rounded(latents.source)
        if isinstance(source, Pairs):
            gates = (200 * jnp.sign(g) for g in (source.g, source.before_g))
            source = replace(source, g=next(gates), before_g=next(gates))
        latents = replace(turned(latents), source=source)
        keys = replace(turned(keys), x=rounded(keys.x))
    return chunk, paged, latents, keys, replace(turned(window), x=rounded(window.x))


@jax.jit
def _dead(made: tuple) -> tuple:
    """Rows that are not live hold NaN or 1e30."""
    chunk, paged, latents, keys, window = made
    poison = jnp.where(jnp.arange(len(chunk.start)) % 2 == 0, jnp.nan, 1e30)[:, None, None]

    def hide(x: Array, live: Array) -> Array:
        return jnp.where(live[..., None], x, poison).astype(x.dtype)

    live = jnp.arange(window.x.shape[1]) < chunk.length[:, None]
    if latents is not None:
        source = latents.source
        if isinstance(source, Pairs):
            source = replace(source, u=hide(source.u, live), g=hide(source.g, live))
        else:
            source = replace(source, x=hide(source.x, live))
        latents = replace(latents, source=source)
        keys = replace(keys, x=hide(keys.x, _closed(chunk, keys.places, keys.ratio)))
    return chunk, paged, latents, keys, replace(window, x=hide(window.x, live))


def _closed(chunk: Chunk, places: int, ratio: int) -> Array:
    return ref.closing_rows(chunk.start, places, ratio) < chunk.length[:, None]


@jax.jit
def _compared(got: Array, want: Array, before: Array) -> tuple[Array, Array]:
    """How many words differ of rows [..., n] that ``want`` wrote (their share) and did not write
    (their number).
    """
    wrote = jnp.any(want != before, axis=-1, keepdims=True)
    wrong = got != want
    words = jnp.maximum(jnp.sum(wrote) * want.shape[-1], 1)
    return jnp.sum(wrong & wrote) / words, jnp.sum(wrong & ~wrote)


def checks(case: StoreCase, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """``run``: as ``stored``. A reciprocal root may be off by its last bit, so that a few rounded
    values may be neighbours; rows that are not stored keep every bit.
    """
    cache, made = _drawn(case, seed)
    whole = _whole(made)
    program = Program(run or partial(stored, kernel=True), cache, whole)
    reference = exact(partial(stored, kernel=False))
    names = ("window rows", "tags", "latents", "keys")
    planes = [n for n, tree in zip(names, cache, strict=True) for _ in jax.tree.leaves(tree)]
    outcome = program(cache, whole)
    for kind, arguments, share in (("whole numbers", whole, 1e-3), ("any values", made, 1e-2)):
        got, want = program(cache, arguments), reference(cache, arguments)
        triples = zip(*(jax.tree.leaves(c) for c in (got[0], want[0], cache)), strict=True)
        for i, (name, triple) in enumerate(zip(planes, triples, strict=True)):
            differ, spoilt = _compared(*triple)
            yield Check(f"{kind}: {name} {i}, share of words that differ", float(differ), share)
            yield Check(f"{kind}: {name} {i}, words of rows not stored", float(spoilt), 0)
        yield from _rows_against(case, kind, made[0], got, want)
    yield same("another run", program(cache, whole), outcome)
    yield same("rows that are not live poisoned", program(cache, _dead(whole))[0], outcome[0])
    if run is None and not case.emit and case.requests * case.rows <= 128:
        yield _beside_products(case, made, seed)


def _beside_products(case: StoreCase, made: tuple, seed: int) -> Check:
    """One launch with products of low-rank queries has the bits of two."""
    from pallas_kernels.compress import beside_sm90, kernel_sm90
    from pallas_kernels.linear.kernel_sm90 import normed_linears

    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (case.requests, case.rows, 1280), jnp.bfloat16)
    weights = (Fp8Blocks.quantize(jax.random.normal(keys[1], (2048, 1280))),)
    norm, numerics = jnp.ones(1280, jnp.bfloat16), {"eps": 1e-6, "numerics": SERVING}

    def jobs(made: tuple) -> tuple[Chunk, dict[str, Any]]:
        chunk, paged, _, keys, window = made
        return chunk, {"window": window, "paged": paged, "keys": keys}

    @jax.jit
    def one(made: tuple) -> tuple:
        chunk, rows = jobs(made)
        return beside_sm90.linears_beside_rows(
            x, norm, weights, chunk, **rows, row_eps=EPS, **numerics
        )

    @jax.jit
    def two(made: tuple) -> tuple:
        chunk, rows = jobs(made)
        return normed_linears(x, norm, weights, **numerics), kernel_sm90.store_rows(
            chunk, **rows, eps=EPS
        )

    return same("products and stores in one launch", one(made), two(made))


def _rows_against(
    case: StoreCase, kind: str, chunk: Chunk, got: tuple, want: tuple
) -> Iterator[Check]:
    """Latents and window rows of live rows against the reference's."""
    if got[1] is not None:
        live = _closed(chunk, case.rows, case.ratio)[..., None]
        a, b = (jnp.where(live, latent, 0) for latent in (got[1], want[1]))
        yield near(f"{kind}: latents", a, b, SERVING_REL)
    if got[2] is not None:
        live = (jnp.arange(case.rows) < chunk.length[:, None])[..., None]
        a, b = (jnp.where(live, rows.decode(jnp.float32), 0) for rows in (got[2], want[2]))
        yield near(f"{kind}: emitted window rows", a, b, SERVING_REL)
