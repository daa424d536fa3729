"""Shapes of ``output_projection``, shared by tests, ``pallas_kernels.bench`` and
``pallas_kernels.check``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.check import Check, Program, along_rows, exact, near, rows_alone, same
from pallas_kernels.check.bounds import REFERENCE_REL_RMS, SERVING_REL
from pallas_kernels.linear.op import build, build_many
from pallas_kernels.linear.product import bf16_linears
from pallas_kernels.numerics import REFERENCE, Numerics
from pallas_kernels.output_projection import ref
from pallas_kernels.output_projection.grouped_shape import MAX_ROWS, launch
from pallas_kernels.output_projection.joint_shape import PART, TOKENS, Joint
from pallas_kernels.output_projection.op import build_addends, build_grouped
from pallas_kernels.output_projection.product import bf16_product
from pallas_kernels.quant import Fp8Blocks

BF16 = jnp.bfloat16
COLD_BYTES = 150e6  # of weights taken in turn: more than L2 holds


@dataclass(frozen=True)
class Case:
    """rows R of ``heads`` H heads of ``width`` K, in ``groups`` G groups of rank ``rank``.
    ``early``: weights are read before the kernel ahead has ended. ``both``: the second half too,
    as few launches as there are.
    """

    rows: int
    heads: int = 64
    width: int = 512
    groups: int = 8
    rank: int = 1024
    hidden: int = 5120
    numerics: str = "reference"
    early: bool = False
    both: bool = False

    @property
    def outputs(self) -> int:
        return self.groups * self.rank

    @property
    def k(self) -> int:
        """Inputs of a group."""
        return self.heads * self.width // self.groups

    @property
    def weight_bytes(self) -> int:
        second = self.hidden * self.outputs if self.both else 0
        return (self.outputs * self.k + second) * (1024 + 1) // 1024

    @property
    def nbytes(self) -> int:
        """Of the grouped half, or of both without what lies between, each array once."""
        outputs = self.hidden if self.both else self.outputs
        return self.weight_bytes + 2 * self.rows * (self.heads * self.width + outputs)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.outputs * (self.k + self.both * self.hidden)

    def __str__(self) -> str:
        sizes = f"rows={self.rows},heads={self.heads},groups={self.groups}"
        return f"{sizes},numerics={self.numerics}" + ",early=1" * self.early + ",both=1" * self.both


def rank_of(tp: int, rows: int, numerics: str = "reference") -> Case:
    """What one of ``tp`` ranks does."""
    return Case(rows, heads=64 // tp, groups=8 // tp, numerics=numerics)


CASES = (
    *(Case(rows) for rows in (1, 8, 32, 64, 128, 256, 512, 2048)),
    *(rank_of(tp, rows) for tp in (2, 4, 8) for rows in (1, 32)),
    *(Case(rows, early=True) for rows in (1, 32)),
    *(Case(rows, both=True) for rows in (1, 7, 32)),
)
CHECKED = (
    *(Case(rows) for rows in (1, 8, 20, 32, 61, 128, 201, 300)),
    *(rank_of(tp, rows) for tp in (2, 4, 8) for rows in (1, 32, 100)),
    Case(32, numerics="serving"),
    rank_of(8, 7, "serving"),
    *(Case(rows, early=True) for rows in (1, 20)),
    Case(9, heads=8, groups=4, rank=96),
    *(Case(rows, both=True) for rows in (1, 3, 8)),
    Case(8, numerics="serving", both=True),
    Case(2, heads=16, groups=2, hidden=2048, both=True),
    replace(rank_of(8, 7), both=True),
)
CORNERS = (
    Case(1, 8, 64, 2, 64, 256),
    Case(0, 8, 64, 2, 64, 256),
    Case(5, 4, 32, 1, 32, 64),
    Case(3, 4, 32, 4, 32, 64),
)


@partial(jax.jit, static_argnums=0)
def _weight(case: Case, seed: int) -> Fp8Blocks:
    """Normal values times powers of two that differ from block to block."""
    keys = jax.random.split(jax.random.key(seed), 2)
    shape = case.outputs, case.k
    return _drawn(keys, shape)


@partial(jax.jit, static_argnums=0)
def _second(case: Case, seed: int) -> Fp8Blocks:
    return _drawn(jax.random.split(jax.random.key(seed + 1000), 2), (case.hidden, case.outputs))


def _drawn(keys: Array, shape: tuple[int, int]) -> Fp8Blocks:
    w = jax.random.normal(keys[0], shape) * shape[1] ** -0.5
    steps = jax.random.randint(keys[1], (shape[0] // 32, shape[1] // 32), -3, 4)
    return Fp8Blocks.quantize(w * jnp.repeat(jnp.repeat(2.0**steps, 32, 0), 32, 1))


def problem(case: Case, impl: str, seed: int) -> Problem | None:
    """The grouped half, or both. XLA dequantises to bf16, multiplies and rounds."""
    if case.both:
        return _problem_of_both(case, impl, seed)
    if case.rows > MAX_ROWS if impl == "pallas" else case.early:
        return None  # the kernel hands many rows to XLA, which has nothing to read early
    run = _chained(case) if impl == "pallas" else partial(_waiting, case)
    sets = max(1, min(32, round(COLD_BYTES / case.weight_bytes)))
    weights = tuple(_weight(case, seed + i) for i in range(sets))
    o = jax.random.normal(jax.random.key(seed), (case.rows, case.heads, case.width), BF16)

    def call(i: int, carry: Array, data: Any) -> Array:
        o, weights = data
        return run(carry, o, weights[i % sets])

    return Problem(
        call=call,
        carry=jnp.zeros((case.rows, case.outputs), BF16),
        data=(o, weights),
        nbytes=float(case.nbytes),
        flops=float(case.flops),
        numerics=case.numerics,
        executions=32,
    )


def _problem_of_both(case: Case, impl: str, seed: int) -> Problem:
    """Up to eight rows in one launch, which leaves parts; more in two."""
    numerics = Numerics.named(case.numerics)
    sets = max(1, round(COLD_BYTES / case.weight_bytes))
    weights = tuple((_weight(case, seed + i), _second(case, seed + i)) for i in range(sets))
    o = jax.random.normal(jax.random.key(seed), (case.rows, case.heads, case.width), BF16)
    one = impl == "pallas" and case.rows <= TOKENS
    run = _joint(case) if one else _in_two(case, impl, numerics)

    def call(i: int, carry: Array, data: Any) -> Array:
        o, weights = data
        return run(carry, o, *weights[i % sets])

    shape = (case.outputs // PART, case.rows, case.hidden) if one else (case.rows, case.hidden)
    return Problem(
        call=call,
        carry=jnp.zeros(shape, jnp.float32 if one else BF16),
        data=(o, weights),
        nbytes=float(case.nbytes),
        flops=float(case.flops),
        numerics=case.numerics,
        executions=16,
    )


def _joint(case: Case) -> Callable:
    """``_chained`` for both halves."""
    from pallas_kernels.output_projection.kernel_sm90 import joint_launcher

    rounds = Numerics.named(case.numerics).round_activations
    s = Joint(case.rows, case.groups, case.rank, case.k, case.hidden, rounds)
    run = joint_launcher(s, after=True)
    return lambda carry, o, a, b: run(
        o.reshape(case.rows, -1), a.codes, a.scales, b.codes, b.scales, carry
    )


def _in_two(case: Case, impl: str, numerics: Numerics) -> Callable:
    """The grouped half, which waits for the execution before, then ``linear``."""
    first = _chained(case) if impl == "pallas" else partial(_waiting, case)
    second = build_many("mosaic") if impl == "pallas" else bf16_linears
    return lambda carry, o, a, b: second(first(carry, o, a), (b,), numerics=numerics)[0]


def _chained(case: Case) -> Callable:
    """The kernel with an operand that it does not read, by which each execution waits."""
    from pallas_kernels.output_projection.kernel_sm90 import launcher

    rounds = Numerics.named(case.numerics).round_activations
    s = launch(case.rows, case.groups, case.rank, case.k, round=rounds)
    assert s is not None
    run = launcher(replace(s, early=case.early), after=True)
    return lambda carry, o, w: run(o.reshape(case.rows, -1), w.codes, w.scales, carry)


def _waiting(case: Case, carry: Array, o: Array, w: Fp8Blocks) -> Array:
    """XLA's, with scales that wait for the execution before: nothing exceeds 1e30."""
    more = (carry[0, 0] > 1e30).astype(jnp.uint8)
    w = Fp8Blocks(w.codes, w.scales + more)
    return bf16_product(o, w, groups=case.groups, numerics=Numerics.named(case.numerics))


def _kernel(case: Case) -> Callable:
    if not case.early:
        return build_grouped("mosaic")
    from pallas_kernels.output_projection.kernel_sm90 import grouped_projection

    return partial(grouped_projection, early=True)


@partial(jax.jit, static_argnums=0)
def _whole(case: Case, seed: int) -> tuple[Array, Fp8Blocks]:
    """Operands whose sums are integers below 2^24 times one power of two."""
    keys = jax.random.split(jax.random.key(seed), 3)
    o = jax.random.randint(keys[0], (case.rows, case.heads, case.width), -16, 17).astype(BF16)
    codes = jax.random.randint(keys[1], (case.outputs, case.k), -15, 16)
    scales = jax.random.randint(keys[2], (case.outputs // 32, case.k // 32), 120, 124)
    return o, Fp8Blocks(codes.astype(jnp.float8_e4m3fn), scales.astype(jnp.uint8))


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """Against ``ref``, on integers, whose sums are exact, and with all other rows poisoned."""
    if case.both:
        yield from _checks_of_both(case, seed, run)
        return
    numerics = Numerics.named(case.numerics)
    options = {"groups": case.groups, "numerics": numerics}
    weight = _weight(case, seed)
    o = 3 * jax.random.normal(jax.random.key(seed), (case.rows, case.heads, case.width), BF16)
    program = Program(partial(run or _kernel(case), **options), o, weight)
    want = exact(partial(ref.grouped_projection, **options))
    got = program(o, weight)
    yield near("against ref", got, want(o, weight), SERVING_REL)
    whole = _whole(case, seed)
    yield same("integers, bits", program(*whole), want(*whole))
    if numerics is REFERENCE:
        again = exact(partial(ref.rounded, numerics=numerics))(got)
        yield same("a second rounding changes nothing", again, got)
    if case.rows <= MAX_ROWS:

        def hide(live: Array) -> tuple[Array, Fp8Blocks]:
            return jnp.where(along_rows(live, o), o, jnp.nan).astype(BF16), weight

        yield from rows_alone(program, hide, case.rows, got, np.random.default_rng(seed))


def _checks_of_both(case: Case, seed: int, run: Callable | None) -> Iterator[Check]:
    """The sums of the parts, as above."""
    numerics = Numerics.named(case.numerics)
    options = {"groups": case.groups, "numerics": numerics}
    kernel = partial(run or build_addends("mosaic"), **options)
    first, second = ref.grouped_projection, build("reference")

    def total(o: Array, a: Fp8Blocks, b: Fp8Blocks) -> Array:
        return kernel(o, a, b).total(jnp.float32)

    def reference(o: Array, a: Fp8Blocks, b: Fp8Blocks) -> Array:
        z = first(o, a, **options)
        return second(z, b, numerics=numerics, out_dtype=jnp.float32)

    weights = _weight(case, seed), _second(case, seed)
    o = 3 * jax.random.normal(jax.random.key(seed), (case.rows, case.heads, case.width), BF16)
    program, want = Program(total, o, *weights), exact(reference)
    got = program(o, *weights)
    yield near("against ref", got, want(o, *weights), SERVING_REL)
    whole, units = _whole(case, seed)
    yield near(
        "integers",
        program(whole, units, weights[1]),
        want(whole, units, weights[1]),
        REFERENCE_REL_RMS,
    )

    def hide(live: Array) -> tuple[Array, ...]:
        hidden = jnp.where(along_rows(live, o), o, jnp.nan).astype(BF16)
        return hidden, *weights

    yield from rows_alone(program, hide, case.rows, got, np.random.default_rng(seed))
