"""Muon for matrices, Adam for the rest, and what changes over a run."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array
from optax.contrib import MuonDimensionNumbers, muon

# Tables, heads, the router and mHC's float32 mixes are not maps between two hidden spaces.
_ADAM = re.compile(r"(^|\.)(embed|head|gate)\.weight$|hc_\w+_fn$|[qk]_weight$|confidence_head")
BALANCE = 1e-3  # step of a gate's bias towards an even load


@dataclass(frozen=True)
class Recipe:
    """Of a run of so many steps. peak: learning rate after ``warm`` steps; it falls to zero over
    the last share ``falling``. dense: first share, in which attention looks at every entry and
    the index only learns. rounded: last share, with weights and caches as the release stores
    them.
    """

    peak: float = 3e-3
    warm: int = 100
    falling: float = 0.5
    dense: float = 0.2
    rounded: float = 0.15
    decay: float = 0.1
    clip: float = 1.0

    def at(self, step: int, steps: int) -> dict[str, float | bool]:
        """Learning rate, balance step, and which of the phases a step is in."""
        done = step / max(steps, 1)
        rate = self.peak * min(1.0, (step + 1) / self.warm, (1 - done) / self.falling)
        rounded = done >= 1 - self.rounded
        return {
            "rate": rate,
            "balance": 0.0 if rounded else BALANCE,
            "dense": done < self.dense,
            "rounded": rounded,
        }


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """Updates of ``packed`` gradients for a learning rate of one; the caller multiplies them."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        muon(
            1.0,
            weight_decay=recipe.decay,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_dimensions,
        ),
    )


def packed(values: Mapping[str, Array]) -> dict[str, Array]:
    """Parameters by how they are updated: matrices of one shape [n, outputs, inputs], experts one
    by one, and all that Adam updates as one vector; a few programs instead of hundreds.
    """
    groups: dict[str, list[Array]] = {}
    for path in sorted(values):
        key, shape = _group(path, values[path])
        groups.setdefault(key, []).append(values[path].reshape(shape))
    return {key: jnp.concatenate(parts) for key, parts in groups.items()}


def unpacked(groups: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    """The inverse of ``packed`` for parameters of the shapes of ``like``."""
    taken = dict.fromkeys(groups, 0)
    values = {}
    for path in sorted(like):
        key, shape = _group(path, like[path])
        count = like[path].size if shape == (-1,) else like[path].size // (shape[1] * shape[2])
        part = groups[key][taken[key] : taken[key] + count]
        values[path] = part.reshape(like[path].shape)
        taken[key] += count
    return values


def _group(path: str, value: Array) -> tuple[str, tuple[int, ...]]:
    if value.ndim < 2 or _ADAM.search(path):
        return "adam", (-1,)
    return "x".join(map(str, value.shape[-2:])), (-1, *value.shape[-2:])


def _dimensions(groups: Mapping[str, Any]) -> dict[str, MuonDimensionNumbers | None]:
    both = MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    return {key: None if key == "adam" else both for key in groups}


def balanced(
    values: Mapping[str, Array], loads: Mapping[str, Array], step: Array
) -> dict[str, Array]:
    """Gate biases moved by ``step`` towards experts that got fewer rows than the mean; there is no
    loss for it.
    """
    moved = {
        path: values[path] + step * jnp.sign(jnp.mean(load) - load) for path, load in loads.items()
    }
    return {**values, **moved}
