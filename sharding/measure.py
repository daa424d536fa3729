"""Step times of a layout on the devices at hand, and the collectives of its compiled step.

A step is the model's forward with the head and a greedy token, without the scheduler; every rank
has the same number of requests, each of which stands at the end of its context.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.experimental import multihost_utils

from dsv41_jax.cache import Cache, CacheShape, Handoff, new_cache
from dsv41_jax.command import progress_line
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from dsv41_jax.rows import Rows
from pallas_kernels.numerics import SERVING, Numerics
from sharding.all_reduce import peer_memory
from sharding.build import build_ops
from sharding.estimate import ShardedModel
from sharding.hlo import Traffic, collectives
from sharding.peer import PeerMemory
from sharding.place import BY_RANK, Placement, load_placed, place
from sharding.random_weights import random_model
from sharding.repack import repack_placed
from sharding.roofline import Step

_REPEATS, _LEAST_SECONDS, _MOST_STEPS = 3, 0.2, 100


@dataclass(frozen=True)
class Measured:
    """step_us: microseconds of one step, the best of a few runs of several. collectives: of one
    step, by kind.
    """

    step_us: float
    collectives: dict[str, Traffic]


@dataclass(frozen=True)
class PlacedStep:
    """One step of a placed model; its cache is made anew for each measurement. peers: the kernel
    ("mosaic" or "reference") of sums over tensor ranks if ``ops`` are built for "peer".
    """

    model: Model
    ops: Ops
    placement: Placement
    step: Step
    page_size: int = 64
    peers: str = ""

    @property
    def requests(self) -> int:
        """Of one rank."""
        return -(-self.step.batch // self.placement.division.ways("batch"))

    @property
    def pages(self) -> int:
        """Of one request."""
        return -(-(self.step.context + self.width) // self.page_size)

    @property
    def width(self) -> int:
        """Rows of one request."""
        drafts = self.model.cfg.dspark_block_size
        return {"decode": 1, "verify": 1 + drafts, "prefill": self.step.context}[self.step.phase]

    def rows(self) -> Rows:
        """Of all ranks; slots and pages count from 0 on each of them."""
        b, t = self.requests, self.width
        start = 0 if self.step.phase == "prefill" else self.step.context
        ids = np.random.default_rng(0).integers(0, self.model.cfg.vocab_size, (b, t), np.int32)

        def column(value: int) -> np.ndarray:
            return np.full(b, value, np.int32)

        one = Rows(
            tokens=ids,
            image=np.zeros((b, t), bool),
            start=column(start),
            length=column(t),
            slot=np.arange(b, dtype=np.int32),
            page_table=np.arange(b * self.pages, dtype=np.int32).reshape(b, self.pages),
            floor=column(0),
            decoder_floor=column(0),
            write_from=column(0),
            previous=np.full((b, self.model.cfg.engram_max_ngram_size - 1), -1, np.int32),
        )
        ranks = self.placement.division.ways("batch")
        every = jax.tree.map(lambda leaf: np.concatenate([leaf] * ranks), one)
        return self.placement.put(every, BY_RANK)

    def cache(self) -> Cache:
        """An empty cache for the requests of every rank."""
        return jit(self._empty)()

    def memory(self) -> PeerMemory | None:
        """What the sums over tensor ranks need; None where ``psum`` does them."""
        return peer_memory(self.placement, self.peers, self.requests * self.width)

    def compiled(self, memory: PeerMemory | None = None) -> jax.stages.Compiled:
        """The executable of (parameters, cache, rows) -> (cache, tokens); the cache is donated.
        memory: also of its table, and to the errors of the step.
        """
        graph, params = nnx.split(self.model)
        cache = self.placement.shapes(jax.eval_shape(self._empty), BY_RANK)

        def run(params: nnx.State, cache: Cache, rows: Rows, *table: Array) -> tuple:
            model = nnx.merge(graph, params)
            if memory is None:
                return forward(model, self.ops, cache, rows, self.step)
            with memory.calls(*table) as calls:
                cache, tokens = forward(model, self.ops, cache, rows, self.step)
                return cache, tokens, calls.finish()

        inputs = (self.placement.parameter_specs(params), BY_RANK, BY_RANK)
        outputs, table = (BY_RANK, BY_RANK), ()
        if memory is not None:
            spec, table = memory.table_spec, (memory.table,)
            inputs, outputs = (*inputs, spec), (*outputs, spec)
        function = jit(self.placement.over_ranks(run, inputs, outputs), donate=(1,))
        return function.lower(params, cache, self.rows(), *table).compile()

    def measure(self) -> Measured:
        """Compile, warm up and time the step."""
        memory = self.memory()
        compiled = self.compiled(memory)
        params, rows, cache = nnx.split(self.model)[1], self.rows(), self.cache()
        table = () if memory is None else (memory.table,)

        def run(count: int) -> float:
            nonlocal cache
            began = time.perf_counter()
            results: list = []
            for _ in range(count):
                cache, *results = compiled(params, cache, rows, *table)
            jax.block_until_ready(results)
            seconds = (time.perf_counter() - began) / count
            if memory is not None:
                memory.check(results[-1], self.step.phase)
            return seconds

        run(1)
        count = _of_first(min(_MOST_STEPS, max(1, round(_LEAST_SECONDS / run(1)))))
        best = min(run(count) for _ in range(_REPEATS))
        return Measured(best * 1e6, collectives(compiled.as_text()))

    @property
    def _empty(self) -> Callable[[], Cache]:
        shape = CacheShape(self.requests, self.requests * self.pages, self.page_size)
        cfg, numerics = self.model.cfg, self.ops.numerics
        return self.placement.over_ranks(lambda: new_cache(cfg, numerics, shape), (), BY_RANK)


def _of_first(count: int) -> int:
    """What process 0 has counted: all of them must run the same steps."""
    if jax.process_count() == 1:
        return count
    return int(multihost_utils.broadcast_one_to_all(np.int32(count)))


def forward(model: Model, ops: Ops, cache: Cache, rows: Rows, step: Step) -> tuple[Cache, Array]:
    """All layers and a greedy token for every row that needs one: the last one of prefill, all of
    the others. Under bounded replay prefill runs the last layers on the last rows only.
    """
    if step.phase == "prefill" and step.bounded_replay:
        handoff, cache = model.encoder(ops, rows, cache)
        features, cache = model.decoder(ops, *_tail(model.cfg, rows, handoff), cache)
    else:
        features, cache = model.layers_over(ops, rows, cache)
    last = -1 if step.phase == "prefill" else 0
    logits = model.scores(ops, features.normed[:, last:])
    return cache, ops.agree(jnp.argmax(logits, axis=-1).astype(jnp.int32))


def _tail(cfg: Config, rows: Rows, handoff: Handoff) -> tuple[Rows, Handoff]:
    width = rows.tokens.shape[1]
    kept = min(cfg.sliding_window, width)
    start = rows.start + (width - kept)
    shorter = replace(
        rows,
        tokens=rows.tokens[:, -kept:],
        image=rows.image[:, -kept:],
        start=start,
        length=jnp.full_like(rows.length, kept),
        decoder_floor=start,
    )
    return shorter, jax.tree.map(lambda leaf: leaf[:, -kept:], handoff)


@dataclass(frozen=True)
class Meter:
    """Fills the measured columns of a sweep. checkpoint: a directory, or None for random weights.
    all_reduce: of ``ALL_REDUCES``. dispatch: of ``DISPATCHES``. Several processes time the same
    steps together, and read their own clocks.
    """

    checkpoint: str | None
    numerics: Numerics = SERVING
    kernels: str = "auto"
    all_reduce: str = "psum"
    dispatch: str = "gather"

    def fill(
        self, rows: list[dict[str, Any]], models: Iterable[ShardedModel], steps: Iterable[Step]
    ) -> None:
        """Measure the layouts one after the other; ``rows`` are those of every step and model, in
        this order.
        """
        models, steps = list(models), list(steps)
        for i, model in enumerate(models):
            placement = place(model.layout.name, model.cfg)
            loaded = self._model(model, placement)
            options = self.numerics, self.kernels, self.all_reduce, self.dispatch
            ops = build_ops(placement.division, *options)
            for j, step in enumerate(steps):
                progress_line(f"measure {model.layout.name} {step.phase} {step.batch}")
                found = PlacedStep(loaded, ops, placement, step, peers=self.peers).measure()
                row = rows[j * len(models) + i]
                row["step_us_measured"] = found.step_us
                row["estimate_error"] = row["step_us_estimated"] / found.step_us - 1
                row["collectives"] = {k: asdict(t) for k, t in found.collectives.items()}

    @property
    def peers(self) -> str:
        if self.all_reduce != "peer":
            return ""
        return "reference" if self.kernels == "reference" else "mosaic"

    def _model(self, model: ShardedModel, placement: Placement) -> Model:
        if self.checkpoint is None:
            loaded = random_model(model.cfg, placement, numerics=self.numerics)
        else:
            loaded = load_placed(self.checkpoint, placement, numerics=self.numerics)
        repack_placed(loaded, placement, self.kernels)
        return loaded
