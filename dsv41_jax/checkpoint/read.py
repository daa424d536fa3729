"""Released checkpoint -> parameters, one at a time, strictly.

Names, shapes and dtypes of every tensor are checked before any data are read; values (NaN codes,
NaN scales, infinities) while they are read. Each stage raises all of its problems in one UserError.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dsv41_jax.checkpoint.census import Census, take_census
from dsv41_jax.checkpoint.inventory import inventory
from dsv41_jax.checkpoint.parameters import Value, assemble, dequantise, parameters
from dsv41_jax.checkpoint.safetensors_files import TensorFiles
from dsv41_jax.config import Config
from dsv41_jax.errors import UserError, raise_problems
from pallas_kernels.numerics import Numerics

log = logging.getLogger("dsv41_jax.checkpoint")
Progress = Callable[[int, int, str], None]
ENGRAM_PLACES = ("device", "host")
_CHUNK = 1 << 24


class ReleasedCheckpoint:
    """An opened and checked released checkpoint.

    `parameters` maps path -> Parameter of everything to load: the text model, and the draft stages
    when they are complete. Raises UserError naming every tensor at fault; with `speculation` an
    absent draft tensor is a fault too.
    """

    def __init__(self, directory: Path, cfg: Config, *, speculation: bool = False) -> None:
        self.directory = directory
        self.files = TensorFiles(directory)
        census = take_census(self.files, cfg)
        problems = census.problems(speculation=speculation)
        if problems:
            raise_problems(str(directory), problems)
        self.has_draft = census.has_draft
        _log_left_out(census)
        wanted = {"text", "mtp"} if self.has_draft else {"text"}
        specs = {name: s for name, s in inventory(cfg).items() if s.part in wanted}
        self.parameters = parameters(specs)

    def stream(
        self, numerics: Numerics, *, engram: str = "device", progress: Progress | None = None
    ) -> Iterator[tuple[str, Value]]:
        """Yield (path, value) in inventory order, each tensor read exactly once.

        Values are fresh host copies, dequantised to float32 when `numerics` keeps no packed
        weights. With engram="host" the Engram tables stay packed, mapped and unread (their values
        are not checked). Raises UserError after the last parameter if any value was bad.
        """
        if engram not in ENGRAM_PLACES:
            raise ValueError(f"{engram=} must be one of {ENGRAM_PLACES}")
        problems: list[str] = []
        total = sum(p.nbytes for p in self.parameters.values())
        done = 0
        for path, parameter in self.parameters.items():
            if parameter.is_engram_table and engram == "host":
                value = assemble(parameter, self.files.view, copy=False)
            else:
                value = assemble(parameter, self._checked(problems), copy=True)
                value = value if numerics.packed_weights else dequantise(value)
            done += parameter.nbytes
            if progress:
                progress(done, total, path)
            yield path, value
        if problems:
            raise_problems(str(self.directory), problems)

    def _checked(self, problems: list[str]) -> Callable[[str], np.ndarray]:
        def fetch(name: str) -> np.ndarray:
            view = self.files.view(name)
            fault = value_fault(view, self.files.entry(name).dtype)
            if fault:
                problems.append(f"{name}: {fault}")
            return view

        return fetch


def read_parameters(
    directory: str | Path,
    cfg: Config,
    numerics: Numerics,
    *,
    engram: str = "device",
    speculation: bool = False,
    progress: Progress | None = None,
) -> dict[str, Value]:
    """Parameter path (dotted) -> NumPy array or packed dataclass of them; needs no model."""
    checkpoint = ReleasedCheckpoint(Path(directory), cfg, speculation=speculation)
    return dict(checkpoint.stream(numerics, engram=engram, progress=progress))


def read_config(directory: str | Path) -> Config:
    """The config.json of a checkpoint directory."""
    if not Path(directory).is_dir():
        raise UserError(f"{directory}: is not a directory")
    return Config.from_json(Path(directory) / "config.json")


def value_fault(array: np.ndarray, dtype: str, origin: tuple[int, ...] | None = None) -> str | None:
    """What is wrong with the stored values of a tensor of safetensors dtype `dtype`, or None.

    origin: where `array` begins within its tensor, if it is a part of one.
    """
    origin = origin or (0,) * array.ndim
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        bad = _bad_values(flat[start : start + _CHUNK], dtype)
        if bad.any():
            where = np.unravel_index(start + int(bad.argmax()), array.shape)
            what = {"F8_E8M0": "UE8M0 byte 255 (NaN)", "F8_E4M3": "a NaN code"}
            place = ", ".join(str(i + o) for i, o in zip(where, origin, strict=True))
            return f"holds {what.get(dtype, 'a value that is not finite')} at [{place}]"
    return None


def _bad_values(flat: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "F8_E8M0":
        return flat == 255
    if dtype == "F8_E4M3":
        return (flat.view(np.uint8) & 0x7F) == 0x7F
    if dtype == "BF16":
        return (flat.view(np.uint16) & 0x7F80) == 0x7F80
    if dtype == "F32":
        return ~np.isfinite(flat)
    return np.zeros(flat.shape, bool)


def _log_left_out(census: Census) -> None:
    vision = sum(spec.part == "vision" for spec in census.present.values())
    if vision:
        log.info("skipped %d vision tensors (text model only; names and shapes checked)", vision)
    absent = census.missing["mtp"]
    if absent and census.has_part("mtp"):
        log.info("no draft model: %d mtp tensors absent, first %s", len(absent), absent[0])
    elif absent:
        log.info("no draft model: all %d mtp tensors absent", len(absent))
