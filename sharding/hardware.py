"""Figures of the machines that an estimate may be asked for, each with its source.

A figure that nobody has measured or published is None: the user supplies it, it is never guessed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

from dsv41_jax.errors import UserError

MEANINGS = {
    "gpus_per_domain": "GPUs that one fast link connects",
    "memory_gb": "GB of memory a GPU",
    "memory_tbps": "TB/s from memory",
    "bf16_tflops": "TFLOP/s of bf16 matrices",
    "fp8_tflops": "TFLOP/s of FP8 matrices",
    "fp4_tflops": "TFLOP/s of FP4 matrices",
    "link_gbps": "GB/s a GPU and direction inside a domain",
    "network_gbps": "GB/s a GPU and direction between domains",
    "collective_us": "least microseconds of one collective",
    "launch_us": "microseconds to launch a kernel inside a compiled step",
    "kernels_per_layer": "kernels of one layer",
    "weights_factor": "share of memory_tbps that reads of weights reach",
    "cache_factor": "share of memory_tbps that reads of caches reach",
    "rows_factor": "share of memory_tbps that activations reach",
    "reserved_fraction": "share of the memory kept for temporaries and programs",
    "sms": "streaming multiprocessors",
    "watts": "watts a GPU",
}
_MAY_BE_ZERO = ("collective_us", "launch_us", "kernels_per_layer", "reserved_fraction")
_AT_MOST_ONE = ("weights_factor", "cache_factor", "rows_factor", "reserved_fraction")


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from: measured, datasheet, vendor, assumption or user."""

    value: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """A machine. matrix: the rate at which weights are multiplied, "bf16" where FP4 and FP8 are
    dequantised. measured: figures of this project's own stand behind it; else what it gives is a
    projection.
    """

    name: str
    title: str
    matrix: str
    measured: bool
    figures: dict[str, Figure | None]

    def __getitem__(self, name: str) -> float:
        """The value of a figure; UserError if it is unknown."""
        self.require((name,))
        figure = self.figures[name]
        assert figure is not None
        return figure.value

    def require(self, names: Iterable[str]) -> None:
        """UserError that lists every figure of ``names`` that is unknown, and how to give it."""
        unknown = [name for name in names if self.figures[name] is None]
        if unknown:
            listed = "; ".join(f"{name} ({MEANINGS[name]})" for name in unknown)
            raise UserError(f"hardware {self.name}: give --set NAME=VALUE for {listed}", unknown)

    def known(self, name: str) -> float | None:
        """The value of a figure, None if it is unknown."""
        figure = self.figures[name]
        return figure.value if figure else None

    @property
    def weights_tflops(self) -> float:
        """TFLOP/s of matrix products with weights."""
        return self[f"{self.matrix}_tflops"]

    @property
    def label(self) -> str:
        """Title, whether it is a projection, and the figures that the user gave."""
        given = [
            f"{name}={figure.value:g}"
            for name, figure in self.figures.items()
            if figure and figure.source == "user"
        ]
        label = self.title if self.measured else f"{self.title} (projection, not measured)"
        return f"{label} with {', '.join(given)}" if given else label

    def with_settings(self, settings: Iterable[str]) -> "Hardware":
        """The machine with figures given as ``name=value``; UserError for what is no figure."""
        figures = dict(self.figures)
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in MEANINGS:
                raise UserError(f"--set {setting}: must be NAME=VALUE of {', '.join(MEANINGS)}")
            figures[name] = Figure(_number(setting, name, text), "user")
        return replace(self, figures=figures)


def _number(setting: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    enough = value >= 0 if name in _MAY_BE_ZERO else value > 0
    if not isfinite(value) or not enough:
        least = "a number of at least 0" if name in _MAY_BE_ZERO else "a number above 0"
        raise UserError(f"--set {setting}: {name} must be {least}")
    if name in _AT_MOST_ONE and value > 1:
        raise UserError(f"--set {setting}: {name} must be at most 1")
    return value


_DATASHEET, _VENDOR = "datasheet", "vendor's announcement"
_ONE_DOMAIN = Figure(1.0, "one memory domain")
_RESERVED = Figure(0.1, "assumption: a tenth, as in `inspect`")
_KERNELS = Figure(12, "assumption: fused kernels of one layer")
# What is assumed of every machine with one memory domain.
ASSUMED: dict[str, Figure | None] = {
    "kernels_per_layer": _KERNELS,
    "weights_factor": _ONE_DOMAIN,
    "cache_factor": _ONE_DOMAIN,
    "rows_factor": _ONE_DOMAIN,
    "reserved_fraction": _RESERVED,
}
_UNKNOWN: dict[str, Figure | None] = dict.fromkeys(MEANINGS)

_H200 = (
    _UNKNOWN
    | ASSUMED
    | {
        "gpus_per_domain": Figure(8, _DATASHEET),
        "memory_gb": Figure(141, _DATASHEET),
        "memory_tbps": Figure(4.3, "measured (copies; datasheet 4.8)"),
        "bf16_tflops": Figure(790, "measured (datasheet 990)"),
        "fp8_tflops": Figure(1400, "assumption (datasheet 1980; one 8192^3 product measured 1406)"),
        "link_gbps": Figure(450, _DATASHEET),
        "collective_us": Figure(7, "published one-shot figures (a trial of ours on two: 2.7)"),
        "launch_us": Figure(1.5, "assumption (chains of small kernels measured 0.9 to 1.3)"),
        "sms": Figure(132, "measured"),
        "watts": Figure(700, _DATASHEET),
    }
)
_GB300 = (
    _UNKNOWN
    | ASSUMED
    | {
        "gpus_per_domain": Figure(72, _DATASHEET),
        "memory_gb": Figure(288, _DATASHEET),
        "memory_tbps": Figure(8, _DATASHEET),
        "bf16_tflops": Figure(2500, _DATASHEET),
        "fp8_tflops": Figure(5000, _DATASHEET),
        "fp4_tflops": Figure(15000, _DATASHEET),
        "link_gbps": Figure(900, _DATASHEET),
    }
)
# Two memory domains a GPU, whose ratios are unknown; FP4 is published as a range, so it is unknown.
_RUBIN = _UNKNOWN | {
    "gpus_per_domain": Figure(72, _DATASHEET),
    "memory_gb": Figure(288, _DATASHEET),
    "memory_tbps": Figure(22, _VENDOR),
    "link_gbps": Figure(1800, _VENDOR),
    "kernels_per_layer": _KERNELS,
    "reserved_fraction": _RESERVED,
    "sms": Figure(212, "used by published kernels"),
}
MACHINES = {
    "h200": Hardware("h200", "H200 SXM", "bf16", True, _H200),
    "gb300": Hardware("gb300", "GB300 NVL72", "fp8", False, _GB300),
    "rubin": Hardware("rubin", "Vera Rubin NVL72", "fp8", False, _RUBIN),
}


def hardware(name: str) -> Hardware:
    """The machine of that name; UserError that lists what exists."""
    if name not in MACHINES:
        raise UserError(f"hardware {name!r}: must be one of {', '.join(MACHINES)}, this")
    return MACHINES[name]
