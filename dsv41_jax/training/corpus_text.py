"""Documents out of package archives: prose files, docstrings, service descriptions."""

import ast
import gzip
import html
import inspect
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Files = Iterator[tuple[str, bytes]]
Document = tuple[str, str]  # path in the archive, text

_PROSE = (".rst", ".txt", ".md")
_SKIPPED = re.compile(r"(^|/)(tests?|testing|_vendor|vendored|locale)(/|$)|LICEN|COPYING|AUTHORS")
_TAG = re.compile(r"<[^>]+>")
_SHORTEST = 200  # characters of a document that says something


def files_of(archive: Path) -> Files:
    """Path and content of every file of a wheel or a source archive, sorted by path."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as packed:
            for name in sorted(packed.namelist()):
                yield name, packed.read(name)
        return
    with tarfile.open(archive) as packed:
        for member in sorted(packed.getmembers(), key=lambda m: m.name):
            content = packed.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.partition("/")[2], content.read()


def declared_licence(archive: Path) -> str:
    """What the package says of its own licence: expression, classifiers, or the first line."""
    for name, content in files_of(archive):
        if name.endswith((".dist-info/METADATA", "PKG-INFO")) and name.count("/") <= 1:
            head = content.decode("utf-8", "replace").partition("\n\n")[0]
            found = re.findall(r"^License-Expression: (.*)$", head, re.M)
            found = found or re.findall(r"^Classifier: License :: (?:.* :: )?(.*)$", head, re.M)
            found = found or re.findall(r"^License: (.*)$", head, re.M)
            if found:
                return "; ".join(found)
    return ""


def prose(files: Files) -> Iterator[Document]:
    """Text files as they are, less repeated blank lines."""
    for name, content in files:
        text = _decoded(content) if name.endswith(_PROSE) and not _SKIPPED.search(name) else ""
        if len(text) >= _SHORTEST:
            yield name, re.sub(r"\n{3,}", "\n\n", text).strip()


def docstrings(files: Files) -> Iterator[Document]:
    """One document a module: the docstrings of its public names under their dotted names."""
    for name, content in files:
        if not name.endswith(".py") or _SKIPPED.search(name):
            continue
        tree = _parsed(content)
        if tree is not None:
            dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            parts = [f"{title}\n\n{text}" for title, text in _documented(tree, dotted)]
            if len(text := "\n\n".join(parts)) >= _SHORTEST:
                yield name, text


def descriptions(files: Files) -> Iterator[Document]:
    """One document a web service: what its description files say of it and its operations."""
    for name, content in files:
        if not name.endswith("service-2.json.gz"):
            continue
        service = json.loads(gzip.decompress(content))
        about = {service["metadata"]["serviceFullName"]: service.get("documentation", "")}
        about |= {key: op.get("documentation", "") for key, op in service["operations"].items()}
        parts = [f"{key}\n\n{_plain(text)}" for key, text in about.items() if text]
        if len(text := "\n\n".join(parts)) >= _SHORTEST:
            yield name, text


EXTRACTORS: dict[str, Callable[[Files], Iterator[Document]]] = {
    "prose": prose,
    "docstrings": docstrings,
    "descriptions": descriptions,
}


def _decoded(content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    return "" if "\ufffd" in text else text.replace("\r\n", "\n")


def _parsed(content: bytes) -> ast.Module | None:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError):  # templates and code for other Pythons
        return None


def _documented(node: Any, dotted: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node, clean=False)
    if text:
        yield dotted, inspect.cleandoc(text)
    for child in node.body:
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if named and not child.name.startswith("_"):
            yield from _documented(child, f"{dotted}.{child.name}")


def _plain(markup: str) -> str:
    text = re.sub(r"</?(?:p|li|ul|dl|dt|dd|note)[^>]*>", "\n", markup)
    lines = (line.strip() for line in html.unescape(_TAG.sub("", text)).splitlines())
    return "\n".join(line for line in lines if line)
