"""The serving programs over shared weight sets, and the executables that are measured."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv41_jax.cache import Cache, CacheShape
from dsv41_jax.compiling import jit
from dsv41_jax.engram_host import HostTables
from dsv41_jax.engram_staging import with_tables
from dsv41_jax.ops import Ops
from serving.bench.forward_routing import Tables, routed
from serving.bench.forward_weights import WeightSets
from serving.buckets import Bucket
from serving.programs import FORWARDS, READERS, Programs
from serving.speculative import Speculation
from serving.table_rows import ENCODERS
from sharding.place import BY_RANK, REPLICATED

# A graph of fewer launches is not recorded: no program reaches this.
WITHOUT_COMMAND_BUFFERS = {"xla_gpu_graph_min_graph_size": 2**30}
# By default XLA launches one by one what it recorded, as long as a profiler looks on.
PROFILED_COMMAND_BUFFERS = {"xla_enable_command_buffers_during_profiling": True}


class SharedPrograms(Programs):
    """``Programs`` whose parameters are {"weights": values of ``WeightSets``, "routing": tables of
    ``forward_routing``}. host: Engram tables that take the place of the model's own.
    """

    def __init__(
        self,
        sets: WeightSets,
        ops: Ops,
        shape: CacheShape,
        tables: Tables,
        speculation: Speculation | None = None,
        host: HostTables | None = None,
    ):
        several = sets.placement.division.layout.devices > 1
        placement = sets.placement if several else None
        super().__init__(sets.model, ops, shape, speculation=speculation, placement=placement)
        self.sets, self.host = sets, host
        shapes = sets.placement.shapes(tables, REPLICATED)
        self.params = {"weights": sets.shapes(), "routing": shapes}

    def traced(self, name: str, bucket: Bucket) -> jax.stages.Traced:
        """A program as the engine would compile it; only shapes are needed."""
        function = jit(self.bound(name, bucket), donate=() if name in READERS else (1,))
        return function.trace(self.params, self.cache_shapes(), *self.inputs_as(name, bucket))

    def cache_shapes(self) -> Cache:
        return self.by_rank(jax.eval_shape(self._empty_cache))

    def inputs_as(self, name: str, bucket: Bucket) -> tuple:
        """Shapes of a program's inputs after the cache."""
        return self.by_rank(self.input_shapes(name, bucket))

    def by_rank(self, shapes: Any) -> Any:
        return self.placement.shapes(shapes, BY_RANK) if self.placement else shapes

    def put(self, inputs: Any) -> Any:
        """Host arrays of one data rank, the same for every one, on the devices."""
        if self.placement is None:
            return jax.device_put(inputs)
        every = jax.tree.map(lambda leaf: np.concatenate([leaf] * self.ranks), inputs)
        return self.placement.put(every, BY_RANK)

    def specs(self, params: Any) -> Any:
        """Of parameters, for ``on_ranks``."""
        return self.placement.parameter_specs(params) if self.placement else None

    def on_ranks(self, function: Callable, specs: tuple, donate: tuple[int, ...] = ()) -> Any:
        """A function that runs like the programs, jitted; its results are led by requests."""
        if self.placement:
            function = self.placement.over_ranks(function, specs, BY_RANK)
        return jit(function, donate=donate)

    def routed_ops(self, routing: Tables) -> Ops:
        return routed(self.ops, routing, self.sets.placement)

    def _of_rank(self, name: str, bucket: Bucket) -> Callable:
        options = self._options(name, bucket)

        def run(params: Any, cache: Cache, *inputs: Any) -> Any:
            state, routing = self.sets.full(params["weights"], params["routing"])
            if self.host and name in ENCODERS:
                inputs, state = inputs[:-1], with_tables(state, inputs[-1])
            model = nnx.merge(self.graph, state)
            return FORWARDS[name](model, self.routed_ops(routing), cache, *inputs, **options)

        return run
