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
        for number, dispatch in enumerate(self.plan):
            given = *self.inputs[number], *self.rows(number)
            out = self.executables[number](self.params, self.cache, *given)
            if dispatch.program == "encode":
                self.cache, out = out, None
            elif dispatch.program not in READERS:
                self.cache, out = out
        return out

    def rows(self, number: int) -> tuple:
        """What a dispatch takes behind its inputs."""
        return ()

    @property
    def lasting(self) -> Any:
        """The arrays that stay where they are from step to step."""
        return self.cache
