"""Held-out text beside a checkpoint, so that it can be measured without its corpus.

``python -m dsv41_jax.training.held_out --downloads DIR --out CHECKPOINT`` takes the beginnings of
held-out documents out of the packages that ``corpus`` fetched and writes ``held_out.txt``, whose
documents begin behind lines of a form feed and their source, and ``HELD_OUT.md`` with the licences.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsv41_jax.checkpoint.read import read_config
from dsv41_jax.command import exit_status
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from dsv41_jax.training.corpus import SOURCES, Document, collect, download
from dsv41_jax.training.corpus_text import files_of

TOKENS = 2200  # of a document: a prompt of 2048 and what follows it
LARGEST = 200_000  # bytes in all
_LICENCE_FILE = re.compile(r"(^|/)(LICEN[CS]E|COPYING|NOTICE)[^/]*$", re.I)
_COPYRIGHT = re.compile(r"Copyright (?:\([cC]\)|\d{4})\s+[^\[\n;\"]+")
_HEAD = """# Held-out text

`held_out.txt` holds the beginnings of documents that were kept from training, under the licences of
the packages that they come from.

| package | version | licence | documents | copyright |
|---|---|---|---|---|
"""


def excerpts(
    documents: Iterable[Document], tokenizer: Tokenizer, tokens: int, largest: int
) -> list[Document]:
    """The first ``tokens`` tokens of every held-out document that has them, in the order of their
    digests, ``largest`` bytes of UTF-8 at most.
    """
    found, size = [], 0
    for document in sorted(documents, key=lambda d: d.digest):
        ids = tokenizer.encode(document.text, bos=False) if document.held_out else []
        if len(ids) < tokens:
            continue
        text = tokenizer.decode(ids[:tokens]).rstrip("\ufffd")
        size += len(text.encode())
        if size > largest:
            break
        found.append(Document(document.source, document.path, text))
    return found


def as_text(documents: Sequence[Document]) -> str:
    """The documents behind lines that open them; a form feed within one becomes a line break."""
    versions = {source.package: source.version for source in SOURCES}
    parts = []
    for document in documents:
        label = f"{document.source} {versions[document.source]}: {document.path}"
        body = document.text.replace("\f", "\n").strip("\n")
        parts.append(f"\f{label}\n{body}\n")
    return "".join(parts)


def notice(documents: Sequence[Document], downloads: Path) -> str:
    """Markdown: licence and copyright of every package that is used."""
    lines = []
    for source in SOURCES:
        count = sum(document.source == source.package for document in documents)
        if count:
            owner = copyright_of(download(source, downloads))
            cells = source.package, source.version, source.licence, str(count), owner
            lines.append("| " + " | ".join(cells) + " |\n")
    return _HEAD + "".join(lines)


def copyright_of(archive: Path) -> str:
    """The first copyright line of an archive's own licence; empty if it has none."""
    files = {name: text for name, text in files_of(archive) if _LICENCE_FILE.search(name)}
    for name in sorted(files, key=_distance):
        line = _COPYRIGHT.search(files[name].decode("utf-8", "replace"))
        if line:
            return " ".join(line[0].split()).replace("|", "/")
    return ""


def _distance(name: str) -> tuple[bool, int, int]:
    """How far a file is from being the package's own: in its metadata or at its root is near."""
    inside = "/" in name and ".dist-info/" not in name
    return inside, name.count("/"), len(name)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.training.held_out")
    parser.add_argument("--downloads", required=True, type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: _write(arguments.downloads, arguments.out))


def _write(downloads: Path, out: Path) -> None:
    tokenizer = Tokenizer.from_dir(out, read_config(out))
    chosen = excerpts(collect(downloads)[0], tokenizer, TOKENS, LARGEST)
    if not chosen:
        raise UserError(f"{downloads}: no held-out document has {TOKENS} tokens")
    (out / "held_out.txt").write_text(as_text(chosen), "utf-8")
    (out / "HELD_OUT.md").write_text(notice(chosen, downloads), "utf-8")
    print(f"{len(chosen)} documents")


if __name__ == "__main__":
    sys.exit(main())
