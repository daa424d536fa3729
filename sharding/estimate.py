"""What a layout costs: bytes a device by kind, whether it fits, and the time of a step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax

from dsv41_jax.cache import CacheShape, new_cache
from dsv41_jax.checkpoint.fit import ByKind, bytes_by_kind, kv_bytes_per_token
from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.parameters import Parameter, parameters
from dsv41_jax.config import Config
from pallas_kernels.numerics import SERVING
from sharding.hardware import Hardware
from sharding.layouts import Division, Layout
from sharding.roofline import Step, Weights, group_weights, require_figures, step_parts

PAGE_SIZE = CacheShape(1, 1).page_size


@dataclass(frozen=True)
class Footprint:
    """Bytes of the fullest device by kind. pool: global cache; windows, carry, pairs: private
    state; reserved: assumed for temporaries and programs. kv_tokens: tokens of global cache that
    would fit beside everything else.
    """

    experts: int
    dense: int
    engram_tables: int
    embedding: int
    head: int
    draft: int
    pool: int
    windows: int
    carry: int
    pairs: int
    reserved: int
    memory: int
    kv_tokens: int

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.memory

    @property
    def by_kind(self) -> dict[str, int]:
        kinds = asdict(self)
        return {name: n for name, n in kinds.items() if name not in ("memory", "kv_tokens")}


@dataclass(frozen=True)
class Estimate:
    """One step of one layout on one machine; parts in microseconds."""

    layout: Layout
    step: Step
    footprint: Footprint
    parts: Mapping[str, float]

    @property
    def step_us(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens(self) -> int | None:
        """Tokens a step yields or takes in; None where that depends on accepted drafts."""
        width = {"decode": 1, "prefill": self.step.context}.get(self.step.phase)
        return width and width * self.step.batch

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens and self.tokens / self.step_us * 1e6

    @property
    def tokens_per_s_user(self) -> float | None:
        return self.tokens_per_s and self.tokens_per_s / self.step.batch

    @property
    def tokens_per_s_gpu(self) -> float | None:
        return self.tokens_per_s and self.tokens_per_s / self.layout.devices


@dataclass(frozen=True)
class ShardedModel:
    """A model cut by a layout; UserError if the layout refuses it."""

    cfg: Config
    layout: Layout

    def __post_init__(self) -> None:
        self.layout.divide(self.cfg)

    @cached_property
    def division(self) -> Division:
        return self.layout.divide(self.cfg)

    @cached_property
    def _local(self) -> dict[str, Any]:
        return self.division.local_specs(_parameters(self.cfg).values())

    @cached_property
    def bytes_by_kind(self) -> ByKind:
        """Weight bytes of the fullest device."""
        return bytes_by_kind(self._local)

    @cached_property
    def weights(self) -> Weights:
        return group_weights(self._local)

    def footprint(self, hardware: Hardware, context: int, concurrency: int) -> Footprint:
        """What a device holds when ``concurrency`` requests of ``context`` tokens are spread over
        the layout; ``fits`` is the answer for (GPUs, context, concurrency).
        """
        memory = round(hardware["memory_gb"] * 1e9)
        slots = -(-concurrency // self.division.ways("batch"))
        a_slot = slot_bytes(self.cfg)
        a_token = kv_bytes_per_token(self.cfg)
        tokens = slots * -(-context // PAGE_SIZE) * PAGE_SIZE
        held = asdict(self.bytes_by_kind)
        del held["vision"]
        held |= {kind: slots * n for kind, n in a_slot.items()}
        held["reserved"] = round(memory * hardware["reserved_fraction"])
        left = max(0, memory - sum(held.values()))
        return Footprint(
            **held, pool=round(tokens * a_token), memory=memory, kv_tokens=int(left / a_token)
        )

    def estimate(self, hardware: Hardware, step: Step) -> Estimate:
        """Footprint and time of a step; UserError for an unknown figure of the hardware."""
        require_figures(hardware, self.layout)
        parts = step_parts(self.cfg, self.division, self.weights, hardware, step)
        return Estimate(
            self.layout, step, self.footprint(hardware, step.context, step.batch), parts
        )


def slot_bytes(cfg: Config) -> dict[str, int]:
    """Private bytes of one request, from the shapes of the cache itself: windows (draft rings
    too), carry, and pairs with the token history.
    """
    return dict(_slot_bytes(cfg))


@lru_cache
def _slot_bytes(cfg: Config) -> dict[str, int]:
    cache = jax.eval_shape(lambda: new_cache(cfg, SERVING, CacheShape(1, 1), drafts=True))
    return {
        "windows": _nbytes((cache.windows, cache.drafts)),
        "carry": _nbytes(cache.carry),
        "pairs": _nbytes((cache.pairs, cache.history, cache.last_token)),
    }


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@lru_cache
def _parameters(cfg: Config) -> dict[str, Parameter]:
    return parameters(inventory(cfg))
