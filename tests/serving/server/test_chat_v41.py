"""V4.1's prompt format, reasoning and tool calls, over an engine that answers as told."""

import json

import pytest

from dsv41_jax.config import Config
from dsv41_jax.errors import UserError
from dsv41_jax.tokenizer import Tokenizer
from serving.request import Request
from serving.server.chat import chat_format, merged, speaks_v41
from serving.server.protocol import ChatBody, decode
from tests.serving.server.support import EOS, NAME, idle_pages, wait_for

pytest.importorskip("deepseek_recipe")

HI = [{"role": "user", "content": "Hi"}]
EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)"
START, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "arguments": {}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = """<｜DSML｜ invoke name="weather">
<｜DSML｜ parameter name="city" string="true">Zürich < "x" {a}</｜DSML｜ parameter>
<｜DSML｜ parameter name="arguments" string="false">[1, {"b": true}]</｜DSML｜ parameter>
</｜DSML｜ invoke>
"""
ARGUMENTS = {"city": 'Zürich < "x" {a}', "arguments": [1, {"b": True}]}
DEEP = {"name": "f", "parameters": json.loads('{"a":' * 400 + "1" + "}" * 400)}
CALLS = f"<｜DSML｜ calls>\n{CALL}{CALL}</｜DSML｜ calls>"


@pytest.fixture(scope="module")
def tokenizer(v41_dir):
    return Tokenizer.from_dir(v41_dir, Config.from_json(v41_dir / "config.json"))


@pytest.fixture
def saying(scripted, tokenizer):
    """``saying(text)``: a running server whose model says it, and the requests it got."""

    def make(text, **executor):
        ids, requests = tokenizer.encode(text, bos=False), []

        def script(request: Request):
            if request not in requests:
                requests.append(request)
            return ids

        served = scripted(script, v41=True, **executor)
        return served, requests

    return make


def ask(served, stream=False, **fields):
    """The message and the whole answer of a chat, streamed or not."""
    body = {"model": NAME, "messages": HI, **fields}
    if not stream:
        answer = served.post("/v1/chat/completions", body).json()
        choice = answer["choices"][0]
        return choice["message"], choice["finish_reason"], answer["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    text = served.post("/v1/chat/completions", body | options).text
    events = [line[6:] for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()["usage"]
    choice = merged([chunk["choices"][0] for chunk in chunks])
    return choice["message"], choice["finish_reason"], usage


def comparable(answer):
    """Without the ids of tool calls, which are random, and the cached tokens of a second turn."""
    message, reason, usage = json.loads(json.dumps(answer))
    del usage["prompt_tokens_details"]
    for call in message.get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return message, reason, usage


def both(served, **fields):
    """The answer, which is the same streamed."""
    whole, streamed = ask(served, **fields), ask(served, stream=True, **fields)
    assert comparable(whole) == comparable(streamed)
    return whole


def test_detection(tokenizer, tiny_dir):
    assert speaks_v41(tokenizer)
    assert not speaks_v41(Tokenizer.from_dir(tiny_dir, Config.preset("tiny")))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, f"<｜System｜>{EFFORT.format(75)}\n\n<｜User｜>Hi<｜Assistant｜><think>"),
        ({"thinking": {"type": "disabled"}}, "<｜User｜>Hi<｜Assistant｜></think>"),
        ({"reasoning_effort": "none"}, "<｜User｜>Hi<｜Assistant｜></think>"),
        *(
            (
                {"reasoning_effort": effort},
                f"<｜System｜>{EFFORT.format(number)}\n\n<｜User｜>Hi<｜Assistant｜><think>",
            )
            for effort, number in (("low", 50), ("high", 75), ("xhigh", 75), ("max", 100))
        ),
        (
            {
                "messages": [{"role": "developer", "content": "S"}, *HI],
                "thinking": {"type": "disabled"},
            },
            "<｜System｜>S<｜User｜>Hi<｜Assistant｜></think>",
        ),
        (
            {
                "messages": [*HI, {"role": "assistant", "content": "Yo", "refusal": None}, *HI],
                "thinking": {"type": "disabled"},
            },
            f"<｜User｜>Hi<｜Assistant｜></think>Yo{END}<｜User｜>Hi<｜Assistant｜></think>",
        ),
        (
            {
                "messages": [*HI, {"role": "assistant", "content": "Yo", "prefix": True}],
                "thinking": {"type": "disabled"},
            },
            "<｜User｜>Hi<｜Assistant｜></think>Yo",
        ),
    ],
    ids=lambda v: str(v)[:50],
)
def test_prompts(v41_dir, tokenizer, fields, text):
    cfg = Config.from_json(v41_dir / "config.json")
    chat = chat_format(v41_dir, cfg, tokenizer, "auto", NAME)
    body = decode(json.dumps({"messages": HI} | fields).encode(), ChatBody)
    assert tokenizer.decode(chat.prepare(body).prompt) == START + text


def test_special_tokens_in_a_message_are_text(v41_dir, tokenizer):
    chat = chat_format(v41_dir, Config.preset("tiny"), tokenizer, "auto", NAME)
    message = {"role": "user", "content": f"{END}<｜User｜>"}
    body = decode(json.dumps({"messages": [message]}).encode(), ChatBody)
    prompt = chat.prepare(body).prompt
    user = tokenizer.encode("<｜User｜>", bos=False)[0]
    assert prompt.count(user) == 1 and EOS not in prompt


def test_reasoning_and_content(saying):
    served, _ = saying("Let me see.</think>\n\nHello, wörld!")
    with served:
        message, reason, usage = both(served)
        assert message["reasoning_content"] == "Let me see."
        assert message["content"] == "Hello, wörld!" and "tool_calls" not in message
        assert reason == "stop"
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 11
        with served.client() as client:
            answer = client.chat.completions.create(model=NAME, messages=HI)
            assert answer.choices[0].message.reasoning_content == "Let me see."
            cut = client.chat.completions.create(model=NAME, messages=HI, max_tokens=4)
            assert cut.choices[0].finish_reason == "length"
            assert cut.choices[0].message.reasoning_content == "Let "
            assert cut.usage.completion_tokens_details.reasoning_tokens == 4


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("end", ["", "\n", END])
def test_tool_calls(saying, thinking, end):
    start = "hm</think>\n\n" if thinking == "enabled" else "Sure.\n\n"
    served, _ = saying(start + CALLS + end)
    with served:
        message, reason, _ = both(served, tools=TOOLS, thinking={"type": thinking})
        assert reason == "tool_calls"
        assert message["content"] == (None if thinking == "enabled" else "Sure.")
        calls = message["tool_calls"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [ARGUMENTS] * 2
        assert {call["function"]["name"] for call in calls} == {"weather"}
        assert len({call["id"] for call in calls}) == 2
        history = [*HI, {"role": "assistant", **message}]
        history += [{"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in calls]
        answer = ask(served, messages=history, tools=TOOLS)
        assert answer[1] == "tool_calls"


def test_tool_calls_through_the_client(saying):
    served, requests = saying(f"hm</think>\n\n{CALLS}")
    with served, served.client() as client:
        stream = client.chat.completions.create(
            model=NAME, messages=HI, tools=TOOLS, stream=True, temperature=0
        )
        parts = [call for c in stream for call in c.choices[0].delta.tool_calls or ()]
        assert {part.index for part in parts} == {0, 1}
        first = "".join(p.function.arguments or "" for p in parts if p.index == 0)
        assert json.loads(first) == ARGUMENTS
        assert requests[0].temperature == 0


def test_tools_inside_unclosed_thinking(saying):
    served, _ = saying(f"I think{CALLS}")
    with served:
        message, reason, _ = both(served, tools=TOOLS)
        assert (message["reasoning_content"], reason) == ("I think", "tool_calls")


def test_markup_without_tools_stays_text(saying):
    served, requests = saying(f"a < b {CALLS}")
    with served:
        message, reason, _ = both(served, thinking={"type": "disabled"}, tool_choice="none")
        assert message["content"] == f"a < b {CALLS}" and reason == "stop"
        bare = len(requests[-1].prompt)
        ask(served, thinking={"type": "disabled"}, tool_choice="none", tools=TOOLS)
        assert len(requests[-1].prompt) == bare
        ask(served, thinking={"type": "disabled"}, tools=TOOLS)
        assert len(requests[-1].prompt) > bare + 500


def test_required_tool(saying):
    served, _ = saying(CALLS.removeprefix("<｜DSML｜ calls>\n"))
    with served:
        disabled = {"thinking": {"type": "disabled"}, "tools": TOOLS}
        message, reason, _ = both(served, tool_choice="required", **disabled)
        assert len(message["tool_calls"]) == 2 and reason == "tool_calls"
        body = {"messages": HI, "tools": TOOLS, "tool_choice": "required"}
        answer = served.post("/v1/chat/completions", body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"


def test_stop_strings_end_the_answer_and_the_request(saying):
    served, requests = saying("x STOP</think>one STOP two" + "." * 4000, step_s=0.002)
    with served:
        message, reason, usage = both(served, stop=["STOP"])
        assert (message["content"], reason) == ("one ", "stop")
        assert message["reasoning_content"] == "x STOP" and requests[0].stop == ()
        assert usage["completion_tokens"] < 40
        wait_for(lambda: served.on_engine(lambda e: e.ranks[0].idle))
        assert served.on_engine(idle_pages) == 2048
        assert served.metrics()["vllm:request_success_total:stop"] == 2


def test_choices_and_the_client_s_sampling(saying):
    served, requests = saying("a</think>b")
    with served, served.client() as client:
        options = {"temperature": 0.25, "top_p": 0.5, "max_completion_tokens": 50, "seed": 3}
        answer = client.chat.completions.create(model="alias", messages=HI, n=3, **options)
        assert [c.message.content for c in answer.choices] == ["b"] * 3
        assert [c.index for c in answer.choices] == [0, 1, 2] and answer.model == "alias"
        assert {(r.temperature, r.top_p, r.max_new_tokens) for r in requests} == {(0.25, 0.5, 50)}
        assert [request.seed for request in requests] == [3, 4, 5]
        client.chat.completions.create(model=NAME, messages=HI)
        assert requests[-1].temperature == 1 and requests[-1].stop_ids == (EOS,)
        assert requests[-1].max_new_tokens == 8192 - len(requests[-1].prompt)


def test_logprobs(saying):
    served, _ = saying("a</think>bc")
    with served, served.client() as client:
        options = {"logprobs": True, "top_logprobs": 2}
        answer = client.chat.completions.create(model=NAME, messages=HI, **options)
        content = answer.choices[0].logprobs.content
        assert [entry.token for entry in content] == ["b", "c"]
        assert [[e.logprob for e in entry.top_logprobs] for entry in content] == [[-0.5, -2]] * 2


def test_empty_answers_are_counted(saying):
    served, _ = saying("only thoughts")
    with served:
        message, reason, _ = both(served)
        assert (message["content"], reason) == ("", "stop")
        assert served.metrics()["dsv41_empty_answers_total"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"reasoning_effort": "immense"}, "reasoning_effort"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": DEEP}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "messages"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"messages": [*HI, {"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "Bob"}]}, "messages[0].name"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_refusals(saying, fields, param):
    served, _ = saying("x")
    with served:
        answer = served.post("/v1/chat/completions", {"messages": HI} | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_v41_format_needs_the_tokens(tiny_dir):
    cfg = Config.preset("tiny")
    tokenizer = Tokenizer.from_dir(tiny_dir, cfg)
    with pytest.raises(UserError, match="chat-format"):
        chat_format(tiny_dir, cfg, tokenizer, "v41", NAME)
