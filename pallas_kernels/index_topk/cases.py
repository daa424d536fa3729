"""Cases of ``index_topk`` and ``top_blocks``, shared by tests and ``pallas_kernels.bench``."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.bench import Problem
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
