"""The parameters that training starts from."""

import re
from collections.abc import Mapping
from zlib import crc32

import numpy as np

_ONES = re.compile(r"norm\.weight$|engram\.[qk]_weight$")
_ZEROS = re.compile(r"attn_sink$|gate\.bias(_vl)?$")
_SMALL = re.compile(r"hc_\w+_fn$|gate\.weight$")


def initial(shapes: Mapping[str, tuple[int, ...]], layers: int, seed: int) -> dict[str, np.ndarray]:
    """float32 by path: weights of standard deviation 1 / sqrt(inputs), less for what is added to
    the streams and for the head. Every parameter has a seed of its own.

    Residual streams start out apart: each sublayer reads mostly one of them and keeps all.
    """
    places = sorted(path for path in shapes if path.endswith("_base"))
    return {
        path: _stream_bias(places.index(path), shape[0])
        if path in places
        else _drawn(path, shape, layers, seed)
        for path, shape in shapes.items()
    }


def _drawn(path: str, shape: tuple[int, ...], layers: int, seed: int) -> np.ndarray:
    if _ZEROS.search(path):
        return np.zeros(shape, np.float32)
    if _ONES.search(path):
        return np.ones(shape, np.float32)
    if path.endswith("_scale"):
        return np.full(shape, 0.1, np.float32)
    deviation = 0.02 if _SMALL.search(path) else shape[-1] ** -0.5
    if re.search(r"\.(wo_b|w2)\.weight$", path):
        deviation *= (2 * layers) ** -0.5
    if path == "head.weight":
        deviation *= 0.5
    rng = np.random.default_rng([seed, crc32(path.encode())])
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _stream_bias(place: int, mixes: int) -> np.ndarray:
    """Bias of a sublayer's coefficients: pre, post, then the matrix of streams."""
    streams = round((mixes + 1) ** 0.5) - 1
    reads = np.where(np.arange(streams) == place % streams, 1.5, -1.5)
    parts = reads, np.zeros(streams), 4.0 * np.eye(streams).ravel()
    return np.concatenate(parts).astype(np.float32)
