"""Golden prompts on a layout: every rank has its own requests, each in a stage of its own.

One executable of 16 rows a request serves chunks of prompts, decoded rows, verify widths and idle
places, so that all of them meet in one step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv41_jax.cache import Cache, CacheShape, new_cache
from dsv41_jax.checkpoint.read import read_config
from dsv41_jax.compiling import jit
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from pallas_kernels.numerics import FLOAT32, Numerics
from serving.batch import Segment, build_rows
from serving.buckets import Bucket
from sharding.build import _spread, build_ops
from sharding.collectives import all_reduce
from sharding.place import BY_RANK, Placement, load_placed, place
from tests.compare import assert_abs
from tests.conftest import GOLDENS
from tests.tolerances import SHARDED_ABS

PLACES, WIDTH, PAGES, PAGE = 3, 16, 8, 16
SHAPE = CacheShape(PLACES, PLACES * PAGES, PAGE)
BUCKET = Bucket(PLACES, WIDTH, PAGES)
# Requests of each data rank: several, none, one, ...
PROMPTS = (("p96", "p5", "p37"), (), ("p5",), ("p37", "p96"), (), ("p96",), ("p5", "p5"), ("p37",))
# Rows of the steps after a prompt: decode, verify widths, decode.
AFTER = (1, 6, 1, 4)


@dataclass(frozen=True)
class Golden:
    """One golden request. logits: position -> row; drafts: of the block behind a position."""

    tokens: np.ndarray
    length: int
    logits: dict[int, np.ndarray]
    drafts: dict[int, np.ndarray]

    @classmethod
    def of(cls, name: str) -> "Golden":
        with np.load(GOLDENS / "e2e_fp32.npz") as file:
            arrays = {k.partition(".")[2]: file[k] for k in file.files if k.startswith(f"{name}.")}
        prompt, following = arrays["input_ids"], arrays["decode_tokens"]
        n = len(prompt)
        positions = arrays.get("prefill_positions", np.arange(n))
        logits = dict(zip(positions.tolist(), arrays["prefill_logits"], strict=True))
        logits |= {n + k: row for k, row in enumerate(arrays["decode_logits"])}
        drafts = {n + k: row[1:] for k, row in enumerate(arrays["draft_ids"])}
        return cls(np.concatenate([prompt, following]), n, logits, drafts)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Positions that each step runs."""
        ends = [*range(WIDTH, self.length, WIDTH), self.length]
        ends += [self.length + sum(AFTER[: k + 1]) for k in range(len(AFTER))]
        yield from zip([0, *ends[:-1]], ends, strict=True)


@dataclass(frozen=True)
class Placed:
    """A checkpoint on a layout."""

    placement: Placement
    model: Any
    ops: Ops

    @classmethod
    def of(
        cls, name: str, directory: Any = GOLDENS / "tiny_ckpt", numerics: Numerics = FLOAT32
    ) -> "Placed":
        placement = place(name, read_config(directory))
        model = load_placed(directory, placement, numerics=numerics, speculation=True)
        return cls(placement, model, build_ops(placement.division, numerics, "reference"))

    @property
    def ranks(self) -> int:
        return self.placement.division.ways("batch")

    def new_cache(self) -> Cache:
        cfg, numerics = self.model.cfg, self.ops.numerics

        def empty() -> Cache:
            return new_cache(cfg, numerics, SHAPE, drafts=True)

        return jit(self.placement.over_ranks(empty, (), BY_RANK))()

    @cached_property
    def step(self) -> Callable:
        """(cache, rows) -> cache, logits [B, T, V], tokens [B, T], drafts [B, n]."""
        graph, params = nnx.split(self.model)

        def run(params: nnx.State, cache: Cache, rows: Rows) -> tuple:
            return forward(nnx.merge(graph, params), self.ops, cache, rows)

        specs = (self.placement.parameter_specs(params), BY_RANK, BY_RANK)
        compiled = jit(self.placement.over_ranks(run, specs, BY_RANK))
        return lambda cache, rows: compiled(params, cache, rows)


def forward(model: Any, ops: Ops, cache: Cache, rows: Rows) -> tuple:
    handoff, cache = model.encoder(ops, rows, cache)
    features, cache = model.decoder(ops, rows, handoff, cache)
    logits = model.logits(ops, features.h, features.pre)
    tokens = ops.agree(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    last = jnp.maximum(rows.length - 1, 0)
    opener = tokens[jnp.arange(last.shape[0]), last]
    draft = model.draft(ops, opener, rows.slot, rows.start + rows.length, rows.floor, cache)
    return cache, logits, tokens, draft.ids


@dataclass
class Place:
    """One place of one rank: its request and the spans still to run; none if it is idle."""

    golden: Golden | None
    slot: int
    spans: list[tuple[int, int]]

    def segment(self) -> Segment:
        if self.golden is None or not self.spans:
            return Segment((), 0, 0, 0, ())
        start, stop = self.spans[0]
        pages = range(self.slot * PAGES, (self.slot + 1) * PAGES)
        return Segment(self.golden.tokens, start, stop, self.slot, tuple(pages))


def places_of(ranks: int) -> list[list[Place]]:
    """The places of every rank; slots in falling order, so that a slot is no place."""
    found = []
    for rank in range(ranks):
        names = [*PROMPTS[rank % len(PROMPTS)], *[None] * PLACES][:PLACES]
        goldens = [Golden.of(name) if name else None for name in names]
        found.append(
            [
                Place(golden, PLACES - 1 - i, list(golden.spans()) if golden else [])
                for i, golden in enumerate(goldens)
            ]
        )
    return found


def run_goldens(placed: Placed) -> int:
    """Every request to its end; what this process's devices hold is compared with the goldens after
    each step. Returns the number of compared rows.
    """
    ranks, cache, compared = places_of(placed.ranks), placed.new_cache(), 0
    lookback = placed.model.cfg.engram_max_ngram_size - 1
    while any(each.spans for places in ranks for each in places):
        every = [build_rows([p.segment() for p in places], BUCKET, lookback) for places in ranks]
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *every)
        cache, *out = placed.step(cache, placed.placement.put(rows, BY_RANK))
        for shards in zip(*(array.addressable_shards for array in out), strict=True):
            rank = (shards[0].index[0].start or 0) // PLACES
            parts = [np.asarray(shard.data) for shard in shards]
            for i, mine in enumerate(ranks[rank]):
                compared += compare(mine, *(part[i] for part in parts))
        for each in (each for places in ranks for each in places):
            each.spans = each.spans[1:]
    return compared


def compare(place: Place, logits: np.ndarray, tokens: np.ndarray, drafts: np.ndarray) -> int:
    """The rows of one place after a step."""
    golden = place.golden
    if golden is None or not place.spans:
        return 0
    (start, stop), compared = place.spans[0], 0
    for position in range(start, stop):
        if position in golden.logits:
            want, row = golden.logits[position], position - start
            assert_abs(logits[row], want, SHARDED_ABS, f"position {position}")
            assert tokens[row] == want.argmax()
            compared += 1
    if stop - 1 in golden.drafts:
        np.testing.assert_array_equal(drafts, golden.drafts[stop - 1])
    return compared


def rounded_ops(placement: Placement, numerics: Numerics) -> Ops:
    """Operations that ``psum`` what each rank has rounded, as a peer-to-peer sum takes it."""
    local = build_ops("tp1", numerics, "reference")
    return _spread(local, placement.division, "gather", all_reduce)


def perturbed(ops: Ops, size: float) -> Ops:
    """Operations whose gathered products are off by ``size`` on every tensor rank but the first."""

    def off(*arguments: Any, **options: Any) -> Any:
        y = ops.gathered_linear(*arguments, **options)
        rank = jax.lax.axis_index("model")
        noise = jax.random.normal(jax.random.key(rank), y.shape)
        return y + jnp.where(rank > 0, size, 0).astype(y.dtype) * noise.astype(y.dtype)

    return replace(ops, gathered_linear=off)
