"""Where a step's time goes: kernels by name, and layers by kind, from a trace of the profiler.

The profiler makes XLA launch what a command buffer holds one by one, so that only the times of
kernels mean something there, and not what lies between them; steps are traced once more with an
executable that keeps its command buffers, where the gaps are those of earnest steps.
"""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

STEPS = 5
MODES = {"launches": "launch by launch", "graph": "in command buffers"}
_NUMBER = re.compile(r"([._]\d+)+$")
_SHOWN = 40  # rows of a table; the file holds all of them


@dataclass(frozen=True)
class Kernel:
    """One execution; nanoseconds from some origin."""

    name: str
    start: float
    end: float


def traced(step: Callable[[], Any], steps: int = STEPS) -> list[Kernel]:
    """What the first device ran in so many steps, in the order of their starts."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.enable_hlo_proto = 0, False
    jax.block_until_ready(step())
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            out = None
            for _ in range(steps):
                out = None  # or the next step's results would get other addresses
                out = step()
            jax.block_until_ready(out)
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    return sorted(_kernels(data), key=lambda kernel: kernel.start)


def _kernels(data: Any) -> Iterator[Kernel]:
    """Of a GPU what its streams ran; of a CPU the instructions that its threads say they ran."""
    planes = list(data.planes)
    device = next((plane for plane in planes if plane.name.startswith("/device:GPU")), None)
    for plane in [device] if device else planes:
        for line in plane.lines:
            if device and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if device or _is_instruction(event):
                    yield Kernel(event.name, event.start_ns, event.start_ns + event.duration_ns)


def _is_instruction(event: Any) -> bool:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        return any(name == "hlo_op" for name, _ in event.stats)


def profile(kernels: list[Kernel], steps: int, layers: list[str]) -> dict[str, Any]:
    """Numbers of one step, the mean of ``steps``. layers: the kinds of those that it runs, in
    order. span_us: from the first start to the last end; busy_us: when something ran; sum_us: of
    all executions, more than busy where some ran at once.
    """
    if not kernels:
        return {"why": "the trace holds no kernels"}
    total = sum(kernel.end - kernel.start for kernel in kernels)
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        found[_plain(kernel)].append(kernel.end - kernel.start)
    return {
        "steps": steps,
        "launches": round(len(kernels) / steps, 1),
        "span_us": _us(_span(kernels) / steps),
        "busy_us": _us(_busy(kernels) / steps),
        "sum_us": _us(total / steps),
        "kernels": [
            {
                "name": name,
                "launches": round(len(times) / steps, 2),
                "us": _us(sum(times) / steps),
                "share_pct": round(100 * sum(times) / total, 2),
                "mean_us": _us(sum(times) / len(times)),
            }
            for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))
        ],
        "layers": _layers(kernels, steps, layers),
    }


def _layers(kernels: list[Kernel], steps: int, layers: list[str]) -> list[dict[str, Any]]:
    """By kind, the mean of a layer: from the end of the experts of the layer before it to the end
    of its own. What comes before the first layer counts as its, what comes after the last as
    "ends". Empty where no kernel tells layers apart.
    """
    anchor = _anchor(kernels, steps * len(layers))
    if anchor is None or len(kernels) % steps:
        return []
    each, parts = len(kernels) // steps, defaultdict(list)
    for number in range(steps):
        step = kernels[number * each : (number + 1) * each]
        found = [at + 1 for at, kernel in enumerate(step) if _plain(kernel) == anchor]
        often = max(1, len(found) // len(layers))
        ends = found[often - 1 :: often]
        if len(ends) != len(layers):
            return []
        for kind, (start, end) in zip([*layers, "ends"], pairwise([0, *ends, each]), strict=True):
            parts[kind].append(step[start:end])
    return [
        {
            "kind": kind,
            "count": len(pieces) // steps,
            "launches": round(sum(map(len, pieces)) / len(pieces), 1),
            "span_us": _us(sum(map(_span, pieces)) / len(pieces)),
            "busy_us": _us(sum(map(_busy, pieces)) / len(pieces)),
        }
        for kind, pieces in parts.items()
        if all(pieces)
    ]


def _anchor(kernels: list[Kernel], layers: int) -> str | None:
    """The kernel of experts, or else of attention, that runs longest of those that every one of so
    many layers launches equally often.
    """
    counts, times = Counter(map(_plain, kernels)), Counter()
    for kernel in kernels:
        times[_plain(kernel)] += kernel.end - kernel.start
    for part in ("expert", "attention"):
        for name, _ in times.most_common():
            if layers and part in name and counts[name] % layers == 0:
                return name
    return None


def _plain(kernel: Kernel) -> str:
    """Its name without the number that tells it from others of the program."""
    return _NUMBER.sub("", kernel.name)


def _span(kernels: list[Kernel]) -> float:
    return max(kernel.end for kernel in kernels) - kernels[0].start


def _busy(kernels: list[Kernel]) -> float:
    """Nanoseconds in which at least one of kernels ordered by their starts runs."""
    busy, until = 0.0, 0.0
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1e3, 3)


def profile_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What people read of rows of ``profile`` that also name their case, mode and ``wall_us``."""
    for row in rows:
        yield ""
        head = f"{row['layout']} {row['case']}, {MODES[row['mode']]}"
        if "why" in row:
            yield f"{head}: {row['why']}"
            continue
        gaps = row["span_us"] - row["busy_us"]
        yield (
            f"{head}: {row['launches']:g} launches a step, busy {row['busy_us']:.0f} us, sum"
            f" {row['sum_us']:.0f} us, gaps {gaps:.0f} us; a step by itself {row['wall_us']:.0f} us"
        )
        yield f"{'launches':>9} {'us':>10} {'%':>6} {'mean us':>9}  kernel"
        for one in row["kernels"][:_SHOWN]:
            yield (
                f"{one['launches']:>9g} {one['us']:>10.1f} {one['share_pct']:>6.2f}"
                f" {one['mean_us']:>9.2f}  {one['name'][:60]}"
            )
        for one in row["layers"]:
            yield (
                f"{one['count']} x {one['kind']}: {one['span_us']:.1f} us, busy"
                f" {one['busy_us']:.1f} us, {one['launches']:g} launches"
            )
