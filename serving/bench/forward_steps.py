"""A case's dispatches as one step that can be repeated."""

from dataclasses import dataclass
from typing import Any

from dsv41_jax.cache import Cache
from serving.bench.forward_cases import Dispatch
from serving.programs import READERS


@dataclass
class Steps:
    """Executables of the dispatches and their inputs; each call runs all of them once and gives
    what the last of them returns beside the cache, None after ``encode``.
    """

    params: Any
    cache: Cache
    plan: list[Dispatch]
    executables: list[Any]
    inputs: list[tuple]

    def __call__(self) -> Any:
        out = None
        for dispatch, run, given in zip(self.plan, self.executables, self.inputs, strict=True):
            out = run(self.params, self.cache, *given)
            if dispatch.program == "encode":
                self.cache, out = out, None
            elif dispatch.program not in READERS:
                self.cache, out = out
        return out
