"""Shapes of the hyper-connection ops, shared by tests and ``pallas_kernels.bench``."""

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
from pallas_kernels.check.bounds import DOT_REL, SERVING_REL
from pallas_kernels.mhc import ref
from pallas_kernels.mhc.op import build_coefficients, build_expand_collapse_norm, build_site

F32, BF16 = jnp.float32, jnp.bfloat16
EPS, NORM_EPS = 1e-6, 1e-20
COLD_BYTES = 75e6  # of parameters taken in turn: more than L2 holds
PARTS = ("fused", "coefficients", "site")


@dataclass(frozen=True)
class Case:
    """rows R of ``streams`` S streams of ``width`` D; ``part`` fused: expand, collapse and norm,
    coefficients, or site: the one, then the other from the streams it wrote, in one operation.
    """

    rows: int
    streams: int = 4
    width: int = 5120
    iters: int = 20
    part: str = "site"

    @property
    def mixes(self) -> int:
        return (2 + self.streams) * self.streams

    @property
    def nbytes(self) -> int:
        """Each array once: streams and sublayer rows in bf16, parameters in float32."""
        fused = 2 * self.width * self.rows * (2 * self.streams + 2) + 2 * self.width
        read = self.streams * self.width * (2 * self.rows + 4 * self.mixes)
        return {"fused": fused, "coefficients": read, "site": fused + read}[self.part]

    @property
    def flops(self) -> int:
        products = 2 * self.rows * self.mixes * self.streams * self.width
        return 0 if self.part == "fused" else products

    def __str__(self) -> str:
        return f"part={self.part},rows={self.rows},streams={self.streams},width={self.width}"


CASES = tuple(Case(rows, part=part) for part in PARTS for rows in (1, 8, 32, 128, 2048, 8192))
CHECKED = (
    *(
        Case(rows, part=part)
        for part in ("fused", "coefficients")
        for rows in (1, 2, 17, 128, 200, 300, 1000, 2000, 4000, 8192)
    ),
    *(Case(rows, part="site") for rows in (1, 2, 7, 8)),
    Case(3, width=1024, part="site"),
)
MIX = {"eps": EPS, "mix_eps": NORM_EPS}  # of a site, besides iterations and the norm's eps
CORNERS = (
    Case(1, width=256),
    Case(0, width=256),
    Case(37, width=256),
    Case(3, streams=2, width=96),
)


def parameters(case: Case, seed: int) -> tuple[Array, Array, Array]:
    """fn, base and scale of one site."""
    keys = jax.random.split(jax.random.key(seed), 3)
    fn = 0.02 * jax.random.normal(keys[0], (case.mixes, case.streams * case.width), F32)
    scale = 0.5 * jax.random.normal(keys[2], (3,), F32)
    return fn, jax.random.normal(keys[1], (case.mixes,), F32), scale


def _waiting(
    case: Case, mix: Callable | None, h: Array, fn: Array, base: Array, before: Array
) -> tuple[Array, ...]:
    """Coefficients of h with the first words of ``before`` as scale, so that they wait for it. The
    kernel takes it whole: a slice would be a launch, which XLA's own op has none of.
    """
    if mix is not None:
        return mix(h, fn, base, before[:3])
    from pallas_kernels.mhc import kernel_sm90

    options = {"iters": case.iters, "eps": EPS, "norm_eps": NORM_EPS}
    pre, post, comb = kernel_sm90.mix(h.reshape(case.rows, -1), fn, base, before, **options)
    return pre, post, comb.reshape(case.rows, case.streams, case.streams)


def problem(case: Case, impl: str, seed: int) -> Problem:
    """A chain of sites, each of which takes the streams and the normed rows of the one before."""
    kernels = "mosaic" if impl == "pallas" else "reference"
    mix: Callable = partial(
        build_coefficients(kernels), iters=case.iters, eps=EPS, norm_eps=NORM_EPS
    )
    fused: Callable = partial(build_expand_collapse_norm(kernels), norm_eps=NORM_EPS)
    site: Callable = partial(build_site(kernels), norm_eps=NORM_EPS, iters=case.iters, **MIX)
    waiting = partial(_waiting, case, mix if impl == "xla" else None)
    fn_bytes = 4 * case.mixes * case.streams * case.width
    executions = 36 if case.rows <= 128 else 8
    sets = max(1, min(executions, int(COLD_BYTES // fn_bytes))) if case.part != "fused" else 1
    sites = tuple(parameters(case, seed + i) for i in range(sets))
    keys = jax.random.split(jax.random.key(seed), 2)
    h = jax.random.normal(keys[0], (case.rows, case.streams, case.width), BF16)
    y = jax.random.normal(keys[1], (case.rows, case.width), BF16)
    coefficients = jax.jit(build_coefficients("reference"), static_argnames=("iters",))(
        h, *sites[0], iters=case.iters, eps=EPS, norm_eps=NORM_EPS
    )

    # Each execution's coefficients are kept: XLA leaves out those that nobody takes.
    whole = case.part == "coefficients"
    carry = (coefficients,) * executions if whole else (h, y, coefficients)

    def call(i: int, carry: Any, data: Any) -> Any:
        sites, weight, streams = data
        fn, base, scale = sites[i % len(sites)]
        if whole:
            # Without the barrier XLA makes one product of those of all executions.
            streams, before = jax.lax.optimization_barrier((streams, carry[i - 1][0]))
            return (*carry[:i], waiting(streams, fn, base, before.reshape(-1)), *carry[i + 1 :])
        h, y, (pre, post, comb) = carry
        if case.part == "site":
            return site(h, y, post, comb, pre, weight, fn, base, scale)
        return (*fused(h, y, post, comb, pre, weight), (pre, post, comb))

    return Problem(
        call=call,
        carry=carry,
        data=(sites, jnp.ones(case.width, BF16), h if whole else None),
        nbytes=float(case.nbytes),
        flops=float(case.flops),
        executions=executions,
    )


def _inputs(case: Case, seed: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Arrays of rows, then those that all rows share, of the case's part."""
    keys = jax.random.split(jax.random.key(seed), 6)
    lead, s = (case.rows, case.streams), case.streams
    h = 3 * jax.random.normal(keys[0], (*lead, case.width), BF16)
    if case.part == "coefficients":
        return (h,), parameters(case, seed + 1)
    y = jax.random.normal(keys[1], (case.rows, case.width), BF16)
    post, pre = (2 * jax.random.uniform(key, lead, F32) for key in keys[2:4])
    comb = jax.random.uniform(keys[4], (*lead, s), F32)
    weight = 1 + jax.random.normal(keys[5], (case.width,), BF16) / 8
    mixing = parameters(case, seed + 1) if case.part == "site" else ()
    return (h, y, post, comb, pre), (weight, *mixing)


def checks(case: Case, seed: int, run: Callable | None = None) -> Iterator[Check]:
    """Against ``ref``, with all other rows poisoned, and on integers, whose sums are exact."""
    iters, norm = {"iters": case.iters}, {"norm_eps": NORM_EPS}
    mixing = iters | norm | {"eps": EPS}
    parts: dict[str, tuple[Callable, Callable, dict[str, Any]]] = {
        "fused": (build_expand_collapse_norm, ref.expand_collapse_norm, norm),
        "coefficients": (build_coefficients, ref.coefficients, mixing),
        "site": (build_site, build_site("reference"), iters | norm | MIX),
    }
    build, reference, options = parts[case.part]
    rows, shared = _inputs(case, seed)
    program = Program(partial(run or build("mosaic"), **options), *rows, *shared)
    want = exact(partial(reference, **options))
    got = program(*rows, *shared)
    if case.part != "fused":
        mixed, streams = (got[2], got[0]) if case.part == "site" else (got, rows[0])
        expected = exact(partial(ref.coefficients, **mixing))(streams, *shared[-3:])
        for name, a, b in zip(("pre", "post", "comb"), mixed, expected, strict=True):
            yield Check(f"{name} against ref", float(jnp.max(jnp.abs(a - b))), 10 * DOT_REL)
    if case.part != "coefficients":
        for name, a, b in zip(("streams", "normed"), got, want(*rows, *shared), strict=False):
            yield near(f"{name} against ref", a, b, SERVING_REL)
        integers = tuple(jnp.round(a) for a in rows)
        sums = [f(*integers, *shared)[0] for f in (program, want)]
        yield same("streams of integers, values", *(jnp.where(a == 0, 0, a) for a in sums))

    def hide(live: Array) -> tuple[Array, ...]:
        hidden = (jnp.where(along_rows(live, a), a, jnp.nan).astype(a.dtype) for a in rows)
        return (*hidden, *shared)

    yield from rows_alone(program, hide, case.rows, got, np.random.default_rng(seed))
