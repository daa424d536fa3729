"""Shapes of ``pool_pairs``, and what a layer compresses and stores in a step."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.bench import Problem
from pallas_kernels.compress import ref
from pallas_kernels.compress.store import Chunk, Keys, Latents, Paged, Pairs, Projected, Window
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


CASES = tuple(
    StoreCase(requests, rows, ratio)
    for ratio in (2, 1, 0)
    for requests, rows in ((1, 1), (128, 1), (1, 8192))
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
    from pallas_kernels.compress import kernel_sm90

    chunk, paged, latents, keys, window = made
    ring, tags, pool, key_pool = cache
    window = replace(window, ring=ring, tags=tags)
    if latents is not None:
        latents, keys = replace(latents, pool=pool), replace(keys, pool=key_pool)
        path = kernel_sm90 if kernel else ref
        # The projection of the keys, left out here, reads the latents.
        _, pool = lax.optimization_barrier(path.store_latents(chunk, paged, latents, eps=EPS))
    if kernel:
        rows, ring, tags, key_pool = kernel_sm90.store_rows(
            chunk, window=window, paged=paged, keys=keys, eps=EPS
        )
    else:
        key_pool = None if keys is None else ref.store_keys(chunk, paged, keys, eps=EPS)
        rows, ring, tags = ref.store_window(chunk, window, eps=EPS)
    if window.emit:
        _, ring = lax.optimization_barrier((rows, ring))
    return ring, tags, pool, key_pool


def problem(case: StoreCase, impl: str, seed: int) -> Problem:
    sets = max(1, min(16, -(-COLD_BYTES // int(case.nbytes))))
    make = jax.jit(partial(inputs, case))
    data = tuple(make(key) for key in jax.random.split(jax.random.key(seed), sets))

    def call(i: int, carry: tuple, data: tuple) -> tuple:
        return store_layer(carry, data[i % sets], kernel=impl == "pallas")

    return Problem(call=call, carry=caches(*data[0][2:]), data=data, nbytes=case.nbytes, flops=0.0)
