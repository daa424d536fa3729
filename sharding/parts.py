"""Parts of stored parameters, read from mapped files without touching the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dsv41_jax.checkpoint.inventory import BLOCK, TensorSpec, scale_name
from dsv41_jax.checkpoint.parameters import DTYPES, Parameter, dequantise
from dsv41_jax.checkpoint.read import value_fault
from dsv41_jax.checkpoint.safetensors_files import TensorFiles
from pallas_kernels.quant import Fp8Blocks
from sharding.layouts import Division

Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]


@dataclass(frozen=True)
class StoredParameter:
    """One parameter of an opened checkpoint; ``problems`` collects what is wrong with the values
    that were read.
    """

    parameter: Parameter
    files: TensorFiles
    division: Division
    problems: list[str]

    def planes(self, *, packed: bool) -> list[tuple[tuple[int, ...], Read]]:
        """Shape, padding included, and reader of each array of the value: codes and scales, or with
        packed=False float32 values.
        """
        path, specs = self.parameter.path, self._specs()
        shapes = [self.division.padded(path, self._stacked(spec)) for spec in specs]
        if packed:
            return [(shape, partial(self._read, plane)) for plane, shape in enumerate(shapes)]
        shape = shapes[0]
        if self.parameter.encoding:
            shape = (*shape[:-1], shape[-1] * self.parameter.encoding.codes_per_item)
        return [(shape, self._read_values)]

    def value(self, planes: list[Any]) -> Any:
        """The parameter's value from its arrays."""
        encoding = self.parameter.encoding
        return encoding(*planes) if encoding and len(planes) > 1 else planes[0]

    def _specs(self) -> list[TensorSpec]:
        return [self.parameter.spec] + ([self.parameter.scale] if self.parameter.scale else [])

    def _stacked(self, spec: TensorSpec) -> tuple[int, ...]:
        return (len(self.parameter.weights), *spec.shape) if self.parameter.stacked else spec.shape

    def _read(self, plane: int, index: Index) -> np.ndarray:
        """The part of the codes (plane 0) or scales (1) at an index; zeros in the padding."""
        spec = self._specs()[plane]
        whole = self.division.padded(self.parameter.path, self._stacked(spec))
        ranges = [range(*piece.indices(n)) for piece, n in zip(index, whole, strict=True)]
        part = np.zeros([len(r) for r in ranges], DTYPES[spec.dtype])
        if not self.parameter.stacked:
            self._copy(self.parameter.weights[0], plane, ranges, part)
            return part
        for e in ranges[0]:
            if e < len(self.parameter.weights):
                name = self.parameter.weights[e]
                self._copy(name, plane, ranges[1:], part[e - ranges[0].start])
        return part

    def _copy(self, weight: str, plane: int, ranges: list[range], part: np.ndarray) -> None:
        name = scale_name(weight) if plane else weight
        stored = self.files.view(name)[tuple(slice(r.start, r.stop) for r in ranges)]
        origin = tuple(r.start for r in ranges)
        fault = value_fault(stored, self.files.entry(name).dtype, origin)
        if fault:
            self.problems.append(f"{name}: {fault}")
        part[tuple(slice(0, n) for n in stored.shape)] = stored

    def _read_values(self, index: Index) -> np.ndarray:
        encoding = self.parameter.encoding
        if encoding is None:
            return dequantise(self._read(0, index))
        *lead, last = index
        rows = [_divided(piece, BLOCK) for piece in lead] if encoding is Fp8Blocks else lead
        codes = self._read(0, (*lead, _divided(last, encoding.codes_per_item)))
        scales = self._read(1, (*rows, _divided(last, BLOCK)))
        return dequantise(encoding(codes, scales))


def _divided(piece: slice, size: int) -> slice:
    """The slice of units of ``size`` that a slice of items consists of."""
    ends = (piece.start, piece.stop)
    assert all(end is None or end % size == 0 for end in ends)
    return slice(*(end if end is None else end // size for end in ends))
