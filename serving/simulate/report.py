"""Rows of simulations for people: a table, comparisons, pictures."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np

Row = dict[str, Any]
BASELINE = "affinity"
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("parameters", "parameters", str),
    ("policy", "policy", str),
    ("hit %", "hit_rate", lambda v: f"{100 * v:.1f}"),
    ("infinite", "hit_rate_infinite_pool", lambda v: f"{100 * v:.1f}"),
    ("TTFT p50 s", "ttft_p50_s", lambda v: f"{v:.3g}"),
    ("p90", "ttft_p90_s", lambda v: f"{v:.3g}"),
    ("p99", "ttft_p99_s", lambda v: f"{v:.3g}"),
    ("ITL p50 ms", "itl_p50_ms", lambda v: f"{v:.3g}"),
    ("p90", "itl_p90_ms", lambda v: f"{v:.3g}"),
    ("idle while queued %", "idle_while_queued", lambda v: f"{100 * v:.2f}"),
    ("waiting", "idle_while_waiting", lambda v: f"{100 * v:.2f}"),
    ("busy %", "busy", lambda v: f"{100 * v:.1f}"),
    ("requests/s", "requests_per_s", lambda v: f"{v:.4g}"),
    ("tok/s/GPU", "tokens_per_s_gpu", lambda v: f"{v:,.0f}"),
    ("computed", "computed_tokens_per_s_gpu", lambda v: f"{v:,.0f}"),
    ("tok/s/user", "tokens_per_s_user", lambda v: f"{v:.3g}"),
)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of columns; then what each policy does to the baseline's figures."""
    lines = [[title for title, _, _ in _COLUMNS]]
    for row in rows:
        cells = [(row[name], show) for _, name, show in _COLUMNS]
        lines.append(["-" if value is None else show(value) for value, show in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append("  ".join(cells).rstrip())
    return [*shown, *_comparisons(rows)]


def _comparisons(rows: Iterable[Row]) -> Iterable[str]:
    rows = list(rows)
    base = {row["parameters"]: row for row in rows if row["policy"] == BASELINE}
    for row in rows:
        against = base.get(row["parameters"])
        if against is None or against is row:
            continue
        idle = _ratio(against["idle_while_queued"], row["idle_while_queued"])
        p50 = _ratio(against["ttft_p50_s"], row["ttft_p50_s"])
        p90 = _ratio(against["ttft_p90_s"], row["ttft_p90_s"])
        more = _ratio(row["requests_per_s"], against["requests_per_s"])
        yield (
            f"{row['parameters']}: {row['policy']} against {BASELINE}: idle while queued / {idle},"
            f" TTFT p50 / {p50}, p90 / {p90}, requests/s x {more}"
        )


def _ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or not under else f"{over / under:.2f}"


def plot(rows: Sequence[Row], waits: Sequence[Sequence[float]], title: str, file: BinaryIO) -> None:
    """A PNG: how long first tokens took, and the share of time a rank idles while another queues.
    waits: TTFT in seconds of each row.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [f"{row['parameters']}: {row['policy']}" for row in rows]
    for name, values in zip(names, waits, strict=True):
        if len(values):
            ordered = np.sort(values)
            left.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=name)
    left.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log")
    left.grid(True, alpha=0.3)
    left.legend(fontsize=7)
    right.barh(names, [100 * row["idle_while_queued"] for row in rows])
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=7)
    right.set(xlabel="% of a rank's time idle while another queues")
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, format="png", dpi=150)
