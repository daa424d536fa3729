"""Structured output over HTTP: the real ``openai`` client, reasoning, and what is refused."""

import json

import pytest

from dsv41_jax.config import Config
from dsv41_jax.tokenizer import Tokenizer
from tests.serving.engine.test_grammars import COLOURS, SHAPE, is_shape
from tests.serving.server.support import NAME, wait_for

HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BRACE = {"128": 100.0}  # the id of a closing brace
WANTED = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE, "strict": True}}
OBJECT = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def of_schema(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def client(tiny_server):
    with tiny_server.client() as client:
        yield client


def test_json_schema(client, tiny):
    """Several choices, streamed and whole; plain requests run beside them."""
    fields = {"model": NAME, "messages": HI, "seed": 3, "max_tokens": 90}
    free = client.chat.completions.create(**fields | {"max_tokens": 20})
    answer = client.chat.completions.create(**fields, n=3, response_format=WANTED)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and all(is_shape(json.loads(text)) for text in texts)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    chunks = list(client.chat.completions.create(**fields, response_format=WANTED, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[0]
    assert chunks[-1].choices[0].finish_reason == "stop"
    again = client.chat.completions.create(**fields | {"max_tokens": 20})
    assert again.choices[0].message.content == free.choices[0].message.content


def test_json_object(client, tiny):
    fields = {"model": NAME, "messages": HI, "temperature": 0, "max_tokens": 60}
    asked = {"response_format": OBJECT, "logit_bias": BRACE}
    answer = client.chat.completions.create(**fields, **asked)
    assert json.loads(answer.choices[0].message.content) == {}
    assert answer.choices[0].finish_reason == "stop"
    text = client.chat.completions.create(**fields, response_format={"type": "text"})
    assert text.choices[0].message.content == (
        client.chat.completions.create(**fields).choices[0].message.content
    )


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"choice": COLOURS}, COLOURS),
        ({"regex": "(mauve|re)d?"}, ["mauve", "mauved", "re", "red"]),
        ({"json": {"enum": [7]}}, ["7"]),
        ({"json": '{"const": null}'}, ["null"]),
        ({"grammar": 'start: "x" /[01]/'}, ["x0", "x1"]),
    ],
)
def test_structured_outputs(client, tiny, asked, texts):
    extra = {"extra_body": {"structured_outputs": asked}}
    fields = {"model": NAME, "max_tokens": 20, "n": 2, **extra}
    answer = client.completions.create(prompt=["one", "two"], **fields)
    assert len(answer.choices) == 4 and {c.text for c in answer.choices} <= set(texts)
    chat = client.chat.completions.create(messages=HI, **fields)
    assert {choice.message.content for choice in chat.choices} <= set(texts)


FORMAT, SCHEMA = "response_format", "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({FORMAT: {"type": "yaml"}}, FORMAT),
        ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema"),
        ({FORMAT: OBJECT | {"json_schema": {"schema": {}}}}, f"{FORMAT}.json_schema"),
        ({FORMAT: {"type": "json_schema", "json_schema": {}}}, f"{FORMAT}.json_schema.schema"),
        ({FORMAT: of_schema("x")}, SCHEMA),
        ({FORMAT: of_schema({"type": "thing"})}, SCHEMA),
        ({FORMAT: of_schema({"not": {}})}, SCHEMA),
        ({FORMAT: of_schema({"enum": ["x" * 70_000]})}, SCHEMA),
        ({FORMAT: of_schema({"type": "string", "pattern": "(?=a)"})}, SCHEMA),
        ({FORMAT: of_schema({"$ref": "#/$defs/none"})}, SCHEMA),
        ({FORMAT: OBJECT, "structured_outputs": {"regex": "a"}}, FORMAT),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_what_is_refused(tiny, fields, param):
    answer = tiny.post(CHAT, {"messages": HI} | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"].startswith(param) and error["message"]


def test_tools_and_prefixes_are_refused(scripted):
    prefix = [*HI, {"role": "assistant", "content": "{", "prefix": True}]
    off = {"thinking": {"type": "disabled"}}
    with scripted(lambda request: [126, 128], v41=True) as served:
        for fields in ({"tools": [TOOL]}, {"messages": prefix}):
            body = {"messages": HI, "response_format": OBJECT, **off, **fields}
            answer = served.post(CHAT, body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == FORMAT
        body = {"messages": HI, "response_format": OBJECT, **off}
        answer = served.post(CHAT, body | {"tools": [TOOL], "tool_choice": "none"})
        assert answer.json()["choices"][0]["message"]["content"] == "{}"


@pytest.mark.parametrize("thinks", [True, False])
def test_reasoning_is_free_and_the_answer_is_not(scripted, v41_dir, thinks):
    """The engine ends the answer where the object is complete; without reasoning none may come."""
    tokenizer = Tokenizer.from_dir(v41_dir, Config.from_json(v41_dir / "config.json"))
    said = tokenizer.encode('why {not}</think>{"a": [1]}more', bos=False)
    mode = {} if thinks else {"thinking": {"type": "disabled"}}
    with scripted(lambda request: said, v41=True) as served:
        answer = served.post(CHAT, {"messages": HI, "response_format": OBJECT, **mode})
        if thinks:
            choice = answer.json()["choices"][0]
            assert choice["message"]["reasoning_content"] == "why {not}"
            assert json.loads(choice["message"]["content"]) == {"a": [1]}
            assert choice["finish_reason"] == "stop"
        else:
            assert answer.status_code == 500
            assert "could not be constrained" in answer.json()["error"]["message"]
        wait_for(lambda: served.engine.idle)
        assert served.post(CHAT, {"messages": HI, **mode}).status_code == 200


def test_without_grammars_it_is_refused(scripted):
    served = scripted()
    served.engine.grammars = None
    with served:
        answer = served.post(CHAT, {"messages": HI, "response_format": OBJECT})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == FORMAT
