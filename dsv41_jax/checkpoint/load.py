"""Checkpoint directory -> Model: strict, streaming, no tensor held twice."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv41_jax.checkpoint.orbax import OrbaxCheckpoint, is_orbax
from dsv41_jax.checkpoint.parameters import Value, is_engram_table
from dsv41_jax.checkpoint.read import Progress, ReleasedCheckpoint, read_config
from dsv41_jax.config import Config
from dsv41_jax.dspark import check_block_size
from dsv41_jax.engram import TokenMap
from dsv41_jax.errors import collected
from dsv41_jax.model import Model
from dsv41_jax.tokenizer import Tokenizer, token_map
from pallas_kernels.numerics import Numerics

Place = Callable[[str, Value], Any]
Padded = Callable[[str, tuple[int, ...]], tuple[int, ...]]


def load_model(
    directory: str | Path,
    *,
    numerics: Numerics,
    engram: str = "device",
    speculation: bool = False,
    progress: Progress | None = None,
    place: Place | None = None,
) -> Model:
    """Load a released or an Orbax checkpoint into a Model.

    Every text tensor is consumed once and every parameter set, or one UserError names all that is
    wrong. Draft stages are loaded when they are complete, else `model.mtp` is None; with
    `speculation` an absent one is an error. Packed weights stay packed unless `numerics` is
    float32. `engram="host"` leaves the Engram tables packed and memory-mapped on the host in every
    numerics; "device" places them like other weights. `place(path, value)` puts one parameter on
    its device or devices (default: the first device); at most one is on the host at a time.
    `progress(done_bytes, total_bytes, path)` is called after each.
    """
    directory = Path(directory)
    cfg = read_config(directory)
    source = OrbaxCheckpoint if is_orbax(directory) else ReleasedCheckpoint
    checkpoint, mapped, _ = collected(
        str(directory),
        lambda: source(directory, cfg, speculation=speculation),
        lambda: read_token_map(directory, cfg),
        lambda: check_block_size(cfg, speculation=speculation),
    )
    stream = checkpoint.stream(numerics, engram=engram, progress=progress)
    placed = _placed(stream, place or _default_device, engram)
    model = fill_model(placed, cfg, numerics=numerics, mtp=checkpoint.has_draft)
    model.set_token_map(mapped)
    return model


def read_token_map(directory: Path, cfg: Config) -> np.ndarray:
    """Compressed ids of the ids of a checkpoint's tokenizer (ARCHITECTURE 9.1)."""
    return token_map(Tokenizer.from_dir(directory, cfg), cfg)[0]


def fill_model(
    values: Iterable[tuple[str, Any]],
    cfg: Config,
    *,
    numerics: Numerics,
    mtp: bool,
    padded: Padded = lambda _path, shape: shape,
) -> Model:
    """Build a Model and give each of its parameters the value of that path; the token map is unset.

    ValueError unless paths, shapes and dtypes are exactly those of the model; a value that stays
    on the host (NumPy) may keep its stored encoding. `padded(path, shape)`: the shape that the
    values have instead of a plane's own.
    """
    abstract = nnx.eval_shape(lambda: Model(cfg, numerics=numerics, rngs=nnx.Rngs(0), mtp=mtp))
    graph, state, derived = nnx.split(abstract, nnx.Param, TokenMap)
    slots = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    unset = set(slots)
    problems = []
    for path, value in values:
        if path not in slots:
            problems.append(f"{path}: the model has no such parameter")
            continue
        want = [
            _leaf(padded(path, leaf.shape), leaf.dtype)
            for leaf in jax.tree.leaves(slots[path].get_value())
        ]
        got = [_leaf(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)]
        on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(value))
        if want != got and not on_host:
            problems.append(f"{path}: holds {got}, the model expects {want}")
        slots[path].set_value(value)
        unset.discard(path)
    problems += [f"{path}: the model's parameter was not set" for path in sorted(unset)]
    if problems:
        raise ValueError("model and checkpoint differ:\n  " + "\n  ".join(problems))
    empty = jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1, leaf.dtype), derived)
    return nnx.merge(graph, state, empty)


def model_parameters(model: Model) -> dict[str, Any]:
    """Parameter path -> value of a model, as `save_released` takes them."""
    state = nnx.state(model, nnx.Param)
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def _leaf(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype}{list(shape)}"


def _default_device(_path: str, value: Value) -> Any:
    """Uncommitted, as caches are, or programs that return caches compile twice."""
    return jax.device_put(value)


def _placed(
    stream: Iterator[tuple[str, Value]], place: Place, engram: str
) -> Iterator[tuple[str, Any]]:
    for path, value in stream:
        on_host = engram == "host" and is_engram_table(path)
        yield path, value if on_host else place(path, value)
