"""Shapes of ``linear``: the matrices of the release and small corners."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.bench import Problem
from pallas_kernels.check import (
    DRAWN,
    Check,
    Program,
    along_rows,
    exact,
    near,
    near_overall,
    ones,
    rows_alone,
    same,
    take,
)
from pallas_kernels.check.bounds import DOT_REL, REFERENCE_REL_RMS, SERVING_REL
from pallas_kernels.linear import ref
from pallas_kernels.linear.op import build_many, build_normed
from pallas_kernels.norm import rms_norm
from pallas_kernels.numerics import REFERENCE, SERVING
from pallas_kernels.quant import Fp8Blocks, dequantized

F32, BF16 = jnp.float32, jnp.bfloat16
EPS = 1e-6  # of the norm
COLD_BYTES = 120e6  # of weights taken in turn: twice what L2 holds


@dataclass(frozen=True)
class Case:
    """x [rows, k] times one matrix or several of ``outputs`` rows; weight: ``fp8``
    (``Fp8Blocks``), ``fp4`` (``Fp4Rows``) or ``plain``. ``early``: weights are read before the
    kernel ahead has ended. ``norm``: behind an RMSNorm of x.
    """

    matrix: str
    rows: int
    outputs: tuple[int, ...]
    k: int
    weight: str = "fp8"
    early: bool = False
    norm: bool = False

    @property
    def n(self) -> int:
        return sum(self.outputs)

    @property
    def nbytes(self) -> float:
        """Codes and scales, inputs and results once."""
        return self.n * self.k * (1 + 1 / 1024) + 2 * self.rows * (self.k + self.n)

    def __str__(self) -> str:
        name = f"matrix={self.matrix},rows={self.rows}"
        return name + ",early=1" * self.early + ",norm=1" * self.norm


MATRICES = {
    "wq_a+wkv": ((1280, 512), 5120),
    "wq_b": ((32768,), 1280),
    "wo_b": ((5120,), 8192),
    "indexer_wq_b": ((4096,), 1280),
    "shared_w1+w3": ((2304, 2304), 5120),
    "shared_w2": ((5120,), 2304),
    "engram_wkv": ((25600,), 6144),
    "wo_b/tp8": ((5120,), 1024),
    "shared_w1+w3/tp8": ((288, 288), 5120),
    "shared_w2/tp8": ((5120,), 288),
    "engram_wkv/tp8": ((3200,), 6144),
}
MAIN = ("wq_a+wkv", "wq_b", "wo_b", "shared_w1+w3", "shared_w2", "engram_wkv")
CASES = (
    *(Case(name, rows, *MATRICES[name]) for name in MAIN for rows in (1, 8, 32, 128)),
    *(
        Case(name, rows, *matrix)
        for name, matrix in MATRICES.items()
        if name not in MAIN
        for rows in (1, 32)
    ),
    *(
        Case(name, rows, *MATRICES[name], early=True)
        for name in ("wq_a+wkv", "wo_b", "shared_w2")
        for rows in (1, 32)
    ),
    *(Case("wq_b", rows, *MATRICES["wq_b"], norm=True) for rows in (1, 8, 32, 128)),
    *(Case("wq_b+indexer", rows, (32768, 4096), 1280, norm=True) for rows in (1, 32)),
    *(Case(name, rows, *MATRICES[name]) for name in MAIN for rows in (512, 8192)),
    *(Case(name, 32768, *MATRICES[name]) for name in ("wq_b", "wo_b")),
)
CHECKED = (
    *CASES,
    Case("odd", 3, (96, 32), 160),
    Case("odd", 4, (1056,), 1056),
    Case("odd", 4, (96, 32), 160, norm=True),
    Case("odd", 17, (64,), 32),
    Case("odd", 50, (1056,), 1056),
    Case("odd", 129, (96, 32), 160),
    Case("odd", 1000, (1056,), 1056),
    Case("odd", 19, (96, 32), 160, norm=True),
    *(Case("draft_main", rows, (5120,), 15360) for rows in (4, 5)),
    Case("draft_main", 60, (5120,), 15360),
    Case("draft_main", 300, (5120,), 15360),
)
CORNERS = (
    Case("one_row", 1, (32,), 32),
    Case("no_row", 0, (32,), 64),
    Case("odd_rows", 7, (96,), 160),
    Case("fp4", 5, (40,), 64, "fp4"),
    Case("plain", 3, (17,), 23, "plain"),
    Case("release_wkv", 2, (512,), 5120),
)


@partial(jax.jit, static_argnums=0)
def inputs(case: Case, seed: int) -> tuple[Array, tuple[Fp8Blocks, ...]]:
    """x bf16 [R, K] and matrices of random codes, scales near 2^-6."""

    def matrix(key: Array, n: int) -> Fp8Blocks:
        a, b = jax.random.split(key)
        codes = jax.random.normal(a, (n, case.k), BF16).astype(jnp.float8_e4m3fn)
        scales = jax.random.randint(b, (n // 32, case.k // 32), 119, 123)
        return Fp8Blocks(codes, scales.astype(jnp.uint8))

    keys = jax.random.split(jax.random.key(seed), 1 + len(case.outputs))
    x = jax.random.normal(keys[0], (case.rows, case.k), BF16)
    return x, tuple(matrix(*pair) for pair in zip(keys[1:], case.outputs, strict=True))


def xla_path(x: Array, weights: tuple[Fp8Blocks, ...]) -> tuple[Array, ...]:
    """The best plain XLA program found: weights dequantised to bf16."""
    dot = partial(jnp.einsum, "rk,nk->rn", preferred_element_type=F32)
    return tuple(dot(x, dequantized(w, BF16)).astype(BF16) for w in weights)


def problem(case: Case, impl: str, seed: int) -> Problem | None:
    if impl != "pallas":
        return None if case.early else timed(case, partial(_waiting, norm=case.norm), seed)
    from pallas_kernels.linear import kernel_sm90

    if case.norm:
        s = kernel_sm90.few(case.rows, case.k, case.outputs, norm=EPS)
        return timed(case, chained(kernel_sm90.few_launcher(s, after=True), _weight(case)), seed)
    options = {"early": case.early, "after": True}
    launch = kernel_sm90.launcher(case.rows, case.k, case.outputs, **options)
    return timed(case, chained(launch), seed)


def _weight(case: Case) -> Array:
    """Of the norm: bf16 near 1."""
    draw = jax.random.normal(jax.random.key(case.k), (case.k,), BF16)
    return 1 + draw / 4


def timed(case: Case, run: Callable, seed: int) -> Problem:
    """Executions of run(results before, x, weights) -> results."""
    executions = 72 if case.rows <= 128 else 4  # the loop around them waits for the host
    sets = min(executions, max(2, -(-int(COLD_BYTES) // (case.n * case.k))))
    data = tuple(inputs(case, seed + i) for i in range(sets))

    def call(i: int, carry: tuple, data: Any) -> tuple:
        return run(carry, *data[i % len(data)])

    return Problem(
        call=call,
        carry=tuple(jnp.zeros((case.rows, n), BF16) for n in case.outputs),
        data=data,
        nbytes=float(case.nbytes),
        flops=2.0 * case.rows * case.n * case.k,
        executions=executions,
    )


def chained(launch: Callable, *norm: Array) -> Callable:
    """A launch with an operand that it does not read, by which each execution waits."""

    def run(carry: tuple, x: Array, weights: tuple[Fp8Blocks, ...]) -> tuple[Array, ...]:
        planes = [plane for w in weights for plane in (w.codes, w.scales)]
        return tuple(launch(x, *planes, *norm, carry[0]))

    return run


def _waiting(
    carry: tuple, x: Array, weights: tuple[Fp8Blocks, ...], *, norm: bool = False
) -> tuple[Array, ...]:
    """Scales plus zero: each execution waits for all results of the one before it."""
    zero = jnp.asarray(0 * sum(c[0, 0] for c in carry)).astype(jnp.uint8)
    x = rms_norm(x, jnp.ones(x.shape[-1:], BF16), EPS) if norm else x
    return xla_path(x, tuple(Fp8Blocks(w.codes, w.scales + zero) for w in weights))


@partial(jax.jit, static_argnums=0)
def _integers(case: Case, seed: int) -> tuple[Array, tuple[Fp8Blocks, ...]]:
    """As ``inputs``: every order of addition gives the same sums, all of which bf16 holds."""

    def matrix(key: Array, n: int) -> Fp8Blocks:
        codes = jax.random.randint(key, (n, case.k), -1, 2).astype(F32)
        at = jnp.add.outer(jnp.arange(n // 32), jnp.arange(case.k // 32))
        return Fp8Blocks(codes.astype(jnp.float8_e4m3fn), (126 + at % 3).astype(jnp.uint8))

    keys = jax.random.split(jax.random.key(seed), 1 + len(case.outputs))
    # One column in 64 is not zero: sums of halves stay below 128 in size.
    x = jax.random.randint(keys[0], (case.rows, case.k), -1, 2)
    x = jnp.where(jax.random.uniform(keys[0], x.shape) < 1 / 64, x, 0).astype(BF16)
    return x, tuple(matrix(*pair) for pair in zip(keys[1:], case.outputs, strict=True))


def _kernel(case: Case) -> Callable:
    if case.norm:
        return partial(_normed, build_normed("mosaic"), _weight(case))
    if not case.early:
        return build_many("mosaic")
    from pallas_kernels.linear import kernel_sm90

    return partial(kernel_sm90.linears, early=True)


def _normed(run: Callable, norm: Array, x: Array, weights: Any, **options: Any) -> tuple:
    return run(x, norm, weights, eps=EPS, **options)


@jax.jit
def _worst(got: Array, want: Array, x: Array, w: Fp8Blocks) -> Array:
    """The largest difference of two results over the norms of the factors."""
    norms = jnp.linalg.norm(x.astype(F32), axis=1)[:, None]
    norms = norms * jnp.linalg.norm(dequantized(w, F32), axis=1)
    return jnp.max(jnp.abs(got - want) / norms)


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """Of many rows ``DRAWN`` are compared with the reference."""
    run = run or _kernel(case)
    x, weights = inputs(case, seed)
    drawn = np.sort(np.random.default_rng(seed).permutation(case.rows)[:DRAWN])
    kinds = [("serving", SERVING, None), ("reference", REFERENCE, None), ("sums", SERVING, F32)]
    given = x[drawn]
    if case.norm:
        del kinds[2]
        given = exact(partial(rms_norm, eps=EPS))(given, _weight(case))
    for kind, numerics, out_dtype in kinds:
        options = {"numerics": numerics} | ({} if case.norm else {"out_dtype": out_dtype})
        program = Program(partial(run, **options), x, weights)
        want = exact(partial(ref.linear, **options))
        results = take(program(x, weights), drawn)
        for i, (got, w) in enumerate(zip(results, weights, strict=True)):
            name, expected = f"{kind}: drawn rows of matrix {i}", want(given, w)
            if out_dtype is not None:
                yield Check(name, float(_worst(got, expected, x[drawn], w)), DOT_REL)
            elif numerics is SERVING:
                yield near(name, got, expected, SERVING_REL)
            else:
                yield near_overall(name, got, expected, REFERENCE_REL_RMS)
        if kind == "serving":
            yield from _properties(case, seed, program)


def _properties(case: Case, seed: int, program: Program) -> Iterator[Check]:
    rng = np.random.default_rng(seed)
    whole, weights = _integers(case, seed)
    drawn = np.sort(rng.permutation(case.rows)[:DRAWN])
    if not case.norm:  # whose quotients are no integers
        want = exact(partial(ref.linear, numerics=SERVING))
        expected = tuple(want(whole[drawn], w) for w in weights)
        yield same("integers, bits", take(program(whole, weights), drawn), expected)

    x, weights = inputs(case, seed)
    got = program(x, weights)
    yield same("another run", program(x, weights), got)

    def hide(live: Array) -> tuple:
        return jnp.where(along_rows(live, x), x, ones(x)), weights

    yield from rows_alone(program, hide, case.rows, got, rng)
    order = rng.permutation(case.rows)
    yield same("rows in another order", program(x[order], weights), take(got, order))
