"""The notebooks as files: in step with their scripts, short cells, small outputs.

``make notebooks`` runs them.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
CELL_LINES = 15
OUTPUT_BYTES = 200_000
PRIVATE = re.compile(r"(?:\.|\bimport )_(?!_)\w")


@cache
def cells(name: str) -> list[dict[str, Any]]:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text("utf-8"))["cells"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def percent_cells(text: str) -> list[tuple[str, str]]:
    """(kind, source) of the cells of a script in the percent format."""
    parts = re.split(r"^# %%( \[markdown\])?\n", text, flags=re.MULTILINE)[1:]
    found = []
    for markdown, body in zip(parts[::2], parts[1::2], strict=True):
        body = body.strip("\n")
        if markdown:
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.split("\n"))
        found.append(("markdown" if markdown else "code", body))
    return found


def test_every_task_has_its_notebook():
    numbers = [name.partition("_")[0] for name in NAMES]
    assert numbers == [f"{i:02}" for i in range(8)]
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_are_in_step(name):
    script = percent_cells((NOTEBOOKS / f"{name}.py").read_text("utf-8"))
    assert [(cell["cell_type"], source(cell)) for cell in cells(name)] == script


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short_and_keep_to_public_names(name):
    code = [source(cell) for cell in cells(name) if cell["cell_type"] == "code"]
    assert code
    assert [text for text in code if text.count("\n") + 1 >= CELL_LINES] == []
    assert [hit for text in code for hit in PRIVATE.findall(text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_small_and_free_of_errors(name):
    stored = [cell for cell in cells(name) if cell.get("outputs")]
    outputs = [output for cell in stored for output in cell["outputs"]]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert max(len(json.dumps(cell["outputs"])) for cell in stored) < OUTPUT_BYTES


def test_percent_cells_takes_both_kinds():
    text = "# ---\n# x\n# ---\n\n# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\n\n# %%\ny = 2\n"
    assert percent_cells(text) == [
        ("markdown", "# A\n\nb"),
        ("code", "x = 1"),
        ("code", "y = 2"),
    ]


@pytest.mark.parametrize(
    ("code", "private"),
    [
        ("model._rows", True),
        ("from a import _b", True),
        ("a.__name__", False),
        ("x_y = a.b_c", False),
        ("for _ in range(3): pass", False),
    ],
)
def test_the_pattern_finds_private_names(code, private):
    assert bool(PRIVATE.search(code)) is private
