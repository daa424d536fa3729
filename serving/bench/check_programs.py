"""The serving programs, which also give what goes into the LM head and what comes out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from dsv41_jax.cache import Cache
from serving.bench.forward_programs import SharedPrograms
from serving.buckets import Bucket
from serving.programs import FORWARDS, READERS


class KeptPrograms(SharedPrograms):
    """Programs that give (cache, {"head input": [..., D], "logits": [..., V]}); the latter is empty
    where no head runs. Of a draft only the first logits count: the others follow from its choices.
    """

    def _of_rank(self, name: str, bucket: Bucket) -> Callable:
        options = self._options(name, bucket)

        def run(params: Any, cache: Cache, *inputs: Any) -> tuple[Cache, dict[str, Array]]:
            state, routing = self.sets.full(params["weights"], params["routing"])
            model, kept, ops = nnx.merge(self.graph, state), {}, self.routed_ops(routing)
            head = partial(_kept, kept, ops.gathered_linear, self.cfg.vocab_size)
            ops = replace(ops, gathered_linear=head)
            out = FORWARDS[name](model, ops, cache, *inputs, **options)
            if name in READERS:
                return cache, kept
            return (out if name == "encode" else out[0]), kept

        return run


def _kept(
    kept: dict[str, Array],
    linear: Callable,
    vocabulary: int,
    x: Array,
    weight: Any,
    *,
    outputs: int,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    y = linear(x, weight, outputs=outputs, out_dtype=out_dtype)
    if outputs == vocabulary:
        kept.setdefault("head input", x)
        kept.setdefault("logits", y)
    return y
