"""Parameters -> released checkpoint: safetensors shards, index, config.json, tokenizer.json."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from dsv41_jax.checkpoint.inventory import TensorSpec, inventory
from dsv41_jax.checkpoint.new_directory import new_directory
from dsv41_jax.checkpoint.parameters import Parameter, Value, parameters, take_apart
from dsv41_jax.checkpoint.read import Progress
from dsv41_jax.checkpoint.safetensors_files import INDEX
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError

DEFAULT_SHARD_BYTES = 5 * 10**9
_WRITER_DTYPES = {
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "F32": "float32",
}


def save_released(
    values: Mapping[str, Value],
    cfg: Config,
    directory: str | Path,
    *,
    tokenizer_file: str | Path | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write `values` (parameter path -> stored encoding) as a released checkpoint.

    The directory appears whole or not at all. `values` must hold exactly the text parameters of
    `cfg`, with or without all draft parameters; each is asked for once, in inventory order, so a
    lazy mapping need not hold them together. `read_parameters` gives the same bytes back.
    ValueError for other parameters or for a value not in its released encoding; UserError if the
    directory is not empty or not writable.
    """
    plan = _plan(values, cfg)
    if tokenizer_file is not None and not Path(tokenizer_file).is_file():
        raise UserError(f"{tokenizer_file}: tokenizer file is missing")
    with new_directory(Path(directory)) as work:
        _write_shards(work, plan, values, shard_bytes, progress)
        (work / "config.json").write_text(json.dumps(cfg.to_json_dict(), indent=1) + "\n", "utf-8")
        if tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, work / "tokenizer.json")


def _plan(values: Mapping[str, Value], cfg: Config) -> dict[str, Parameter]:
    every = parameters(inventory(cfg))
    text = {path: p for path, p in every.items() if p.part == "text"}
    given = set(values)
    for plan in (every, text):
        if given == plan.keys():
            return plan
    nearest = every if any(path.startswith("mtp.") for path in given) else text
    missing, extra = sorted(nearest.keys() - given), sorted(given - nearest.keys())
    raise ValueError(f"parameters must be those of the config; {missing=}, {extra=}")


def _shards(plan: Mapping[str, Parameter], limit: int) -> list[dict[str, TensorSpec]]:
    """Tensors in order, cut before a shard would pass `limit` bytes."""
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for parameter in plan.values():
        for name, spec in parameter.tensors():
            if filled and filled + spec.nbytes > limit:
                shards.append({})
                filled = 0
            shards[-1][name] = spec
            filled += spec.nbytes
    return shards


def _write_shards(
    work: Path,
    plan: Mapping[str, Parameter],
    values: Mapping[str, Value],
    shard_bytes: int,
    progress: Progress | None,
) -> None:
    shards = _shards(plan, shard_bytes)
    total = sum(p.nbytes for p in plan.values())
    tensors = _tensors(plan, values)
    weight_map: dict[str, str] = {}
    done = 0
    for number, specs in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = dict(next(tensors) for _ in specs)
        _write_file(work / file, specs, arrays)
        weight_map |= dict.fromkeys(specs, file)
        done += sum(spec.nbytes for spec in specs.values())
        if progress:
            progress(done, total, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")


def _tensors(
    plan: Mapping[str, Parameter], values: Mapping[str, Value]
) -> Iterator[tuple[str, np.ndarray]]:
    for path, parameter in plan.items():
        yield from take_apart(parameter, values[path])


def _write_file(path: Path, specs: dict[str, TensorSpec], arrays: dict[str, np.ndarray]) -> None:
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    described: dict[str, Any] = {
        name: safetensors.TensorSpec(
            dtype=_WRITER_DTYPES[specs[name].dtype],
            shape=specs[name].shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in kept.items()
    }
    try:
        safetensors.serialize_file(described, str(path), metadata={"format": "np"})
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
