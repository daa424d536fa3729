"""A divided model on a mesh: specs of every parameter, and checkpoints loaded part by part."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.load import fill_model, read_token_map
from dsv41_jax.checkpoint.orbax import is_orbax, read_orbax
from dsv41_jax.checkpoint.parameters import assemble, dequantise, parameters
from dsv41_jax.checkpoint.read import Progress, ReleasedCheckpoint, read_config
from dsv41_jax.config import Config
from dsv41_jax.errors import collected, raise_problems
from dsv41_jax.model import Model
from pallas_kernels.numerics import Numerics
from sharding.layouts import DATA, Division, layout
from sharding.mesh import make_mesh
from sharding.parts import StoredParameter

REPLICATED = PartitionSpec()
# Slots, pages and the places of a batch stand first; tensor ranks hold copies.
BY_RANK = PartitionSpec(DATA)
BY_RANK_LATER = PartitionSpec(None, DATA)


@dataclass(frozen=True, eq=False)
class Placement:
    """A division on the mesh of its devices."""

    division: Division
    mesh: Mesh

    def spec(self, path: str) -> PartitionSpec:
        """Of a parameter, codes and scales alike."""
        return PartitionSpec(*self.division.partition(path))

    def sharding(self, path: str) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(path))

    def parameter_specs(self, params: nnx.State) -> nnx.State:
        """The state with a PartitionSpec for every array; what is no parameter is replicated."""

        def spec(keys: tuple, _leaf: Any) -> PartitionSpec:
            names = [getattr(key, "key", None) for key in keys]
            return self.spec(".".join(str(name) for name in names if name is not None))

        return jax.tree_util.tree_map_with_path(spec, params)

    def over_ranks(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """The function of whole arrays that runs ``function`` on every rank's parts of them;
        inputs, outputs: specs.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )

    def shapes(self, values: Any, spec: PartitionSpec) -> Any:
        """Shapes and shardings of a pytree of arrays, to compile for."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), values
        )

    def put(self, values: Any, spec: PartitionSpec) -> Any:
        """A pytree of host arrays, the same in every process, on the mesh."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(
                np.shape(leaf), sharding, np.asarray(leaf).__getitem__
            ),
            values,
        )

    def put_part(self, values: Any, rank: int) -> Any:
        """A pytree of host arrays [n, ...] as the data rank's part of ``BY_RANK`` arrays; the other
        ranks hold zeros.
        """
        sharding = NamedSharding(self.mesh, BY_RANK)

        def put(leaf: np.ndarray) -> jax.Array:
            n, blank = len(leaf), np.zeros_like(leaf)
            shape = self.division.ways("batch") * n, *leaf.shape[1:]
            return jax.make_array_from_callback(
                shape, sharding, lambda index: leaf if _start(index) == rank * n else blank
            )

        return jax.tree.map(put, values)


def rank_part(values: Any, rank: int, ranks: int) -> Any:
    """A data rank's part of ``BY_RANK`` arrays, each on one of its devices; if they are another
    process's, a part of the same shape.
    """

    def part(leaf: jax.Array) -> jax.Array:
        here, first = leaf.addressable_shards, leaf.shape[0] // ranks * rank
        return next((s for s in here if _start(s.index) == first), here[0]).data

    return jax.tree.map(part, values)


def _start(index: tuple[slice, ...]) -> int:
    return index[0].start or 0


def place(name: str, cfg: Config, devices: Sequence | None = None) -> Placement:
    """The layout of that name for a model on the devices at hand. UserError, before anything is
    loaded, for an unknown layout, one that refuses the model, or missing devices.
    """
    chosen = layout(name)
    return Placement(chosen.divide(cfg), make_mesh(chosen, devices))


def load_placed(
    directory: str | Path,
    placement: Placement,
    *,
    numerics: Numerics,
    speculation: bool = False,
    engram: str = "device",
    progress: Progress | None = None,
) -> Model:
    """``load_model`` onto the devices of a placement: a process reads the bytes that its own
    devices hold, each part once.

    Every device checks the values that it reads. Orbax checkpoints may have been saved from any
    layout. engram "host": the tables stay mapped files, one copy for all devices of a process.
    UserError, before anything is read, if the placement is that of another model, or for tables on
    the host of an Orbax checkpoint.
    """
    directory = Path(directory)
    cfg = read_config(directory)
    _check_model(directory, cfg, placement.division)
    if engram == "host" and is_orbax(directory):
        raise_problems(
            str(directory), ["Orbax: layouts of several devices hold its Engram tables themselves"]
        )
    stream = _orbax if is_orbax(directory) else partial(_released, engram=engram)
    (has_draft, values), mapped = collected(
        str(directory),
        lambda: stream(directory, cfg, placement, numerics, speculation, progress),
        lambda: read_token_map(directory, cfg),
    )
    model = fill_model(
        values, cfg, numerics=numerics, mtp=has_draft, padded=placement.division.padded
    )
    model.set_token_map(mapped)
    model.token_map.set_value(placement.put(np.asarray(model.token_map[...]), REPLICATED))
    return model


def _check_model(directory: Path, cfg: Config, division: Division) -> None:
    problems = [
        f"{f.name} = {getattr(cfg, f.name)}: layout {division.layout.name} was made for"
        f" {getattr(division.cfg, f.name)}"
        for f in fields(cfg)
        if getattr(cfg, f.name) != getattr(division.cfg, f.name)
    ]
    if problems:
        raise_problems(str(directory / "config.json"), problems)


Opened = tuple[bool, Iterator[tuple[str, Any]]]


def _released(
    directory: Path,
    cfg: Config,
    placement: Placement,
    numerics: Numerics,
    speculation: bool,
    progress: Progress | None,
    *,
    engram: str,
) -> Opened:
    checkpoint = ReleasedCheckpoint(directory, cfg, speculation=speculation)

    def values() -> Iterator[tuple[str, Any]]:
        problems: list[str] = []
        total = sum(p.nbytes for p in checkpoint.parameters.values())
        done = 0
        for path, parameter in checkpoint.parameters.items():
            if parameter.is_engram_table and engram == "host":
                value = assemble(parameter, checkpoint.files.view, copy=False)
            else:
                stored = StoredParameter(parameter, checkpoint.files, placement.division, problems)
                arrays = [
                    jax.make_array_from_callback(shape, placement.sharding(path), _once(read))
                    for shape, read in stored.planes(packed=numerics.packed_weights)
                ]
                value = stored.value(arrays)
            done += parameter.nbytes
            if progress:
                progress(done, total, path)
            yield path, value
        if problems:
            raise_problems(str(directory), list(dict.fromkeys(problems)))

    return checkpoint.has_draft, values()


def _once(read: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable:
    """Devices that hold the same part share one read."""
    found: dict[tuple, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((piece.start, piece.stop) for piece in index)
        if key not in found:
            found[key] = read(index)
        return found[key]

    return part


def _orbax(
    directory: Path,
    cfg: Config,
    placement: Placement,
    numerics: Numerics,
    speculation: bool,
    progress: Progress | None,
) -> Opened:
    def restore(path: str, plane: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        shape = placement.division.padded(path, plane.shape)
        return ocp.ArrayRestoreArgs(
            sharding=placement.sharding(path), global_shape=shape, dtype=plane.dtype, strict=False
        )

    found = read_orbax(directory, restore)
    has_draft = any(path.startswith("mtp.") for path in found)
    if speculation and not has_draft:
        absent = [p for p in parameters(inventory(cfg)) if p.startswith("mtp.")] or ["mtp.*"]
        raise_problems(str(directory), [f"{path}: is missing" for path in absent])

    def values() -> Iterator[tuple[str, Any]]:
        total = sum(value.nbytes for value in found.values())
        done = 0
        for path in list(found):
            value = found.pop(path)
            done += value.nbytes
            if progress:
                progress(done, total, path)
            yield (
                path,
                value if numerics.packed_weights else _dequantised(value, placement.sharding(path)),
            )

    return has_draft, values()


def _dequantised(value: Any, sharding: NamedSharding) -> jax.Array:
    """float32 values on the same devices; parts consist of whole blocks, so each stays at home."""
    planes, tree = jax.tree.flatten(value)
    shards = zip(*(plane.addressable_shards for plane in planes), strict=True)
    parts = [
        jax.device_put(dequantise(tree.unflatten(shard.data for shard in same)), same[0].device)
        for same in shards
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)
