"""Tensors of a released checkpoint as float64, decoded from the bytes (ARCHITECTURE 2.5)."""

import json
import struct
from pathlib import Path

import numpy as np


def load_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor by name, scales applied and left out; packed FP4 unpacked."""
    raw = {}
    for file in sorted(directory.glob("*.safetensors")):
        raw |= _read(file)
    tensors = {}
    for name, (dtype, array) in raw.items():
        if dtype != "F8_E8M0":
            scale = raw.get(name.removesuffix("weight") + "scale", (None, None))[1]
            tensors[name] = _decode(dtype, array, scale)
    return tensors


def _read(file: Path) -> dict[str, tuple[str, np.ndarray]]:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    words = {"BF16": "<u2", "F32": "<f4"}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, stop = entry["data_offsets"]
            flat = np.frombuffer(body[first:stop], words.get(entry["dtype"], "u1"))
            found[name] = entry["dtype"], flat.reshape(entry["shape"])
    return found


def _decode(dtype: str, array: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    if dtype == "F32":
        return array.astype(np.float64)
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    values = {"F8_E4M3": lambda: _E4M3[array], "I8": lambda: _nibbles(array)}[dtype]()
    factors = 2.0 ** (scale.astype(np.int64) - 127)
    for axis in (0, 1):
        factors = np.repeat(factors, values.shape[axis] // factors.shape[axis], axis)
    return values * factors


def _nibbles(packed: np.ndarray) -> np.ndarray:
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return _E2M1[codes]


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.nan if byte & 127 == 127 else -value if byte & 128 else value


_E4M3 = np.array([_e4m3(byte) for byte in range(256)])
_E2M1 = np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
