"""How stored tensors make up parameters: weight and scale in one packed value, experts stacked.

A parameter's path is the tensor's name without `.scale` and without the expert number. Values are
NumPy arrays, or packed dataclasses of them; a plain tensor keeps its stored dtype.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.inventory import BLOCK, Part, TensorSpec, scale_name
from pallas_kernels.quant import Fp4Rows, Fp8Blocks, Fp8Rows, Packed

Value = np.ndarray | Packed
DTYPES = {
    "I8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Parameter:
    """One parameter and the weight tensors it is made of (the experts in order; else one)."""

    path: str
    encoding: type[Packed] | None
    weights: tuple[str, ...]
    spec: TensorSpec
    scale: TensorSpec | None

    @property
    def part(self) -> Part:
        return self.spec.part

    @property
    def is_engram_table(self) -> bool:
        return self.encoding is Fp8Rows

    @property
    def stacked(self) -> bool:
        return self.encoding is Fp4Rows

    @property
    def nbytes(self) -> int:
        scale = self.scale.nbytes if self.scale else 0
        return len(self.weights) * (self.spec.nbytes + scale)

    def tensors(self) -> list[tuple[str, TensorSpec]]:
        """Names and specs of the tensors, in the order of the inventory."""
        found = []
        for name in self.weights:
            found.append((name, self.spec))
            if self.scale:
                found.append((scale_name(name), self.scale))
        return found


def parameters(specs: Mapping[str, TensorSpec]) -> dict[str, Parameter]:
    """Path -> Parameter for the text and mtp tensors of an inventory, in its order."""
    grouped: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.part != "vision" and spec.dtype != "F8_E8M0":
            grouped.setdefault(_EXPERT.sub(".experts.", name), []).append(name)
    return {
        path: Parameter(
            path,
            _encoding(names[0], specs[names[0]]),
            tuple(names),
            specs[names[0]],
            specs.get(scale_name(names[0])),
        )
        for path, names in grouped.items()
    }


def is_engram_table(path: str) -> bool:
    """Whether the parameter (or weight tensor) of this name is a table of Engram rows."""
    return path.endswith(".engram.embed.weight")


def _encoding(name: str, spec: TensorSpec) -> type[Packed] | None:
    if spec.dtype == "I8":
        return Fp4Rows
    if spec.dtype == "F8_E4M3":
        return Fp8Rows if is_engram_table(name) else Fp8Blocks
    return None


def assemble(parameter: Parameter, fetch: Callable[[str], np.ndarray], *, copy: bool) -> Value:
    """The parameter's value from `fetch(tensor name)`.

    Expert tensors are copied one by one into one preallocated stack; the others are copied, or
    with copy=False handed on as `fetch` gave them.
    """
    take: Callable[..., Any] = np.array if copy else np.asarray
    if parameter.encoding is None or parameter.scale is None:
        return take(fetch(parameter.weights[0]))
    if not parameter.stacked:
        name = parameter.weights[0]
        return parameter.encoding(take(fetch(name)), take(fetch(scale_name(name))))
    count = len(parameter.weights)
    codes: Any = np.empty((count, *parameter.spec.shape), np.uint8)
    scales: Any = np.empty((count, *parameter.scale.shape), np.uint8)
    for e, name in enumerate(parameter.weights):
        codes[e] = fetch(name)
        scales[e] = fetch(scale_name(name))
    return parameter.encoding(codes, scales)


def take_apart(parameter: Parameter, value: Value) -> Iterator[tuple[str, np.ndarray]]:
    """The stored tensors (name, array) of a parameter's value: the inverse of `assemble`.

    ValueError if the value is not in the released encoding (a dequantised weight, another shape).
    """
    leaves = (value.codes, value.scales) if isinstance(value, Packed) else (value,)
    arrays = [np.asarray(leaf) for leaf in leaves]
    expected = [parameter.spec] + ([parameter.scale] if parameter.scale else [])
    stack = (len(parameter.weights),) if parameter.stacked else ()
    right = len(arrays) == len(expected) and all(
        a.dtype == DTYPES[s.dtype] and a.shape == (*stack, *s.shape)
        for a, s in zip(arrays, expected, strict=True)
    )
    if not right:
        got = " + ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
        want = " + ".join(f"{DTYPES[s.dtype]}{[*stack, *s.shape]}" for s in expected)
        raise ValueError(f"{parameter.path}: must be {want} (the released encoding), is {got}")
    names = iter(name for name, _ in parameter.tensors())
    for e in range(len(parameter.weights)):
        for array in arrays:
            yield next(names), array[e] if parameter.stacked else array


def dequantise(value: Value) -> np.ndarray:
    """float32 values of a parameter, on the host and exact."""
    if not isinstance(value, Packed):
        return np.asarray(value).astype(np.float32)
    codes, scales = np.asarray(value.codes), np.asarray(value.scales)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    if isinstance(value, Fp4Rows):
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
        values = nibbles.reshape(value.shape).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        values = codes.astype(np.float32)
    if isinstance(value, Fp8Blocks):
        rows, columns = scales.shape
        tiles = values.reshape(rows, BLOCK, columns, BLOCK)
        tiles *= factors[:, None, :, None]
    else:
        groups = values.reshape(*scales.shape, BLOCK)
        groups *= factors[..., None]
    return values
