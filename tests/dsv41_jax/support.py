"""The golden tiny model, compiled once a process, and the rows that feed it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dsv41_jax import compiling
from dsv41_jax.cache import Cache, CacheShape, Handoff, new_cache
from dsv41_jax.checkpoint.load import load_model
from dsv41_jax.dspark import Draft
from dsv41_jax.model import Features, Model
from dsv41_jax.ops import local_ops
from dsv41_jax.rows import Rows
from pallas_kernels.numerics import Numerics
from tests.conftest import GOLDENS

PAGE, PAGES, SLOTS = 16, 8, 2
SHAPE = CacheShape(SLOTS, PAGES, PAGE)
BUCKETS = (1, 96)  # a program each; a prompt takes the smallest that holds it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """What one pass over rows gives; arrays [1, T, ...], rows beyond the live ones mean nothing."""

    logits: Array
    handoff: Handoff
    features: Features
    cache: Cache


class Tiny:
    """The golden tiny model in one of the numerics."""

    def __init__(self, name: str):
        self.numerics = Numerics.named(name)
        self.model: Model = load_model(
            GOLDENS / "tiny_ckpt", numerics=self.numerics, speculation=True
        )
        self.cfg = self.model.cfg
        self.ops = local_ops(self.numerics)
        self.graph, self.state = nnx.split(self.model)

    def cache(self) -> Cache:
        """An empty cache, committed to its device as results are: one program takes both."""
        empty = new_cache(self.cfg, self.numerics, SHAPE, drafts=True)
        return jax.device_put(empty, jax.devices()[0])

    def poisoned(self) -> Cache:
        """A cache whose rows are all unwritten: NaN in every float, 0xFF in every packed byte."""
        empty = self.cache()
        names = "pools", "windows", "pairs", "drafts"
        rows = {name: jax.tree.map(poison, getattr(empty, name)) for name in names}
        tags = [ring.tags for ring in jax.tree.leaves(rows, is_leaf=_is_ring) if _is_ring(ring)]
        assert all(bool((tag == -1).all()) for tag in tags)
        return replace(empty, **rows)

    @cached_property
    def _forward(self) -> Any:
        def forward(state: Any, rows: Rows, cache: Cache) -> Forward:
            model = nnx.merge(self.graph, state)
            handoff, cache = model.encoder(self.ops, rows, cache)
            features, cache = model.decoder(self.ops, rows, handoff, cache)
            logits = model.logits(self.ops, features.h, features.pre)
            return Forward(logits, handoff, features, cache)

        return compiling.jit(forward)

    @cached_property
    def _draft(self) -> Any:
        def draft(state: Any, *arguments: Any) -> Draft:
            return nnx.merge(self.graph, state).draft(self.ops, *arguments)

        return compiling.jit(draft)

    def forward(self, rows: Rows, cache: Cache) -> Forward:
        return self._forward(self.state, rows, cache)

    def draft(self, token: int, start: int, cache: Cache) -> Draft:
        """The block that ``token`` opens at position ``start`` of slot 0."""
        zero = jnp.zeros(1, jnp.int32)
        return self._draft(
            self.state, jnp.asarray([token], jnp.int32), zero, zero + start, zero, cache
        )

    def module(self, function: Any) -> Any:
        """``function(model, *arguments)`` compiled as the programs are."""
        run = compiling.jit(lambda state, *a: function(nnx.merge(self.graph, state), *a))
        return lambda *arguments: run(self.state, *arguments)


@cache
def tiny(name: str) -> Tiny:
    return Tiny(name)


def rows_for(
    ids: Sequence[int],
    start: int = 0,
    *,
    slot: int = 0,
    size: int | None = None,
    before: Sequence[int] = (),
    image: np.ndarray | None = None,
    floor: int = 0,
    decoder_floor: int = 0,
    write_from: int = 0,
    pad: int = 0,
) -> Rows:
    """One request's rows in a bucket of ``size`` places, padded with the id ``pad``; the tokens
    ``before`` are its history.
    """
    size = size or next(bucket for bucket in BUCKETS if bucket >= len(ids))
    tokens = np.full((1, size), pad, np.int32)
    tokens[0, : len(ids)] = ids
    spans = np.zeros((1, size), bool)
    if image is not None:
        spans[0, : len(ids)] = image
    previous = np.full((1, 3), -1, np.int32)
    if len(before):
        tail = list(before)[-3:]
        previous[0, -len(tail) :] = tail

    def one(value):
        return jnp.asarray([value], jnp.int32)

    return Rows(
        tokens=jnp.asarray(tokens),
        image=jnp.asarray(spans),
        start=one(start),
        length=one(len(ids)),
        slot=one(slot),
        page_table=jnp.arange(PAGES, dtype=jnp.int32)[None],
        floor=one(floor),
        decoder_floor=one(decoder_floor),
        write_from=one(write_from),
        previous=jnp.asarray(previous),
    )


def poison(plane: Array) -> Array:
    """NaN, or all bits set, in a plane of cache rows; tags stay."""
    if plane.dtype == jnp.int32 or plane.dtype == jnp.uint8:
        return jnp.full_like(plane, -1 if plane.dtype == jnp.int32 else 255)
    return jnp.full_like(plane, jnp.nan)


def _is_ring(node: Any) -> bool:
    return hasattr(node, "tags")
