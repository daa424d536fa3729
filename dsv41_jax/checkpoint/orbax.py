"""Released checkpoint <-> Orbax, bit for bit: the packed parameters as one pytree.

Layout: `params/` (Orbax), `config.json`, and `tokenizer.json` if there is one. The tree is
{parameter path: array, or {codes, scales}}; host memory must hold the stacked experts.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.new_directory import new_directory
from dsv41_jax.checkpoint.parameters import (
    DTYPES,
    Parameter,
    Value,
    dequantise,
    is_engram_table,
    parameters,
)
from dsv41_jax.checkpoint.read import Progress, ReleasedCheckpoint, read_config
from dsv41_jax.checkpoint.save import DEFAULT_SHARD_BYTES, save_released
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError, raise_problems
from pallas_kernels.numerics import REFERENCE, Numerics

PARAMS = "params"


def is_orbax(directory: str | Path) -> bool:
    """Whether `directory` is a checkpoint that `released_to_orbax` wrote."""
    return (Path(directory) / PARAMS / "_METADATA").is_file()


def released_to_orbax(
    source: str | Path, target: str | Path, *, progress: Progress | None = None
) -> None:
    """Convert a released checkpoint directory; draft stages travel when they are complete."""
    source = Path(source)
    cfg = read_config(source)
    checkpoint = ReleasedCheckpoint(source, cfg)
    with new_directory(Path(target)) as work:
        values = dict(checkpoint.stream(REFERENCE, engram="host", progress=progress))
        with ocp.PyTreeCheckpointer() as writer:
            writer.save(work / PARAMS, jax.tree.map(np.asarray, values))
        for name in ("config.json", "tokenizer.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, work / name)


def orbax_to_released(
    source: str | Path,
    target: str | Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Convert back; tensor bytes are those of the checkpoint that was converted."""
    source = Path(source)
    tokenizer = source / "tokenizer.json"
    save_released(
        read_orbax(source),
        read_config(source),
        target,
        tokenizer_file=tokenizer if tokenizer.is_file() else None,
        shard_bytes=shard_bytes,
        progress=progress,
    )


def read_orbax(
    directory: str | Path, restore: Callable[[str, Any], Any] | None = None
) -> dict[str, Any]:
    """Parameter path -> packed value of an Orbax checkpoint, on the host.

    `restore(path, abstract array)`: Orbax' restore arguments of each plane, for arrays elsewhere.
    UserError naming every parameter that is missing, unknown, or of another shape or dtype than
    the config beside it implies.
    """
    directory = Path(directory).absolute()
    wanted = _expected(read_config(directory), _stored(directory), directory)
    restore = restore or (lambda _path, _plane: ocp.RestoreArgs(restore_type=np.ndarray))
    template = {path: jax.tree.map(partial(restore, path), value) for path, value in wanted.items()}
    try:
        with ocp.PyTreeCheckpointer() as reader:
            arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=template)
            return reader.restore(directory / PARAMS, args=arguments)
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / PARAMS}: cannot be restored: {error}") from error


class OrbaxCheckpoint:
    """A restored Orbax checkpoint; hands its parameters out like a ReleasedCheckpoint."""

    def __init__(self, directory: Path, cfg: Config, *, speculation: bool = False) -> None:
        self._values = read_orbax(directory)
        self.has_draft = any(path.startswith("mtp.") for path in self._values)
        if speculation and not self.has_draft:
            absent = [p for p in parameters(inventory(cfg)) if p.startswith("mtp.")] or ["mtp.*"]
            raise_problems(str(directory), [f"{path}: is missing" for path in absent])

    def stream(
        self, numerics: Numerics, *, engram: str = "device", progress: Progress | None = None
    ) -> Iterator[tuple[str, Value]]:
        """Yield (path, value) and forget each; Engram tables stay packed with engram="host"."""
        total = sum(value.nbytes for value in self._values.values())
        done = 0
        for path in list(self._values):
            value = self._values.pop(path)
            done += value.nbytes
            if progress:
                progress(done, total, path)
            packed = numerics.packed_weights or (engram == "host" and is_engram_table(path))
            yield path, value if packed else dequantise(value)


def _stored(directory: Path) -> Mapping[str, Any]:
    try:
        with ocp.PyTreeCheckpointer() as reader:
            return reader.metadata(directory / PARAMS).item_metadata.tree
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{directory / PARAMS}: is not an Orbax checkpoint: {error}") from error


def _expected(cfg: Config, stored: Mapping[str, Any], directory: Path) -> dict[str, Value]:
    """Abstract values of the parameters to restore, after comparing them with what is stored."""
    every = parameters(inventory(cfg))
    has_draft = any(path.startswith("mtp.") for path in stored)
    plan = {path: p for path, p in every.items() if p.part == "text" or has_draft}
    problems = [f"{path}: is missing" for path in plan.keys() - stored.keys()]
    problems += [f"{path}: unknown parameter" for path in stored.keys() - plan.keys()]
    wanted = {path: _abstract(parameter) for path, parameter in plan.items()}
    for path in plan.keys() & stored.keys():
        got, want = _shapes(stored[path]), _shapes(wanted[path])
        if got != want:
            problems.append(f"{path}: holds {got}, must be {want}")
    if problems:
        raise_problems(str(directory), sorted(problems))
    return wanted


def _abstract(parameter: Parameter) -> Any:
    specs = [parameter.spec] + ([parameter.scale] if parameter.scale else [])
    stack = (len(parameter.weights),) if parameter.stacked else ()
    leaves: list[Any] = [jax.ShapeDtypeStruct((*stack, *s.shape), DTYPES[s.dtype]) for s in specs]
    return parameter.encoding(*leaves) if parameter.encoding else leaves[0]


def _shapes(value: Any) -> str:
    return " + ".join(
        f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for leaf in jax.tree.leaves(value)
    )
