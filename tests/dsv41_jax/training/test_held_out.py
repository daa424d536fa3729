"""The held-out text that ships beside a checkpoint."""

import zipfile

import pytest

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from dsv41_jax.training.corpus import SOURCES, Document
from dsv41_jax.training.held_out import as_text, copyright_of, excerpts

SOURCE = SOURCES[0]
LICENCE = "BSD\n\nCopyright (c) 2001 First, Inc.\n 2002 others\nCopyright (c) 2003 Second"


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return Tokenizer.from_dir(tiny_dir, Config.from_json(tiny_dir / "config.json"))


def made(count, words, *, held_out):
    every = (
        Document(SOURCE.package, f"doc/{i}.rst", "word and ümlaut " * words) for i in range(10_000)
    )
    return [d for d in every if d.held_out == held_out][:count]


def test_excerpts_are_beginnings_of_long_held_out_documents(tokenizer):
    long, short = made(6, 60, held_out=True), made(12, 1, held_out=True)[6:]
    found = excerpts([*made(5, 60, held_out=False), *short, *long], tokenizer, 40, 10_000)
    assert [d.path for d in found] == [d.path for d in sorted(long, key=lambda d: d.digest)]
    for document in found:
        assert long[0].text.startswith(document.text) and "\ufffd" not in document.text
        assert 37 <= len(tokenizer.encode(document.text, bos=False)) <= 40


def test_the_excerpts_stay_below_their_bytes(tokenizer):
    found = excerpts(made(6, 60, held_out=True), tokenizer, 40, 150)
    assert 1 <= len(found) < 6
    assert sum(len(d.text.encode()) for d in found) <= 150


def test_every_document_opens_with_its_source():
    text = as_text(
        [Document(SOURCE.package, "a.rst", "one\f\ntwo\n"), Document("pytest", "b", "x")]
    )
    versions = {source.package: source.version for source in SOURCES}
    assert text == (
        f"\fDjango {versions['Django']}: a.rst\none\n\ntwo\n\fpytest {versions['pytest']}: b\nx\n"
    )


def test_the_copyright_is_that_of_the_nearest_licence(tmp_path):
    with zipfile.ZipFile(tmp_path / "a-1.whl", "w") as packed:
        packed.writestr("a/vendored/lib/LICENSE", "Copyright (c) 1999 Somebody Else")
        packed.writestr("a-1.dist-info/LICENSE.txt", LICENCE)
        packed.writestr("a-1.dist-info/METADATA", "Copyright (c) 1998 Metadata")
    assert copyright_of(tmp_path / "a-1.whl") == "Copyright (c) 2001 First, Inc."
    with zipfile.ZipFile(tmp_path / "b-1.whl", "w") as packed:
        packed.writestr("LICENSE", "Copyright [yyyy] [name]")
    assert copyright_of(tmp_path / "b-1.whl") == ""
