"""Shapes of the Engram ops, shared by tests, ``pallas_kernels.bench`` and
``pallas_kernels.check``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.check import Check, Program, along_rows, exact, near, rows_alone, same
from pallas_kernels.check.bounds import SERVING_REL
from pallas_kernels.engram import ref
from pallas_kernels.engram.op import build_gate_add, build_rows
from pallas_kernels.quant import Fp8Rows

BF16 = jnp.bfloat16
EPS = 1e-20
FLASH_TABLE = 384_006_168  # rows of layer 1's table: 101 GB
COLD_BYTES = 150e6  # of keys and values taken in turn: more than L2 holds


@dataclass(frozen=True)
class Case:
    """rows R of ``streams`` S streams of ``hidden`` D; ``columns`` C table rows of ``width`` N a
    token out of ``table`` rows. ``part`` rows: lookup and dequantisation, gate: gate and addition.
    """

    rows: int
    hidden: int = 5120
    streams: int = 4
    columns: int = 24
    width: int = 256
    table: int = 1 << 25
    part: str = "rows"

    @property
    def nbytes(self) -> int:
        """Each row of the table as often as it is asked for, else each array once."""
        if self.part == "rows":
            row = self.width + self.width // 32 + 2 * self.width + 4
            return self.rows * self.columns * row
        streams = self.streams * self.hidden
        return 2 * (self.rows * (3 * streams + self.hidden) + 2 * streams)

    def __str__(self) -> str:
        sizes = f",table={self.table}" if self.part == "rows" else f",hidden={self.hidden}"
        return f"part={self.part},rows={self.rows}{sizes}"


CASES = (
    *(Case(rows) for rows in (1, 8, 32, 128, 2048, 8192)),
    *(Case(rows, part="gate") for rows in (1, 8, 32, 128, 2048, 8192)),
    *(Case(rows, table=FLASH_TABLE) for rows in (1, 8192)),
)
CHECKED = (
    *(Case(rows, table=100_003) for rows in (1, 3, 128, 700, 1500, 8192)),
    *(Case(rows, part="gate") for rows in (1, 2, 33, 34, 67, 300, 8192)),
    *(Case(20, hidden, streams, part="gate") for hidden, streams in ((1000, 4), (6144, 2))),
)
CORNERS = (
    Case(1, 256, 4, 6, 64, 397),
    Case(0, 256, 4, 6, 64, 397),
    Case(37, 64, 2, 6, 32, 60),
    Case(3, 5120, 4, 24, 256, 1000),
)


@partial(jax.jit, static_argnums=0)
def _table(case: Case) -> Fp8Rows:
    """Codes and scales (2^-16 to 2^15) that depend on their place; made without temporaries."""

    def mixed(shape: tuple[int, int], factor: int) -> Array:
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
        return (row * jnp.uint32(2654435761) + column * jnp.uint32(factor)) >> 15

    codes = mixed((case.table, case.width), 40503)
    codes = (codes & 0x80) | jnp.minimum(codes & 0x7F, 0x7E)
    scales = 111 + (mixed((case.table, case.width // 32), 69069) & 31)
    values = jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)
    return Fp8Rows(values, scales.astype(jnp.uint8))


def _ids(case: Case, seed: int) -> Array:
    shape = case.rows, case.columns
    return jax.random.randint(jax.random.key(seed), shape, 0, case.table, jnp.int32)


def problem(case: Case, impl: str, seed: int) -> Problem:
    kernels = "mosaic" if impl == "pallas" else "reference"
    make = _rows_problem if case.part == "rows" else _gate_problem
    return make(case, kernels, seed)


def _rows_problem(case: Case, kernels: str, seed: int) -> Problem:
    run = _chained(case) if kernels == "mosaic" else _waiting
    sets = tuple(_ids(case, seed + i) for i in range(8))

    def call(i: int, carry: Array, data: Any) -> Array:
        table, sets = data
        return run(carry, table, sets[i % len(sets)])

    return Problem(
        call=call,
        carry=jnp.zeros((case.rows, case.columns * case.width), BF16),
        data=(_table(case), sets),
        nbytes=float(case.nbytes),
        flops=0.0,
        executions=32,
    )


def _chained(case: Case) -> Callable:
    """The kernel with an operand that it does not read, by which each execution waits."""
    from pallas_kernels.engram.kernel_sm90 import rows_launcher
    from pallas_kernels.engram.rows_ptx import gather

    launch = rows_launcher(gather(case.rows * case.columns, case.table), after=True)

    def run(carry: Array, table: Fp8Rows, ids: Array) -> Array:
        return launch(table.codes, table.scales, ids.reshape(-1), carry).reshape(carry.shape)

    return run


def _waiting(carry: Array, table: Fp8Rows, ids: Array) -> Array:
    """XLA's, with ids that wait for all of the execution before: nothing exceeds 1e30."""
    carry = jax.lax.optimization_barrier(carry)
    return ref.engram_rows(table, ids + (carry[0, 0] > 1e30).astype(jnp.int32), dtype=BF16)


def _gate_operands(case: Case, seed: int) -> tuple[Array, Array, Array, Array]:
    """h, kv and the weights, whose dots are about 1 in size."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = case.streams, case.hidden
    h = 3 * jax.random.normal(keys[0], (case.rows, *shape), BF16)
    kv = jax.random.normal(keys[1], (case.rows, (case.streams + 1) * case.hidden), BF16)
    q, k = (1 + jax.random.normal(key, shape, BF16) / 4 for key in keys[2:])
    return h, kv, q, k


def _gate_problem(case: Case, kernels: str, seed: int) -> Problem:
    """A chain: the streams of an execution are those of the one before it."""
    run = partial(build_gate_add(kernels), eps=EPS)
    sets = max(1, min(12, int(COLD_BYTES * 2 // case.nbytes)))
    operands = [_gate_operands(case, seed + i) for i in range(sets)]
    live = jnp.ones(case.rows, bool)

    def call(i: int, carry: Array, data: Any) -> Array:
        sets, live = data
        return run(carry, *sets[i % len(sets)], live)

    return Problem(
        call=call,
        carry=operands[0][0],
        data=(tuple(one[1:] for one in operands), live),
        nbytes=float(case.nbytes),
        flops=0.0,
        executions=32 if case.rows <= 128 else 8,
    )


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    if case.part == "rows":
        yield from _rows_checks(case, seed, run or build_rows("mosaic"))
    else:
        yield from _gate_checks(case, seed, run or build_gate_add("mosaic"))


def _rows_checks(case: Case, seed: int, run: Callable) -> Iterator[Check]:
    """Bits of the reference: drawn rows, rows of all scales, the same rows in another order."""
    rng = np.random.default_rng(seed)
    table, ids = _table(case), _ids(case, seed)
    ids = ids.at[0, :3].set(jnp.array([0, case.table - 1, ids[0, 0]]))
    program = Program(partial(run, dtype=BF16), table, ids)
    want = exact(partial(ref.engram_rows, dtype=BF16))
    got = program(table, ids)
    yield same("drawn rows, bits", got, want(table, ids))
    count = np.arange(case.table * (case.width // 32)).reshape(case.table, -1)
    every = Fp8Rows(table.codes, jnp.asarray(20 + count % 235, jnp.uint8))
    yield same("all scales of normal numbers, bits", program(every, ids), want(every, ids))
    order = jnp.asarray(rng.permutation(case.rows))
    yield same("rows in another order", program(table, ids[order]), got[order])

    def hide(live: Array) -> tuple[Fp8Rows, Array]:
        return table, jnp.where(live[:, None], ids, case.table - 1)

    yield from rows_alone(program, hide, case.rows, got, rng)


def _gate_checks(case: Case, seed: int, run: Callable) -> Iterator[Check]:
    """Against ``ref``; rows that are not live keep their bits; all other rows poisoned."""
    rng = np.random.default_rng(seed)
    h, kv, q, k = _gate_operands(case, seed)
    live = jnp.asarray(rng.random(case.rows) < 0.8).at[0].set(True)
    program = Program(partial(run, eps=EPS), h, kv, q, k, live)
    want = exact(partial(ref.engram_gate_add, eps=EPS))
    got = program(h, kv, q, k, live)
    yield near("against ref", got, want(h, kv, q, k, live), SERVING_REL)
    yield same("rows that are not live, bits", got, h, ~live)
    # Streams that are small beside their values: what is added decides the result.
    small = (h / 1024, kv * 8, q, k, live)
    yield near("mostly values, against ref", program(*small), want(*small), SERVING_REL)

    def hide(alive: Array) -> tuple[Array, ...]:
        hidden = (jnp.where(along_rows(alive, a), a, jnp.nan).astype(BF16) for a in (h, kv))
        return (*hidden, q, k, live)

    yield from rows_alone(program, hide, case.rows, got, rng)
