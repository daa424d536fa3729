"""The report as a picture (matplotlib, an extra)."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, BinaryIO

from serving.quality.compare import Row
from serving.quality.drafts import Acceptance
from serving.quality.needle import Recall
from serving.quality.report import Report


def plot(report: Report, title: str, file: BinaryIO) -> None:
    """A PNG: differences of every study, replay by position, recall and acceptance."""
    panels = [
        (_replay, [row for row in report.rows if row.study == "replay" and row.condition != "all"]),
        (_variants, [row for row in report.rows if row.study != "replay"]),
        (_needle, report.recalls),
        (_drafts, report.drafts),
    ]
    drawn = [(draw, data) for draw, data in panels if data]
    size = (7 * min(2, len(drawn)), 4 * -(-len(drawn) // 2))
    figure = import_module("matplotlib.figure").Figure(size, layout="constrained")
    grid = figure.subplots(-(-len(drawn) // 2), min(2, len(drawn)), squeeze=False).flat
    for axes, (draw, data) in zip(grid, drawn, strict=False):
        draw(axes, data)
        axes.grid(True, alpha=0.3)
    for axes in list(grid)[len(drawn) :]:
        axes.set_axis_off()
    figure.suptitle(title)
    figure.savefig(file, format="png", dpi=120)


def _replay(axes: Any, rows: Sequence[Row]) -> None:
    for side in dict.fromkeys(row.variant for row in rows):
        own = [row for row in rows if row.variant == side]
        at = [int(row.condition.split()[2]) for row in own]
        _error_bars(axes, at, [row.difference for row in own], 1e3, label=side)
    axes.axhline(0, color="grey", lw=0.8)
    axes.set(xscale="log", xlabel="tokens of the prompt, or of the hit", title="Bounded replay")
    axes.set_ylabel("0.001 nats a token above exact")
    axes.legend(title="side")


def _variants(axes: Any, rows: Sequence[Row]) -> None:
    names = [f"{row.study}: {row.variant}" for row in rows]
    errors = [1e3 * row.difference.error for row in rows]
    axes.errorbar([1e3 * row.difference.mean for row in rows], names, xerr=errors, fmt="o")
    axes.axvline(0, color="grey", lw=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="0.001 nats a token above exact", title="Numerics, caches and limits")


def _needle(axes: Any, recalls: Sequence[Recall]) -> None:
    residues = [r for r in recalls if r.condition.startswith("residue")]
    at = [int(r.condition.split()[1]) for r in residues]
    axes.plot(at, [100 * r.exact.mean for r in residues], ".-", label="exact", color="grey")
    axes.plot(at, [100 * r.recalled.mean for r in residues], ".", label="replay")
    axes.set(xlabel="residue of the prompt's length", ylabel="recalled, %", title="Needle")
    axes.legend()


def _drafts(axes: Any, runs: Sequence[Acceptance]) -> None:
    for run in runs:
        places = range(1, len(run.by_position) + 1)
        label = f"temperature {run.temperature:g}: {run.tokens.mean:.2f} tokens a step"
        _error_bars(axes, places, run.by_position, 100, label=label)
    axes.set(xlabel="place in the block", ylabel="accepted, %", title="DSpark", ylim=(0, 100))
    axes.legend()


def _error_bars(axes: Any, at: Any, estimates: Sequence[Any], scale: float, *, label: str) -> None:
    means = [scale * own.mean for own in estimates]
    errors = [scale * own.error for own in estimates]
    axes.errorbar(list(at), means, yerr=errors, fmt="o-", capsize=3, label=label)
