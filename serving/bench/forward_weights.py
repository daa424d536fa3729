"""Weights of a whole model on a device that cannot hold it: layers share full-width sets.

Layer i computes with set i mod n, and the home of set s is layer s. Sets hold what every layer has:
norms, attention projections, hyper-connections, router, experts. Compressors, indexers and Engram
belong to their layer. Weights that come from a set pass a barrier of their own in every layer, or
XLA would unpack once what two layers read. What makes the barriers differ is a ``tie``: arrays that
the program needs anyway and that pass all of them, one after the other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.parameters import Parameter, parameters
from dsv41_jax.compiling import jit
from dsv41_jax.config import Config
from dsv41_jax.model import Model
from dsv41_jax.moe import MoE, RepackedExperts, repack_experts
from pallas_kernels.numerics import Numerics
from sharding.place import REPLICATED, Placement
from sharding.random_weights import random_value
from sharding.repack import packing, repack_placed

Weights = dict[str, Any]  # path -> value

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OWN = ("attn.compressor.", "attn.indexer.", "engram.")
_EXPERTS = re.compile(r"(.+\.ffn)\.(?:shared_)?experts\..*")
_DRAWN = 8  # experts of a layer and rank that are random, the others repeat them


@dataclass(frozen=True)
class WeightSets:
    """The structure of a model whose layers share ``count`` sets. model: abstract, as it is before
    anything is shared. packed: experts are in the order that the Hopper kernels read.
    """

    cfg: Config
    numerics: Numerics
    placement: Placement
    count: int
    packed: bool
    draft: bool
    model: Model = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.cfg.num_hidden_layers:
            layers = self.cfg.num_hidden_layers
            raise ValueError(f"count={self.count} must be between 1 and {layers} layers")
        cfg, numerics, mtp = self.cfg, self.numerics, self.draft
        model = nnx.eval_shape(lambda: Model(cfg, numerics=numerics, rngs=nnx.Rngs(0), mtp=mtp))
        if self.packed:
            for _, module in list(nnx.iter_modules(model)):
                if isinstance(module, MoE):
                    weights = module.experts(), module.shared_experts()
                    shapes = jax.eval_shape(packing(self.placement), *weights)
                    module.experts = RepackedExperts(shapes)
        object.__setattr__(self, "model", model)

    def home(self, path: str) -> str:
        """The path under which a parameter's value lies."""
        match = _LAYER.fullmatch(path)
        if not match or match[2].startswith(_OWN):
            return path
        return f"layers.{int(match[1]) % self.count}.{match[2]}"

    def shapes(self) -> Weights:
        """Shapes of every value that is held, with the shardings of a placement."""
        return {
            path: jax.tree.map(lambda leaf, path=path: self._shape(path, leaf), leaf.get_value())
            for path, leaf in _flat(self.model)
            if self.home(path) == path
        }

    def _shape(self, path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        # Repacked experts are as long as they are: nothing pads them.
        whole = path.endswith(".experts.weight") or path == "token_map"
        shape = leaf.shape if whole else self.placement.division.padded(path, leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=self.placement.sharding(path))

    def full(self, weights: Weights, tie: Any) -> tuple[nnx.State, Any]:
        """The state of all layers from the values that are held, and the tie to go on with."""
        found = dict(weights)
        for layer in range(self.cfg.num_hidden_layers):
            own, tie = self._of_layer(weights, layer, layer % self.count, tie)
            found |= own
        return _filled(nnx.state(self.model), found), tie

    def block(self, weights: Weights, layer: int, weight_set: int, tie: Any) -> tuple[Any, Any]:
        """A layer by itself with the weights of any set, and the tie to go on with."""
        own, tie = self._of_layer(weights, layer, weight_set, tie)
        graph, state = nnx.split(self.model.layers[layer])
        return nnx.merge(graph, _filled(state, own, f"layers.{layer}.")), tie

    def ends(self, weights: Weights) -> Model:
        """The model with only the weights that are given, for what it does beside its layers."""
        graph, state = nnx.split(self.model)
        return nnx.merge(graph, _filled(state, weights))

    def _of_layer(
        self, weights: Weights, layer: int, weight_set: int, tie: Any
    ) -> tuple[Weights, Any]:
        """Path of the layer -> value."""
        own, shared = {}, {}
        for name, _ in _flat(self.model.layers[layer]):
            path = f"layers.{layer}.{name}"
            if name.startswith(_OWN):
                own[path] = weights[path]
            else:
                shared[path] = weights[f"layers.{weight_set}.{name}"]
        shared, tie = jax.lax.optimization_barrier((shared, tie))
        return own | shared, tie


def _filled(state: nnx.State, values: Weights, prefix: str = "") -> nnx.State:
    """The state with values in the place of shapes; what has none stays a shape."""
    flat = []
    for path, leaf in nnx.to_flat_state(state):
        name = prefix + _name(path)
        flat.append((path, leaf.replace(values[name]) if name in values else leaf))
    return nnx.from_flat_state(flat)


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def _flat(module: nnx.Module) -> list[tuple[str, Any]]:
    return [(_name(path), leaf) for path, leaf in nnx.to_flat_state(nnx.state(module))]


def weight_sets(
    cfg: Config, numerics: Numerics, placement: Placement, count: int, kernels: str, *, draft: bool
) -> WeightSets:
    """The structure, experts packed if loading a checkpoint would pack them with these kernels."""
    path = "layers.0.ffn"
    ours = _Parameters(cfg, placement)
    moe = _repacked(cfg, numerics, placement, kernels, path, ours.drawn_experts(path))
    return WeightSets(
        cfg, numerics, placement, count, isinstance(moe.experts, RepackedExperts), draft
    )


def random_sets(sets: WeightSets, kernels: str, have: Weights | None = None) -> Weights:
    """Values of every parameter that is held, made on the devices one after the other; of each
    layer and rank ``_DRAWN`` experts are random, and packed by what packs a checkpoint's. have:
    values of other sets; those of the right shapes are kept, and the others taken out of it.
    """
    have, shapes = {} if have is None else have, sets.shapes()
    for path in list(have):
        if path not in shapes or _shapes(have[path]) != _shapes(shapes[path]):
            del have[path]
    return {**have, **dict(_values(sets, kernels, have))}


def _shapes(value: Any) -> list[tuple]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)]


def _values(sets: WeightSets, kernels: str, have: Weights) -> Iterator[tuple[str, Any]]:
    ours, shapes = _Parameters(sets.cfg, sets.placement), sets.shapes()
    done: set[str] = set()
    for path in shapes:
        match = _EXPERTS.fullmatch(path)
        if path in have:
            continue
        if path == "token_map":
            ids = np.arange(sets.cfg.vocab_size, dtype=np.int32)
            yield path, sets.placement.put(ids, REPLICATED)
        elif not match:
            yield path, random_value(ours.parameters[path], sets.placement)
        elif match[1] not in done:
            done.add(match[1])
            drawn = ours.drawn_experts(match[1])
            moe = _repacked(sets.cfg, sets.numerics, sets.placement, kernels, match[1], drawn)
            for name, leaf in _flat(moe):
                at = f"{match[1]}.{name}"
                if _EXPERTS.fullmatch(at):
                    value = leaf.get_value()
                    yield at, _repeated(sets.placement, at, value, shapes[at])


@dataclass(frozen=True)
class _Parameters:
    cfg: Config
    placement: Placement
    parameters: dict[str, Parameter] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", parameters(inventory(self.cfg)))

    def drawn_experts(self, path: str) -> Weights:
        """The first experts of a layer and its shared expert."""
        values = {}
        for kind in ("experts", "shared_experts"):
            for name in ("w1", "w2", "w3"):
                parameter = self.parameters[f"{path}.{kind}.{name}.weight"]
                if parameter.stacked:
                    count = len(parameter.weights)
                    ways = self.placement.division.ways("experts")
                    drawn = ways * gcd(-(-count // ways), _DRAWN)
                    parameter = replace(parameter, weights=parameter.weights[:drawn])
                values[f"{kind}.{name}.weight"] = random_value(parameter, self.placement)
        return values


def _repacked(
    cfg: Config,
    numerics: Numerics,
    placement: Placement,
    kernels: str,
    path: str,
    experts: Weights,
) -> MoE:
    """A layer's experts as a loaded checkpoint would hold them; its router has no values."""
    count = experts["experts.w1.weight"].codes.shape[0]
    moe = nnx.eval_shape(lambda: MoE(cfg, count, 1, numerics=numerics, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(moe)
    holder = nnx.Dict({"ffn": nnx.merge(graph, _filled(state, experts))})
    if placement.division.layout.devices == 1:
        repack_experts(holder, kernels)
    else:
        repack_placed(holder, placement, kernels)
    return holder["ffn"]


def _repeated(placement: Placement, path: str, value: Any, shapes: Any) -> Any:
    """The value with every rank's experts repeated up to the length that is wanted."""

    def whole(leaf: Array, shape: jax.ShapeDtypeStruct) -> Array:
        times = shape.shape[0] // leaf.shape[0]
        if times == 1:
            return leaf
        return _repeating(placement, placement.spec(path), times)(leaf)

    return jax.tree.map(whole, value, shapes)


@lru_cache
def _repeating(placement: Placement, spec: PartitionSpec, times: int) -> Any:
    def repeat(leaf: Array) -> Array:
        return jnp.tile(leaf, (times, *[1] * (leaf.ndim - 1)))

    return jit(placement.over_ranks(repeat, spec, spec))


def nbytes(weights: Weights) -> int:
    """Of all devices together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
