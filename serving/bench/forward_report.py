"""Rows of measured cases: for programs, for people, as a picture."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import jax

from dsv41_jax.command import output_file
from dsv41_jax.errors import UserError
from serving.bench.forward_measure import Measured

Row = dict[str, Any]

# What rows lack that were written before these columns were.
_OLDER = {
    "engram": "hbm", "fetch_us": None, "tflop": None, "matmul_tflops": None, "matmul_pct": None,
}  # fmt: skip


def row_of(found: Measured, layout: str, routing: str, engram: str) -> Row:
    """One case. us, spread_pct, samples, host_pct are None where it could not run. parts: kind of
    layer -> what one of them takes; ``extrapolated_us`` is the sum of these times their counts,
    ``us`` the step itself.
    """
    case, timing = found.case, found.timing
    rows, tokens = (max(getattr(g, name) for g in case.groups) for name in ("rows", "tokens"))
    extrapolated = sum(part["total_us"] for part in found.parts.values())
    return {
        "case": case.key,
        "name": case.name,
        "phase": case.phase,
        "layout": layout,
        "batch": case.requests,
        "rows": rows,
        "context": tokens,
        "replay": case.replay,
        "command_buffers": case.captured,
        "routing": routing,
        "engram": engram,
        "measured": timing is not None,
        "us": timing and round(timing.us, 2),
        "spread_pct": timing and round(timing.spread_pct, 1),
        "samples": timing and timing.samples,
        "host_pct": timing and round(timing.host_pct, 1),
        "floor_us": round(found.floor_us, 2),
        "extrapolated_us": round(extrapolated, 2) if found.parts else None,
        "launches": found.launches,
        "kernels": found.kernels,
        "collectives": {name: asdict(traffic) for name, traffic in found.collectives.items()},
        "caches_moved": found.moved,
        "results_moved": found.results_moved,
        "finite": found.finite,
        "why": found.why,
        "fetch_us": found.fetch_us and round(found.fetch_us, 2),
        "parts": found.parts,
    }


def read_rows(path: str | None) -> list[Row]:
    """Rows of an earlier run that left a file at the path; UserError if it is none."""
    if path is None or not Path(path).exists():
        return []
    try:
        rows = json.loads(Path(path).read_text("utf-8"))["rows"]
        return [_OLDER | row for row in rows if row["measured"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"--json {path}: is there, but no result of this command: {error!r}"
        raise UserError(problem) from None


def write_rows(path: str | None, rows: list[Row], notes: list[str]) -> None:
    """{'device', 'jax', 'notes', 'rows'}, if a path is given."""
    if path:
        document = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "notes": notes,
            "rows": rows,
        }
        with output_file(path) as file:
            file.write(json.dumps(document, indent=1).encode() + b"\n")


def named(row: Row) -> str:
    """The case, and where its Engram tables are if not on the device."""
    return row["case"] if row["engram"] == "hbm" else f"{row['case']}, engram {row['engram']}"


def case_line(row: Row) -> str:
    """A line of progress."""
    if not row["measured"]:
        return f"{named(row)}: {row['why']}"
    share = row["matmul_pct"]
    remarks = [
        f"{share:.1f} % of bf16 products" if share else "",
        f"{row['caches_moved']} cache arrays moved" if row["caches_moved"] else "",
        "" if row["finite"] else "RESULTS ARE NOT FINITE",
        row["why"],
    ]
    line = f"{named(row)}: {_ms(row['us'])} ms, {_ratio(row['us'], row['floor_us'])}x its floor"
    return ", ".join([line, *filter(None, remarks)])


def tables(rows: list[Row], machine: str) -> list[str]:
    """What people read: whole dispatches, layers by kind, times to the first token."""
    shown = [f"floor: bytes and FLOPs on {machine}; x = measured / floor", ""]
    shown += _columns([_whole(row) for row in rows])
    parts = [part for row in rows for part in _parts(row)]
    if parts:
        shown += ["", "single layers, and their sum over the layers of the model", ""]
        shown += _columns(parts)
    first = list(_first_tokens(rows))
    if first:
        shown += ["", "time to the first token, measured; replay off = 1", "", *_columns(first)]
    engrams = list(_engrams(rows))
    if engrams:
        shown += ["", "Engram tables in HBM and on the host; fetch: rows by themselves", ""]
        shown += _columns(engrams)
    drafts = list(_drafts(rows))
    if drafts:
        shown += ["", "a draft beside the step that verifies it", "", *_columns(drafts)]
    return shown


def _whole(row: Row) -> Row:
    return {
        "layout": row["layout"],
        "case": named(row),
        "routing": row["routing"],
        "ms": _ms(row["us"]) if row["measured"] else row["why"],
        "+-%": row["spread_pct"],
        "host %": row["host_pct"],
        "floor ms": _ms(row["floor_us"]),
        "x": _ratio(row["us"], row["floor_us"]),
        "matmul %": f"{row['matmul_pct']:.1f}" if row["matmul_pct"] else "",
        "launches": row["launches"],
        "moved": f"{row['caches_moved']}+{row['results_moved']}",
    }


def _parts(row: Row) -> Iterable[Row]:
    if not row["parts"]:
        return
    for name, part in row["parts"].items():
        yield {
            "layout": row["layout"],
            "case": row["case"],
            "routing": row["routing"],
            "kind": name,
            "count": part["count"],
            "us": f"{part['us']:.1f}",
            "+-%": f"{part['spread_pct']:.1f}",
            "host %": f"{part['host_pct']:.0f}",
            "floor us": f"{part['floor_us']:.1f}",
            "x": _ratio(part["us"], part["floor_us"]),
            "launches": f"{part['launches']:.0f}",
        }
    place = {name: row[name] for name in ("layout", "case", "routing")}
    floor = row["floor_us"]
    for name, us in (("sum, extrapolated", row["extrapolated_us"]), ("whole, measured", row["us"])):
        if us:
            yield {**place, "kind": name, "us": f"{us:.1f}", "floor us": f"{floor:.1f}",
                   "x": _ratio(us, floor)}  # fmt: skip


def _first_tokens(rows: list[Row]) -> Iterable[Row]:
    """Prompts that were measured in several configurations: ratios to replay off."""
    for off in rows:
        if off["phase"] != "prefill" or off["replay"] or not off["measured"]:
            continue
        same = ("layout", "name", "batch", "rows", "context", "routing", "engram")
        for row in rows:
            if row["measured"] and all(row[name] == off[name] for name in same):
                parts = off["extrapolated_us"], row["extrapolated_us"]
                yield {
                    "layout": row["layout"],
                    "engram": row["engram"],
                    "rows": row["rows"],
                    "context": row["context"],
                    "replay": "on" if row["replay"] else "off",
                    "command buffers": "on" if row["command_buffers"] else "off",
                    "ms": _ms(row["us"]),
                    "faster": _ratio(off["us"], row["us"]),
                    "by layer times": _ratio(*parts) if all(parts) else "-",
                    "by floors": _ratio(off["floor_us"], row["floor_us"]),
                }


def _engrams(rows: list[Row]) -> Iterable[Row]:
    """Cases that were measured with tables on the host, beside those with tables in HBM."""
    by_case: dict[tuple, dict[str, Row]] = {}
    for row in filter(lambda row: row["measured"], rows):
        by_case.setdefault((row["layout"], row["case"], row["routing"]), {})[row["engram"]] = row
    for found in by_case.values():
        if set(found) == {"hbm"}:
            continue
        for mode, row in found.items():
            yield {
                **{name: row[name] for name in ("layout", "case", "routing")},
                "engram": mode,
                "step us": f"{row['us']:.1f}",
                "fetch us": f"{row['fetch_us']:.1f}" if row["fetch_us"] else "",
                "x hbm": _ratio(row["us"], found["hbm"]["us"] if "hbm" in found else None),
            }


def _drafts(rows: list[Row]) -> Iterable[Row]:
    """Drafts and verifications of as many requests with as many tokens."""
    same = ("layout", "batch", "context", "routing", "engram")
    for verify in rows:
        for draft in rows:
            pair = (verify["phase"], draft["phase"]) == ("verify", "draft")
            if pair and verify["us"] and draft["us"] and all(verify[n] == draft[n] for n in same):
                yield {
                    **{name: verify[name] for name in same},
                    "verify ms": _ms(verify["us"]),
                    "draft ms": _ms(draft["us"]),
                    "draft %": f"{100 * draft['us'] / verify['us']:.1f}",
                }


def _columns(rows: list[Row]) -> list[str]:
    """Columns of equal width under their names."""
    cells = [list(rows[0]), *([str(row.get(name, "")) for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def _ms(us: float) -> str:
    return f"{us / 1e3:.4g}"


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.3g}" if a and b else "-"


def plot(rows: list[Row], title: str, file: BinaryIO) -> None:
    """A PNG: measured time and floor of every case."""
    shown = [row for row in rows if row["measured"]]
    if not shown:
        raise UserError("--plot: nothing was measured, so there is nothing to draw")
    height = 1.5 + 0.35 * len(shown)
    figure = import_module("matplotlib.figure").Figure((9, height), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['layout']} {named(row)}" for row in shown]
    axes.barh(names, [row["us"] / 1e3 for row in shown], label="measured")
    axes.barh(names, [row["floor_us"] / 1e3 for row in shown], height=0.4, label="floor")
    axes.set(xlabel="ms", xscale="log", title=title)
    axes.invert_yaxis()
    axes.legend(fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(file, format="png", dpi=150)
