"""A random model in the released encodings, made one parameter at a time.

Scales keep activations of order one: rows of a linear are N(0, gain^2 / K), sub-layer outputs are
small against the residual. Every tensor has its own seed, from its name, so neither the order of
making nor a change elsewhere alters it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from zlib import crc32

import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.inventory import TensorSpec, inventory, scale_name
from dsv41_jax.checkpoint.parameters import DTYPES, Parameter, Value, assemble, parameters
from dsv41_jax.config import Config

_FP8_SPREAD, _FP4_SPREAD = 64.0, 2.0
_CHUNK_ROWS = 1 << 16
# First match counts: (name pattern, mean, standard deviation); "K" is 1/sqrt(columns).
_PLAIN = (
    (r"norm\.weight$|engram\.[qk]_weight$", 1.0, 0.2),
    (r"attn_sink$", 0.0, 0.7),
    (r"gate\.bias$", 0.0, 0.3),
    (r"gate\.bias_vl$", 0.3, 0.5),
    (r"hc_\w+_base$", 0.2, 0.6),
    (r"hc_\w+_scale$", 0.9, 0.2),
    (r"(^|\.)embed\.weight$", 0.0, 1.0),
)
_GAINS = (
    (r"\.wo_b\.|\.w2\.", 0.25),
    (r"engram\.wkv\.", 0.3),
    (r"\.w[13]\.", 1.3),
    (r"^head\.", 2.4),
    (r"ffn\.gate\.", 2.0),
    (r"wgate\.|\.wo_a\.", 1.5),
    (r"attn\.wq_b\.", 1.6),
)


class RandomModel(Mapping[str, Value]):
    """Parameter path -> value of a random model (text and draft), generated when asked for.

    float32 and BF16 tensors are normal; packed ones have normal codes and scale bytes that differ
    from block to block by up to a factor of two either way. The same seed gives the same bytes.
    """

    def __init__(self, cfg: Config, seed: int = 0) -> None:
        self._parameters = parameters(inventory(cfg))
        self._seed = seed

    def __getitem__(self, path: str) -> Value:
        parameter = self._parameters[path]
        made: dict[str, np.ndarray] = {}

        def fetch(name: str) -> np.ndarray:
            if name not in made:
                made.update(_tensor(name, parameter, self._seed))
            return made.pop(name)

        return assemble(parameter, fetch, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _tensor(name: str, parameter: Parameter, seed: int) -> dict[str, np.ndarray]:
    """The weight tensor `name`, and its scale if it has one."""
    rng = np.random.default_rng([seed, crc32(name.encode())])
    spec = parameter.spec
    if parameter.scale is None:
        return {name: _plain(name, spec, rng)}
    columns = spec.shape[-1] * (2 if spec.dtype == "I8" else 1)
    spread = _FP4_SPREAD if spec.dtype == "I8" else _FP8_SPREAD
    gain = math.sqrt(columns) if parameter.is_engram_table else _gain(name)
    exponent = round(math.log2(gain / (spread * math.sqrt(columns))))
    scales = rng.integers(126 + exponent, 129 + exponent, parameter.scale.shape, np.uint8)
    codes = np.empty(spec.shape, DTYPES[spec.dtype])
    for start in range(0, len(codes), _CHUNK_ROWS):
        rows = codes[start : start + _CHUNK_ROWS]
        normal = rng.standard_normal((len(rows), columns), np.float32) * spread
        rows[:] = _fp4_bytes(normal) if spec.dtype == "I8" else normal.clip(-448, 448)
    return {name: codes, scale_name(name): scales}


def _fp4_bytes(values: np.ndarray) -> np.ndarray:
    codes = values.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _plain(name: str, spec: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    mean, deviation = 0.0, _gain(name) / math.sqrt(spec.shape[-1])
    for pattern, its_mean, its_deviation in _PLAIN:
        if re.search(pattern, name):
            mean, deviation = its_mean, its_deviation
            break
    values = rng.standard_normal(spec.shape, np.float32)
    values *= np.float32(deviation)
    values += np.float32(mean)
    return values.astype(DTYPES[spec.dtype])


def _gain(name: str) -> float:
    return next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
