"""How long a dispatch takes: from the roofline of a machine, or from measured curves."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.layer_plan import layer_plan
from sharding.estimate import ShardedModel
from sharding.hardware import Hardware
from sharding.layouts import Layout
from sharding.roofline import Roofline, Rows, Step, require_figures

_CONTEXT_STEP = 4096


class Times(Protocol):
    """Microseconds of a program's bucket; contexts are tokens before the rows, the longest mean of
    a data rank.
    """

    def encode(self, requests: int, rows: int, context: int) -> float:
        """Rows of every request through the layers up to the last KV source."""
        ...

    def replay(self, requests: int, context: int) -> float:
        """The last window of every request through the layers after it, and the head."""
        ...

    def decode(self, requests: int, context: int) -> float:
        """A token of every request."""
        ...


class Roofs:
    """Step times of the roofline, divided by the share of its speed that is assumed."""

    def __init__(self, cfg: Config, layout: Layout, machine: Hardware, efficiency: float = 1.0):
        """UserError if the layout does not divide the model or a figure is unknown."""
        require_figures(machine, layout)
        self.cfg, self.machine, self.efficiency = cfg, machine, efficiency
        self.model = ShardedModel(cfg, layout)
        self._known: dict[tuple[str, int, int, int], float] = {}

    def encode(self, requests: int, rows: int, context: int) -> float:
        return self._us("encode", requests, rows, context)

    def replay(self, requests: int, context: int) -> float:
        return self._us("replay", requests, self.cfg.sliding_window, context)

    def decode(self, requests: int, context: int) -> float:
        return self._us("decode", requests, 1, context)

    def _us(self, program: str, requests: int, rows: int, context: int) -> float:
        """Contexts are told apart by the middle of some thousand tokens."""
        middle = context // _CONTEXT_STEP * _CONTEXT_STEP + _CONTEXT_STEP // 2
        key = program, requests, rows, middle
        if key not in self._known:
            self._known[key] = self._estimate(*key) / self.efficiency
        return self._known[key]

    def _estimate(self, program: str, requests: int, rows: int, context: int) -> float:
        cfg, division = self.cfg, self.model.division
        ways = division.ways("batch")
        step = Step("decode" if program == "decode" else "prefill", requests * ways, context)
        roof = Roofline(cfg, division, self.model.weights, self.machine, step)
        first = max(context - rows, 0) if program == "replay" else context
        last = first if program == "decode" else first + rows
        each = Rows(requests, rows, requests * rows * ways, first, last)
        us = 0.0
        for layer in layer_plan(cfg):
            after = layer.index > cfg.last_kv_source
            if program == "decode" or after == (program == "replay"):
                us += sum(roof.layer(layer, each).values())
        ends = roof.ends(each)
        return us + sum(ends.values()) - (ends["head"] if program == "encode" else 0)


@dataclass(frozen=True)
class Curve:
    """Microseconds [contexts, sizes] of a program; in between, the straight line."""

    contexts: tuple[float, ...]
    sizes: tuple[float, ...]
    us: tuple[tuple[float, ...], ...]

    def at(self, size: float, context: float) -> float:
        """Sizes beyond the last cost as much more as they are larger; contexts are held at the
        ends.
        """
        column = [np.interp(size, self.sizes, row) for row in self.us]
        us = float(np.interp(context, self.contexts, column))
        return us * max(size / self.sizes[-1], 1.0)


@dataclass(frozen=True)
class Curves:
    """Measured step times of one layout. Sizes: of encode rows in all of a data rank, of replay and
    decode its requests.
    """

    programs: Mapping[str, Curve]

    def encode(self, requests: int, rows: int, context: int) -> float:
        return self.programs["encode"].at(requests * rows, context)

    def replay(self, requests: int, context: int) -> float:
        return self.programs["replay"].at(requests, context)

    def decode(self, requests: int, context: int) -> float:
        return self.programs["decode"].at(requests, context)


def read_curves(path: str) -> Curves:
    """A file {"encode": {"contexts": [...], "sizes": [...], "us": [[...], ...]}, "replay": ...,
    "decode": ...}; UserError that says what is wrong.
    """
    try:
        document = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"curves {path}: cannot be read: {error}") from None
    programs = ("encode", "replay", "decode")
    if not isinstance(document, dict) or set(document) != set(programs):
        raise UserError(f"curves {path}: must have exactly {', '.join(programs)}")
    return Curves({name: _curve(f"curves {path}: {name}", document[name]) for name in programs})


def _curve(where: str, given: Any) -> Curve:
    try:
        contexts = np.array(given["contexts"], float)
        sizes = np.array(given["sizes"], float)
        us = np.array(given["us"], float)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{where}: must have contexts, sizes and us, lists of numbers") from None
    if us.shape != (contexts.size, sizes.size) or not us.size:
        raise UserError(f"{where}: us must be [contexts, sizes], at least one of each")
    if (np.diff(contexts) <= 0).any() or (np.diff(sizes) <= 0).any() or sizes[0] <= 0:
        raise UserError(f"{where}: contexts and sizes must rise, sizes from above 0")
    if not (np.isfinite(us).all() and (us > 0).all()):
        raise UserError(f"{where}: us must be above 0")
    return Curve(tuple(contexts), tuple(sizes), tuple(map(tuple, us.tolist())))
