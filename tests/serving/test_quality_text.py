"""Pieces of held-out text."""

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from serving.quality.text import BREAK, documents, pieces, text_file


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return Tokenizer.from_dir(tiny_dir, Config.from_json(tiny_dir / "config.json"))


def test_a_form_feed_at_the_start_of_a_line_opens_a_document():
    text = (
        f"{BREAK}one: a/b\nfirst\n\nmore\n{BREAK}two\nsecond with {BREAK} inside\n{BREAK}three\n\n"
    )
    assert documents(text) == ["first\n\nmore", f"second with {BREAK} inside"]
    assert documents("no mark\nat all") == ["no mark\nat all"]
    assert documents(f"before\n{BREAK}label\nbehind") == ["before", "behind"]


def test_first_pieces_of_all_documents_come_before_second_ones(tmp_path, tokenizer):
    long, short = "alpha beta gamma " * 40, "delta epsilon " * 12
    path = tmp_path / "text"
    path.write_text(f"{BREAK}a\n{long}\n{BREAK}b\n{short}\n{BREAK}c\n{long}", "utf-8")
    found = pieces(str(path), tokenizer, 24, 4)
    ids = tokenizer.encode(long)
    assert found[0].ids.tolist() == ids[:24]
    assert all(piece.ids[0] == ids[0] and piece.ids.shape == (24,) for piece in found)
    assert found[3].ids[1:].tolist() == ids[24:47]
    # Three documents are too few to be the clusters.
    assert [piece.cluster for piece in found] == [0, 1, 2, 3]


def test_many_documents_are_the_clusters(tmp_path, tokenizer):
    path = tmp_path / "text"
    path.write_text("".join(f"{BREAK}{i}\n{'word and ' * 30}\n" for i in range(9)), "utf-8")
    found = pieces(str(path), tokenizer, 16, 12)
    assert [piece.cluster for piece in found] == [*range(9), 0, 1, 2]


def test_a_text_that_is_too_short_says_how_long_it_is(tmp_path, tokenizer):
    path = tmp_path / "text"
    path.write_text("a few words", "utf-8")
    with pytest.raises(UserError, match=r"no document has 500 tokens"):
        pieces(str(path), tokenizer, 500, 3)


def test_the_text_of_the_checkpoint_is_the_default(tmp_path):
    with pytest.raises(UserError, match=r"held_out\.txt: is missing; --text"):
        text_file(str(tmp_path), None)
    (tmp_path / "held_out.txt").write_text("x", "utf-8")
    assert text_file(str(tmp_path), None) == str(tmp_path / "held_out.txt")
    assert text_file(str(tmp_path), "other") == "other"
