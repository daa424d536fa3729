"""Rows of a benchmark for people and for programs."""

import json
from typing import Any

import jax

from dsv41_jax.command import output_file


def report(rows: list[dict[str, Any]], json_path: str | None) -> None:
    """Print a table, and write {'device', 'jax', 'rows'} if a path is given."""
    cells = [list(map(str, rows[0])), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)))
    if json_path:
        document = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
        with output_file(json_path) as file:
            file.write(json.dumps(document, indent=1).encode())
