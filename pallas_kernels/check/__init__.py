"""What a kernel is checked with on a GPU; ``python -m pallas_kernels.check`` is the command.

An op takes part by ``CHECKED`` (cases) and ``checks(case, seed, run=None) -> Iterator[Check]`` in
its ``cases`` module; ``run`` stands in for the Hopper kernel, with the op's contract.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

F32 = jnp.float32
DRAWN = 128  # rows of a large case that are compared with the reference
LIVE = (1, 2, 17)  # rows of a batch that are not padding


@dataclass(frozen=True)
class Check:
    """One comparison; an error of NaN is above every bound."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound


def exact(function: Callable) -> Callable:
    """``jax.jit`` that keeps every rounding, as the product's programs do, and that measures no
    alternatives, which takes longer than the reference itself.
    """
    options = {"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0}
    return jax.jit(function, compiler_options=options)


class Program:
    """A function compiled for the shapes of ``args``. Before each execution the memory that it is
    likely to get is filled with NaN and 1e30 in turn, so that what nobody writes shows.
    """

    def __init__(self, function: Callable, *args: Any):
        self.compiled = exact(function).lower(*args).compile()
        memory = self.compiled.memory_analysis()
        self.sizes = [memory.temp_size_in_bytes]
        self.sizes += [a.size * a.dtype.itemsize for a in jax.tree.leaves(self.compiled.out_info)]
        self.runs = 0

    def __call__(self, *args: Any) -> Any:
        value = (jnp.nan, 1e30)[self.runs % 2]
        self.runs += 1
        dirt = [jnp.full(-(-size // 4), value, F32) for size in self.sizes]
        jax.block_until_ready(dirt)
        del dirt
        return jax.block_until_ready(self.compiled(*args))


def ones(like: Array) -> Array:
    """A scalar of the dtype with all bits set: NaN, -1 or the largest unsigned integer."""
    unsigned = jnp.dtype(f"uint{8 * like.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(~jnp.zeros((), unsigned), like.dtype)


@jax.jit
def _different(got: Array, want: Array, live: Array | None) -> Array:
    unsigned = jnp.dtype(f"uint{8 * got.dtype.itemsize}")
    a, b = (jax.lax.bitcast_convert_type(x, unsigned) for x in (got, want))
    return jnp.sum((a != b) if live is None else (a != b) & along_rows(live, a))


def same(name: str, got: Any, want: Any, live: Array | None = None) -> Check:
    """How many elements of two trees, in the rows ``live`` (bool [rows]), differ in their bits;
    none may.
    """
    count = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        fits = a.shape == b.shape and a.dtype == b.dtype
        count += float(_different(a, b, live)) if fits else np.inf
    return Check(name, count, 0)


@jax.jit
def take(tree: Any, rows: Array) -> Any:
    """Rows of every array of a tree."""
    return jax.tree.map(lambda a: a[rows], tree)


@jax.jit
def _relative(got: Array, want: Array) -> Array:
    got, want = got.astype(F32), want.astype(F32)
    error = jnp.linalg.norm(got - want, axis=-1)
    return jnp.max(jnp.where(error == 0, 0, error / jnp.linalg.norm(want, axis=-1)))


def near(name: str, got: Array, want: Array, bound: float) -> Check:
    """The largest relative error of a row [..., K]: |got - want| / |want|, and 0 for equal rows."""
    return Check(name, float(_relative(got, want)), bound)


@jax.jit
def _angles(got: Array, want: Array) -> Array:
    got, want = got.astype(F32), want.astype(F32)
    lengths = jnp.linalg.norm(got, axis=-1) * jnp.linalg.norm(want, axis=-1)
    equal = jnp.all(got == want, axis=-1)
    return jnp.max(jnp.where(equal, 0, 1 - jnp.sum(got * want, axis=-1) / lengths))


def aligned(name: str, got: Array, want: Array, bound: float) -> Check:
    """The largest 1 - cosine of a row [..., K]."""
    return Check(name, float(_angles(got, want)), bound)


@jax.jit
def _rms(got: Array, want: Array) -> Array:
    got, want = got.astype(F32), want.astype(F32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def near_overall(name: str, got: Array, want: Array, bound: float) -> Check:
    """The relative error of two arrays as wholes."""
    return Check(name, float(_rms(got, want)), bound)


def rows_alone(
    program: Callable, hide: Callable, rows: int, got: Any, rng: np.random.Generator, kind: str = ""
) -> Iterator[Check]:
    """Whether 1, 2 and 17 drawn rows of ``got`` (leading axis) keep their bits when ``hide(live
    bool [rows])`` has poisoned the inputs of all others.
    """
    for count in LIVE:
        if count < rows:
            live = jnp.asarray(rng.permutation(rows) < count)
            alone = program(*hide(live))
            yield same(f"{kind}{count} of {rows} rows, the others poisoned", alone, got, live)


def along_rows(live: Array, like: Array) -> Array:
    """``live`` [rows] with as many axes as ``like`` [rows, ...]."""
    return live.reshape(-1, *[1] * (like.ndim - 1))
