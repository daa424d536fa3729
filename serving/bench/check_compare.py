"""Rows of two runs compared: relative error and cosine of each, the worst of them shown; and what
both chose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsv41_jax.cache import Cache
from dsv41_jax.compiling import jit
from pallas_kernels.quant.storage import StoredRows


@dataclass(frozen=True)
class Tolerance:
    """Of rows of activations, and of rows that a cache holds rounded to FP8 or FP4: there a small
    difference before the rounding can be a whole step behind it. picks: the share of routers' and
    indexers' picks that may differ; by chance alone most would.
    """

    rel: float
    cosine: float
    stored_rel: float
    picks: float = 0.1

    def __str__(self) -> str:
        return (
            f"a row's relative error at most {self.rel:g}, cosine at least {self.cosine:g};"
            f" relative error of stored rows together at most {self.stored_rel:g}; at most"
            f" {self.picks:g} of picks differ"
        )


@dataclass(frozen=True)
class Compared:
    """What came of one value. rows: how many were compared; rel, cosine: of the worst row; overall:
    relative error of all together.
    """

    name: str
    rows: int
    rel: float
    cosine: float
    overall: float
    stored: bool = False

    def within(self, limit: Tolerance) -> bool:
        if self.stored:
            return self.overall <= limit.stored_rel
        return self.rel <= limit.rel and self.cosine >= limit.cosine

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.rows} rows, worst relative error {self.rel:.2e}, worst cosine"
            f" {self.cosine:.6f}, all together {self.overall:.2e}"
        )


@dataclass(frozen=True)
class Picks:
    """How many picks of an operation the other run did not make."""

    name: str
    picks: int
    different: int

    def within(self, limit: Tolerance) -> bool:
        return self.different <= limit.picks * self.picks

    def __str__(self) -> str:
        return f"{self.name}: {self.different} of {self.picks} picks differ"


Value = Compared | Picks


def compared_picks(name: str, got: list, want: list) -> Picks:
    """Ids int [..., k], the first of each call's results, -1 for none; in whatever order."""
    picks = different = 0
    for (one, *_), (two, *_) in zip(jax.device_get(got), jax.device_get(want), strict=True):
        missing = (two >= 0) & ~np.any(two[..., :, None] == one[..., None, :], axis=-1)
        picks += int((two >= 0).sum())
        different += int(missing.sum())
    return Picks(name, picks, different)


def compared(name: str, got: Array, want: Array) -> Compared:
    """Rows [..., K]; what is not finite in either counts as an infinite error."""
    return _of_numbers(name, _errors(got, want))


def compared_caches(before: Cache, got: Cache, want: Cache) -> Iterator[Compared]:
    """Every array of floats, and of stored rows, by its path: the rows that either run changed.
    Positions of rings must be the same.
    """
    numbers, different = jax.device_get(_cache_errors(before, got, want))
    for path, (values, stored) in numbers.items():
        if values[0]:
            yield _of_numbers(path, values, stored=bool(stored))
    for path, count in different.items():
        yield Compared(f"{path} differ", int(count), float(count > 0), 1.0, 0.0)


def _of_numbers(name: str, numbers: tuple, *, stored: bool = False) -> Compared:
    rows, rel, cosine, overall = numbers
    return Compared(name, int(rows), float(rel), float(cosine), float(overall), stored)


def _of_rows(got: Array, want: Array, live: Array | bool = True) -> tuple[Array, ...]:
    """Rows, the worst relative error and cosine among them, the relative error of all."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    off, size, other = (jnp.sqrt(jnp.sum(a * a, axis=-1)) for a in (got - want, want, got))
    live = jnp.broadcast_to(live, off.shape)
    equal = (off == 0) | ~live
    rel = jnp.where(equal, 0, off / size)
    cosine = jnp.where(equal, 1, jnp.sum(got * want, axis=-1) / (size * other))
    whole = jnp.maximum(jnp.sum(jnp.where(live, size**2, 0)), 1e-30)
    overall = jnp.sqrt(jnp.sum(jnp.where(equal, 0, off**2)) / whole)
    return (
        jnp.sum(live),
        jnp.max(jnp.where(jnp.isfinite(rel), rel, jnp.inf), initial=0),
        jnp.min(jnp.where(jnp.isfinite(cosine), cosine, -1), initial=1),
        jnp.where(jnp.isfinite(overall), overall, jnp.inf),
    )


def _of_caches(before: Cache, got: Cache, want: Cache) -> tuple[dict, dict]:
    """By path, numbers and whether the rows are stored ones; differing positions of rings."""
    old, one, two = (_rows(cache) for cache in (before, got, want))
    numbers, different = {}, {}
    for path, rows in two.items():
        stored = isinstance(rows, StoredRows)
        if stored or jnp.issubdtype(rows.dtype, jnp.floating):
            changed = _changed(old[path], one[path]) | _changed(old[path], rows)
            mine, theirs = one[path], rows
            if stored:
                mine, theirs = mine.decode(jnp.float32), theirs.decode(jnp.float32)
            numbers[path] = _of_rows(mine, theirs, changed), stored
        elif path.endswith(".tags"):
            different[path] = jnp.sum(one[path] != rows)
    return numbers, different


_errors, _cache_errors = jit(_of_rows), jit(_of_caches)


def _changed(old: Any, new: Any) -> Array:
    """bool [...]: rows of which some plane changed."""
    planes = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    parts = [jnp.any(a != b, axis=-1) for a, b in planes]
    return jnp.any(jnp.stack(parts), axis=0)


def _rows(cache: Cache) -> dict[str, Any]:
    flat, _ = jax.tree.flatten_with_path(cache, is_leaf=lambda leaf: isinstance(leaf, StoredRows))
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in flat}
