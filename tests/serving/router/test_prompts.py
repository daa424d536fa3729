"""The router's tokens are the worker's."""

import asyncio
import json

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from serving.kv_events.hashes import page_hashes
from serving.router.ask import CHAT, COMPLETIONS, Ask
from serving.router.policy import UNKNOWN
from serving.router.prompts import LocalTexts, RemoteTexts, Unreadable, read_prompt

MESSAGES = [{"role": "user", "content": "Hello, Welt"}]


@pytest.fixture(scope="module")
def local(tiny_dir):
    return LocalTexts(tiny_dir, "auto")


def read(texts, path=COMPLETIONS, **fields):
    body = json.dumps(fields).encode()
    return asyncio.run(read_prompt(Ask.parse("POST", path + "?a=b", [], body), texts, 4))


def test_texts_and_ids(local, tiny_dir):
    tokenizer = Tokenizer.from_dir(tiny_dir, Config.from_json(tiny_dir / "config.json"))
    ids = tokenizer.encode("Hello, Welt")
    found = read(local, prompt="Hello, Welt")
    assert found.tokens == ids and found.hashes == page_hashes(ids, 4)[: (len(ids) - 1) // 4]
    assert read(local, prompt=ids) == found
    several = read(local, prompt=["Hello, Welt", "x"])
    assert several.tokens == ids + tokenizer.encode("x") and several.hashes == found.hashes
    assert read(local, prompt=[ids, [1, 2]]).tokens == [*ids, 1, 2]
    assert read(local, prompt=[1] * 9).hashes == page_hashes([1] * 8, 4)
    assert read(local, prompt=[1], priority=-3).priority == -3
    assert read(local, prompt=[1], priority=2**40) == read(local, prompt=[1], priority=True)
    assert read(local, prompt=[1] * 8).hashes == page_hashes([1] * 4, 4)


def test_chats(local, tiny_dir):
    tokenizer = Tokenizer.from_dir(tiny_dir, Config.from_json(tiny_dir / "config.json"))
    found = read(local, CHAT, messages=MESSAGES, max_tokens=3)
    assert found.tokens == tokenizer.encode("user: Hello, Welt\nassistant:")


@pytest.mark.parametrize(
    "prompt", [None, 7, True, {}, [1, "a", []], [1.5], [-1], [2**31], [True], "\ud800", [None]]
)
def test_what_is_no_prompt(local, prompt):
    assert read(local, prompt=prompt) == UNKNOWN


def test_what_is_no_chat(local):
    assert read(local, CHAT, messages=[{"role": "x", "content": 3}]) == UNKNOWN
    assert read(local, CHAT) == UNKNOWN
    body = Ask.parse("POST", CHAT, [], b"{")
    assert asyncio.run(read_prompt(body, local, 4)) == UNKNOWN and body.fields == {}


def test_a_worker_is_asked_for_texts_only():
    asked = []

    async def ids(_ask, body):
        asked.append(body)
        if body.get("prompt") == "bad":
            raise Unreadable("no")
        return [1, 2, 3, 4, 5]

    texts = RemoteTexts(ids)
    assert read(texts, prompt=[7, 8]).tokens == [7, 8] and asked == []
    assert read(texts, prompt=["a", "b"]).tokens == [1, 2, 3, 4, 5] * 2
    assert read(texts, CHAT, messages=MESSAGES, tools=[]).hashes == page_hashes([1, 2, 3, 4], 4)
    assert asked == [{"prompt": "a"}, {"prompt": "b"}, {"messages": MESSAGES}]
    assert read(texts, prompt="bad") == UNKNOWN


def test_a_directory_without_a_tokenizer(tmp_path, tiny_dir):
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"tokenizer.json: is missing"):
        LocalTexts(str(tmp_path), "auto")
