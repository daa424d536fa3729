"""The tokenizer, its stream of text pieces and Engram's token map."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Detokenizer, Tokenizer, token_map
from tests.conftest import GOLDENS

CFG = Config.preset("tiny")
TOKENIZER = Tokenizer.from_dir(GOLDENS / "tiny_ckpt", CFG)
TEXTS = ["", "Hello wörld 你好 🙂", " two  blanks\t\r\n", "<think>é</think>", "e\u0301", "\ufffd"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text):
    ids = TOKENIZER.encode(text, bos=False)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text) == [CFG.bos_token_id, *ids]


def test_special_tokens_are_parsed_and_can_be_skipped():
    assert TOKENIZER.encode("<think>", bos=False) == [508]
    ids = TOKENIZER.encode("a<think>b")
    assert TOKENIZER.decode(ids) == "<｜begin▁of▁sentence｜>a<think>b"
    assert TOKENIZER.decode(ids, skip_special=True) == "ab"


def test_length_counts_added_tokens():
    assert len(TOKENIZER) == 512


@pytest.mark.parametrize("token_id", [-1, 512, 2**40])
def test_foreign_id_is_named(token_id):
    with pytest.raises(UserError, match=rf"token id {token_id} must be one of .* 512 ids"):
        TOKENIZER.decode([5, token_id])


def test_lone_surrogate_is_a_user_error():
    with pytest.raises(UserError, match="not valid Unicode"):
        TOKENIZER.encode("a\ud800")


def test_absent_and_damaged_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json: is missing"):
        Tokenizer.from_dir(tmp_path, CFG)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a tokenizer file"):
        Tokenizer.from_dir(tmp_path, CFG)


def test_more_tokens_than_the_model_has(tiny_dir, tmp_path):
    document = json.loads((tiny_dir / "tokenizer.json").read_text("utf-8"))
    document["added_tokens"].append(document["added_tokens"][-1] | {"id": 512, "content": "<more>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(UserError, match="513 tokens, the model only vocab_size=512"):
        Tokenizer.from_dir(tmp_path, CFG)


IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)
TEXT_IDS = st.text(max_size=20).map(lambda text: TOKENIZER.encode(text, bos=False))


@settings(max_examples=200, deadline=None)
@given(ids=IDS | TEXT_IDS, skip_special=st.booleans())
def test_stream_gives_the_whole_text_and_takes_nothing_back(ids, skip_special):
    whole = TOKENIZER.decode(ids, skip_special=skip_special)
    stream, shown = Detokenizer(TOKENIZER, skip_special=skip_special), ""
    for token_id in ids:
        shown += stream.push(token_id)
        assert whole.startswith(shown)
    assert shown + stream.finish() == whole


def test_stream_holds_back_an_unfinished_character():
    ids = TOKENIZER.encode("🙂!", bos=False)
    assert len(ids) == 5
    stream = Detokenizer(TOKENIZER)
    assert [stream.push(i) for i in ids] == ["", "", "", "🙂", "!"]
    assert stream.finish() == ""
    assert [stream.push(i) for i in ids[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"


@pytest.mark.golden
def test_token_map_is_the_references():
    expected = json.loads((GOLDENS / "engram_constants.json").read_text("utf-8"))
    mapped, pad = token_map(TOKENIZER, CFG)
    assert mapped.dtype == np.int32
    assert mapped.tolist() == expected["token_map"]
    assert pad == expected["pad_compressed"]
    assert mapped.max() + 1 == CFG.engram_compressed_vocab_size


def test_another_tokenizer_is_refused(tiny_dir, tmp_path):
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    cfg = dataclasses.replace(CFG, engram_compressed_vocab_size=285)
    with pytest.raises(UserError, match=r"286 distinct Engram keys.*=285"):
        token_map(Tokenizer.from_dir(tmp_path, cfg), cfg)
