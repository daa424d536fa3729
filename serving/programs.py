"""The executables: every program compiled ahead of time for a bucket of shapes, the cache
donated.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv41_jax.cache import Cache, CacheShape, new_cache
from dsv41_jax.compiling import jit
from dsv41_jax.model import Model
from dsv41_jax.ops import Ops
from serving.batch import build_rows, neutral_decode, neutral_sampling
from serving.buckets import Bucket, DecodeBatch
from serving.forwards import Decoded, decode, encode, prefill_full, prefill_scored, replay
from serving.swap import put_state, set_counts, take_state

__all__ = ["Bucket", "DecodeBatch", "Decoded", "Programs"]

FORWARDS = {
    "encode": encode,
    "replay": replay,
    "prefill_full": prefill_full,
    "prefill_scored": prefill_scored,
    "decode": decode,
}
MOVES = {"take_state": take_state, "put_state": put_state, "set_counts": set_counts}


class Programs:
    """The executables over one model and cache; state and parameters are split once.

    logprobs: alternatives that every sampled token reports. max_bias_ids: None for sampling
    without logit rules; otherwise the cache also counts tokens.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        shape: CacheShape,
        *,
        logprobs: int = 0,
        max_stop_ids: int = 1,
        max_bias_ids: int | None = None,
    ):
        self.graph, self.params = nnx.split(model)
        self.cfg, self.ops, self.shape = model.cfg, ops, shape
        self.logprobs, self.max_stop_ids = logprobs, max_stop_ids
        self.max_bias_ids = max_bias_ids
        self.executables: dict[tuple[str, Bucket], Any] = {}

    def new_cache(self) -> Cache:
        counts = self.max_bias_ids is not None
        return new_cache(self.cfg, self.ops.numerics, self.shape, counts=counts)

    def compile(self, name: str, bucket: Bucket) -> Any:
        """The executable of a program for a bucket, compiled the first time it is asked for."""
        if (name, bucket) not in self.executables:
            cache = jax.eval_shape(self.new_cache)
            inputs = self.input_shapes(name, bucket)
            donate = () if name == "take_state" else (1,)
            function = jit(self.bound(name, bucket), donate=donate)
            self.executables[name, bucket] = function.lower(self.params, cache, *inputs).compile()
        return self.executables[name, bucket]

    def __call__(self, name: str, bucket: Bucket, cache: Cache, *inputs: Any) -> Any:
        """Run a compiled program; all but ``take_state`` consume the cache passed in. KeyError if
        the bucket was not compiled.
        """
        return self.executables[name, bucket](self.params, cache, *inputs)

    def idle_inputs(self, name: str, bucket: Bucket) -> tuple:
        """Inputs after the cache with which a program changes nothing that matters."""
        if name in MOVES:
            return self._idle_move(name, bucket)
        sampling = neutral_sampling(
            bucket.requests, self.max_stop_ids, self.max_bias_ids, self.cfg.vocab_size
        )
        if name == "decode":
            return neutral_decode(bucket.requests, bucket.pages, self.max_stop_ids), sampling
        rows = build_rows([], bucket, self.cfg.engram_max_ngram_size - 1)
        if name == "encode":
            return (rows,)
        if name == "prefill_scored":
            return rows, sampling, np.zeros((bucket.requests, bucket.rows), np.int32)
        return rows, sampling

    def _idle_move(self, name: str, bucket: Bucket) -> tuple:
        slot, pages = np.int32(0), np.full(bucket.pages, -1, np.int32)
        if name == "set_counts":
            return slot, np.zeros(self.cfg.vocab_size, np.int32)
        if name == "take_state":
            return slot, pages
        saved = jax.eval_shape(take_state, jax.eval_shape(self.new_cache), slot, pages)
        return slot, pages, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), saved)

    def input_shapes(self, name: str, bucket: Bucket) -> tuple:
        """Shapes of a program's inputs after the cache."""
        inputs = self.idle_inputs(name, bucket)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)

    def bound(self, name: str, bucket: Bucket) -> Callable:
        """The function that a program compiles: of the parameters, the cache and its inputs."""
        if name in MOVES:
            return lambda params, cache, *inputs: MOVES[name](cache, *inputs)
        options: dict[str, int] = {} if name == "encode" else {"logprobs": self.logprobs}
        if name == "decode":
            options["steps"] = bucket.steps

        def run(params: nnx.State, cache: Cache, *inputs: Any) -> Any:
            model = nnx.merge(self.graph, params)
            return FORWARDS[name](model, self.ops, cache, *inputs, **options)

        return run
