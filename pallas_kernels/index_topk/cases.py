"""Cases of ``index_topk`` and ``top_blocks``, shared by tests and ``pallas_kernels.bench``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.check import Check, Program, exact, rows_alone, same, take
from pallas_kernels.index_topk import ref
from pallas_kernels.index_topk.op import build, build_blocks

COLD_BYTES = 150_000_000  # inputs taken in turn, several times the L2


@dataclass(frozen=True)
class Case:
    """rows R over ``entries`` N places of which the last row sees ``visible``; ``picks`` k entries
    or ``blocks`` blocks.
    """

    rows: int
    entries: int
    visible: int
    k: int = 512
    blocks: int = 2048
    block_size: int = 8
    picks: str = "entries"

    def __str__(self) -> str:
        k = self.k if self.picks == "entries" else self.blocks
        return (
            f"picks={self.picks},rows={self.rows},entries={self.entries},visible={self.visible}"
            f",k={k}"
        )


CASES = (
    *(Case(16, entries, entries) for entries in (8192, 131072, 524288)),
    *(Case(rows, 131072, 131072) for rows in (1, 32, 128)),
    Case(1, 1 << 20, 1 << 20),
    Case(32, 16384, 16384),
    Case(16, 524288, 100_000),
    *(Case(rows, 524288, 524288, picks="blocks") for rows in (1, 16)),
)
_small = {"k": 8, "blocks": 5, "block_size": 4}
CORNERS = (
    Case(1, 8, 0, **_small),
    Case(1, 8, 1, **_small),
    Case(3, 5, 5, **_small),
    Case(3, 8, 8, **_small),
    Case(5, 9, 9, **_small),
    Case(5, 37, 37, **_small),
    Case(5, 64, 37, **_small),
    Case(2, 512, 512),
    Case(2, 513, 513),
    Case(2, 1000, 999),
    Case(1, 4095, 4095, blocks=64),
    Case(1, 4097, 4097, blocks=64),
)
CHECKED = (
    *CASES,
    *(Case(20, entries, entries) for entries in (512, 513, 5001, 16384, 16392)),
    *(Case(20, entries, entries, picks="blocks") for entries in (5001, 16384, 16392)),
    Case(300, 4096, 4096),
    Case(3, 5001, 5001, blocks=100, picks="blocks"),
    Case(3, 999, 999, blocks=20, block_size=4, picks="blocks"),
)


def problem(case: Case, impl: str, seed: int) -> Problem:
    kernels = "mosaic" if impl == "pallas" else "reference"
    nbytes = 4 * case.rows * (case.visible + case.k)
    sets = max(1, min(64, COLD_BYTES // (4 * case.rows * case.entries)))
    keys = jax.random.split(jax.random.key(seed), sets)
    make = jax.jit(lambda key: jax.random.normal(key, (case.rows, case.entries), jnp.float32))
    data = tuple(make(key) for key in keys)
    if case.picks == "entries":
        select = build(kernels)

        def pick(scores: Array, visible: Array) -> Array:
            return select(scores, visible, k=case.k)
    else:
        select_blocks = build_blocks(kernels)

        def pick(scores: Array, visible: Array) -> Array:
            return select_blocks(scores, visible, block_size=case.block_size, k=case.blocks)

    def call(i: int, carry: Array, data: tuple) -> Array:
        # Picks are at least -1: each execution waits for the one before it.
        return pick(data[i % sets], jnp.minimum(case.visible, carry[:, 0] + case.entries + 1))

    places = case.k if case.picks == "entries" else case.blocks
    return Problem(
        call=call,
        carry=jnp.zeros((case.rows, places), jnp.int32),
        data=data,
        nbytes=float(nbytes),
        flops=0.0,
        executions=32 if impl == "pallas" else 2,
    )


def _lengths(case: Case) -> np.ndarray:
    """Visible entries int32 [R]: the case's, then what kernels get wrong, in turn."""
    k, n, block = case.k, case.visible, case.block_size
    odd = (0, 1, k - 1, k, k + 1, 16384, 16392, block * case.blocks + 1, n - 1, n // 2, n)
    kept = [n, *(length for length in odd if 0 <= length <= n)]
    return np.resize(np.array(kept, np.int32), case.rows)


@partial(jax.jit, static_argnums=(0, 1))
def _scores(case: Case, seed: int) -> dict[str, Array]:
    """Score inputs f32 [R, N] of several kinds, by name."""
    shape = case.rows, case.entries
    normal = jax.random.normal(jax.random.key(seed), shape)
    chance = jax.random.uniform(jax.random.key(seed + 1), shape)
    return {
        "distinct scores": normal,
        "scores of bf16": normal.astype(jnp.bfloat16).astype(jnp.float32),
        "few values": jnp.round(normal),
        "zeros of both signs": jnp.where(chance < 0.5, -0.0, 0.0),
        "rising scores": jnp.sort(normal, axis=1),
        "mostly -inf": jnp.where(chance < 0.001, normal, -jnp.inf),
    }


@jax.jit
def _behind(scores: Array, visible: Array) -> tuple[Array, Array]:
    """The scores with -inf, and with NaN or 1e30, behind the visible entries."""
    rows, entries = scores.shape
    seen = jnp.arange(entries) < visible[:, None]
    poison = jnp.where(jnp.arange(rows)[:, None] % 2 == 0, jnp.nan, 1e30)
    return jnp.where(seen, scores, -jnp.inf), jnp.where(seen, scores, poison)


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """Picks are exactly the reference's; behind the visible entries lie NaN and 1e30."""
    if case.picks == "entries":
        run, options, reference = run or build("mosaic"), {"k": case.k}, ref.index_topk
    else:
        options = {"block_size": case.block_size, "k": case.blocks}
        run, reference = run or build_blocks("mosaic"), ref.top_blocks
    lengths = jnp.asarray(_lengths(case))
    expected = exact(partial(reference, **options))
    inputs = _scores(case, seed)
    scores = inputs["distinct scores"]
    program = Program(partial(run, **options), scores, lengths)
    for name, one in inputs.items():
        clean, poisoned = _behind(one, lengths)
        got = program(poisoned, lengths)
        yield same(name, got, expected(clean, lengths))
        yield same(f"{name}, another run", program(poisoned, lengths), got)
    rng, got = np.random.default_rng(seed), program(scores, lengths)

    def hide(live: Array) -> tuple[Array, Array]:
        at = live[:, None]
        return jnp.where(at, scores, jnp.nan), jnp.where(live, lengths, case.entries)

    yield from rows_alone(program, hide, case.rows, got, rng)
    order = rng.permutation(case.rows)
    mixed = program(*take((scores, lengths), order))
    yield same("rows in another order", mixed, take(got, order))
