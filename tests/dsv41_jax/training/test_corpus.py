"""Text out of packages, the mini preset, and the model card."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.tokenizer import Tokenizer, token_map
from dsv41_jax.training import corpus
from dsv41_jax.training.card import model_card
from dsv41_jax.training.corpus import Document, Source
from dsv41_jax.training.export import bytes_by_kind
from dsv41_jax.training.tokenizer import NOISE, SPECIAL

PRESETS = Path(corpus.__file__).parent.parent / "presets"
MODULE = '''"""What the module is for, in a sentence."""

def shown(x):
    """Doubles the number.

    Notes are indented.
    """

def _hidden():
    """Nobody reads this."""
'''
LONG = "A paragraph that is long enough to count as one that must not occur a second time. " * 3


def wheel(directory: Path, name: str, licence: str) -> Path:
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nLicense: {licence}\n\n")
        archive.writestr(f"{name}/module.py", MODULE.replace("sentence.", LONG))
        archive.writestr(f"{name}/tests/module.py", MODULE.replace("sentence.", LONG))
        archive.writestr(f"{name}/broken.py", "def (")
        archive.writestr(f"{name}/guide.txt", f"Guide\n\n\n\n{LONG}\n\n{LONG}\n")
    return path


def collected(monkeypatch, directory: Path, licence: str, extract: str):
    wheel(directory, "made_up", licence)
    source = Source("made-up", "1.0", "wheel", extract, "MIT", 1.0)
    monkeypatch.setattr(corpus, "SOURCES", (source,))
    return corpus.collect(directory)


def test_docstrings_of_public_names(monkeypatch, tmp_path):
    documents, records = collected(monkeypatch, tmp_path, "MIT", "docstrings")
    (document,) = documents
    assert document.path == "made_up/module.py"
    assert document.text.startswith("made_up.module\n\nWhat the module is for, in a A paragraph")
    assert "made_up.module.shown\n\nDoubles the number.\n\nNotes are indented." in document.text
    assert "Nobody" not in document.text
    assert records[0]["declared"] == "MIT" and records[0]["documents"] == 1


def test_prose_without_repeated_paragraphs(monkeypatch, tmp_path):
    documents, _ = collected(monkeypatch, tmp_path, "MIT", "prose")
    assert [document.text for document in documents] == [f"Guide\n\n{LONG}"]


@pytest.mark.parametrize("licence", ["GPL-3.0-or-later", "AGPLv3", "CC-BY-NC-4.0"])
def test_other_licences_are_refused(monkeypatch, tmp_path, licence):
    with pytest.raises(UserError, match="must be permissive"):
        collected(monkeypatch, tmp_path, licence, "prose")


def test_some_documents_are_held_out(tmp_path):
    documents = [Document("made-up", f"{i}.txt", f"{LONG} number {i}") for i in range(300)]
    held = [document for document in documents if document.held_out]
    assert 1 <= len(held) <= 20
    corpus.save(documents, [{"bytes": 7}], tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [backend.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    with np.load(tmp_path / "data.npz") as data:
        train, held_out = data["train"], data["held_out"]
    assert train.dtype == np.uint16 and train[0] == 0 and train[-1] == 1
    assert (train == 0).sum() == 300 - len(held) and (held_out == 0).sum() == len(held)
    text = backend.decode(held_out.tolist(), skip_special_tokens=True)
    assert text == "".join(d.text for d in sorted(held, key=lambda d: d.digest))


@pytest.fixture(scope="module")
def mini() -> Config:
    return Config.from_json(PRESETS / "mini.json")


def test_mini_has_every_kind_of_layer_and_fits(mini):
    plan = layer_plan(mini)
    kinds = [layer.kind for layer in plan]
    assert len(plan) == 12 and mini.last_kv_source == 6
    assert kinds.count("full") == 3 and kinds.count("reindex") == 2 and kinds.count("window") == 2
    assert sum(layer.engram for layer in plan) == 2 and mini.num_nextn_predict_layers == 3
    assert sum(size for _, size in bytes_by_kind(mini).values()) < 23_300_000


def test_mini_has_its_own_tokenizer(mini):
    backend = tokenizers.Tokenizer.from_file(str(PRESETS / "mini.tokenizer.json"))
    mapped, _ = token_map(Tokenizer(backend, bos_token_id=mini.bos_token_id), mini)
    assert len(mapped) == mini.vocab_size
    assert backend.token_to_id(NOISE) == mini.dspark_noise_token_id


def test_the_card_says_what_was_done(mini):
    losses = {"token": 3.25, "index": 0.5, "draft": 4.5, "busiest": 1.5}
    record = {
        "steps": 100, "tokens_a_step": 16384, "rows": 2048, "seconds": 90.0, "device": "some GPU",
        "recipe": {"peak": 0.003, "dense": 0.2, "rounded": 0.15},
        "log": [{"step": step, **losses} for step in range(1, 101)],
        "held_out": {
            "tokens": 5000, "plain_perplexity": 20.0, "rounded_perplexity": 20.25,
            "ngram_perplexity": 40.5,
        },
    }  # fmt: skip
    source = {"package": "made-up", "version": "1.0", "licence": "MIT", "bytes": 2_500_000}
    tokens = {"train": 819200, "held_out": 7000}
    sources = {"tokens": tokens, "repeated_from": 120, "sources": [source]}
    text = model_card("mini", mini, record, sources)
    for words in (
        "| made-up | 1.0 | MIT | 2.50 |", "perplexity 20.000", "20.250 with weights",
        "has 40.500 on",
        "| 100 | 3.250 | 0.500 | 4.500 | 1.500 |", "1,638,400 tokens, 2.0 passes", "some GPU",
    ):  # fmt: skip
        assert words in text
    assert text.count("| 3.250 |") <= 13
