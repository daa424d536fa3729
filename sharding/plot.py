"""The Pareto front of a sweep, and its picture (matplotlib, an extra)."""

from collections import defaultdict
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, BinaryIO

from dsv41_jax.errors import UserError

Row = dict[str, Any]


def pareto(rows: Iterable[Row]) -> list[Row]:
    """The rows that fit and that no other of their phase and context beats in tokens/s of a user
    without losing tokens/s of a GPU; by falling tokens/s of a user.
    """
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        if row["fits"] and row["tokens_per_s_user"]:
            groups[row["phase"], row["context"]].append(row)
    front = []
    for group in groups.values():
        best = 0.0
        for row in sorted(group, key=lambda r: (-r["tokens_per_s_user"], -r["tokens_per_s_gpu"])):
            if row["tokens_per_s_gpu"] > best:
                best = row["tokens_per_s_gpu"]
                front.append(row)
    return front


def plotting(path: str) -> None:
    """UserError if a picture cannot be drawn here, or not under that name."""
    if not path.endswith(".png"):
        raise UserError(f"--plot {path}: must end in .png")
    if find_spec("matplotlib") is None:
        raise UserError("--plot: needs matplotlib: pip install 'dsv41-jax[bench]'")


def plot_front(rows: list[Row], title: str, file: BinaryIO) -> None:
    """A PNG of the decode rows that fit, each context's front as a line; UserError without any."""
    shown = [r for r in rows if r["phase"] == "decode" and r["fits"]]
    if not shown:
        raise UserError("--plot: no decode step fits, so there is nothing to draw")
    figure = import_module("matplotlib.figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["layout"] for row in shown):
        of_it = [row for row in shown if row["layout"] == name]
        axes.plot(*_points(of_it), "o", label=name)
    for context in dict.fromkeys(row["context"] for row in shown):
        front = pareto(row for row in shown if row["context"] == context)
        axes.plot(*_points(front), "-", color="grey", label=f"front, context {context}")
        for row in front:
            text = f"{row['layout']} b{row['batch']}"
            axes.annotate(text, (row["tokens_per_s_user"], row["tokens_per_s_gpu"]), fontsize=7)
    axes.set(xlabel="tokens/s a user", ylabel="tokens/s a GPU", yscale="log")
    axes.set_title(f"Estimated decode, {title}")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(file, format="png", dpi=150)


def _points(rows: list[Row]) -> tuple[list[float], list[float]]:
    return [r["tokens_per_s_user"] for r in rows], [r["tokens_per_s_gpu"] for r in rows]
