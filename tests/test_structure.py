"""What every file of the repository has to keep to: one-way imports, sizes, no machine's paths."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A package imports from those before it, never from those behind it.
LAYERS = ("pallas_kernels", "dsv41_jax", "sharding", "serving")
FILE_LINES = 400
FUNCTION_LINES = 80
KERNEL_LINES = 150
README_LINES = 150
TREE_BYTES = 45_000_000
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.$~}/-])/(?:work|opt|tmp|root|home|mnt|srv)(?:/[\w.-]+)+",
            r"\b(?:pypi|registry)\.[\w.-]+\w",
            r"\b[\w.-]*(?:pythonhosted|npmjs)\.\w+",
            r"\bfile:///",
            r"--(?:extra-)?index-url|--find-links",
        ]
    )
)


def files(*patterns: str) -> list[str]:
    """Files of the working tree that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.splitlines() if (ROOT / name).is_file())


PYTHON = files("*.py")
TEXT = files("*.py", "*.md", "*.toml", "*.txt", "*.yaml", "*.yml", "*.json", "*.sh", "*.ipynb")
QUOTING = ("tests/test_structure.py", "checkpoints/mini/held_out.txt")  # others' examples
TEXT += [name for name in ("Makefile", ".ci/run", *files("tools/*")) if name not in TEXT]
SOURCES = [name for name in PYTHON if name.startswith(LAYERS)]


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text("utf-8"), name)


def imported(name: str) -> set[str]:
    """Top-level packages that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(name.partition("/")[0] if node.level else node.module.partition(".")[0])
    return found


def test_there_is_something_to_check():
    assert {name.partition("/")[0] for name in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_one_way(package):
    forbidden = {*LAYERS[LAYERS.index(package) + 1 :], "tests", "tools"}
    wrong = {
        name: sorted(imported(name) & forbidden)
        for name in SOURCES
        if name.startswith(f"{package}/") and imported(name) & forbidden
    }
    assert not wrong


def test_files_are_short():
    lengths = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in PYTHON}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES} == {}


def test_functions_are_short():
    wrong = {}
    for name in PYTHON:
        limit = KERNEL_LINES if Path(name).name.startswith("kernel_sm90") else FUNCTION_LINES
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > limit:
                    wrong[f"{name}:{node.name}"] = length
    assert wrong == {}


def test_op_folders_are_complete():
    """A folder with one of an op's three files has all of them."""
    parts = {"op.py", "ref.py", "cases.py"}
    folders: dict[str, set[str]] = {}
    for name in SOURCES:
        path = Path(name)
        if path.parts[0] == "pallas_kernels" and len(path.parts) == 3:
            folders.setdefault(path.parts[1], set()).add(path.name)
    ops = {folder: held for folder, held in folders.items() if held & parts}
    assert {folder: sorted(parts - held) for folder, held in ops.items() if parts - held} == {}


def test_test_folders_are_packages():
    """Otherwise two test files of one name hide each other."""
    folders = {Path(name).parent for name in files("tests/*.py")}
    assert [str(f) for f in sorted(folders) if not (ROOT / f / "__init__.py").is_file()] == []


def test_nothing_names_a_machine_or_a_registry():
    found = {}
    for name in TEXT:
        text = (ROOT / name).read_text("utf-8")
        hits = [] if name in QUOTING else FOREIGN.findall(text)
        if hits:
            found[name] = hits[:3]
    assert found == {}


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("see /work/shared/x", True),
        ("/tmp/plan/A.md", True),
        ("https://pypi.org/simple", True),
        ("on PyPI, the registry.", False),
        ("pip install --index-url x", True),
        ("a/tmp/b and ../opt/c", False),
        ('tmp_path / "work"', False),
    ],
)
def test_the_pattern_finds_what_it_should(text, foreign):
    assert bool(FOREIGN.search(text)) is foreign


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < README_LINES


def test_tree_stays_small():
    assert sum((ROOT / name).stat().st_size for name in files()) < TREE_BYTES
