"""The real ``openai`` client against the tiny model."""

import openai
import pytest

from serving.request import Request
from tests.serving.server.support import NAME, idle_pages, wait_for

PROMPT = [0, *range(40, 60)]
GREEDY = {"model": NAME, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(tiny_server):
    with tiny_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_server):
    """Greedy ids and text of PROMPT from the engine itself, without the server."""

    def run(engine):
        assert engine.idle
        sequence = engine.add(Request(tuple(PROMPT), 12, stop_ids=(1,)))
        while not engine.idle:
            engine.step()
        return sequence.result, sequence.output.text

    return tiny_server.on_engine(run)


def test_completion_equals_the_engine(client, expected):
    result, text = expected
    answer = client.completions.create(
        prompt=PROMPT, **GREEDY, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (text, result.finish_reason)
    assert choice.token_ids == result.token_ids and choice.prompt_token_ids == PROMPT
    assert answer.usage.prompt_tokens == 21
    assert answer.usage.completion_tokens == len(result.token_ids)
    assert (answer.object, answer.model) == ("text_completion", NAME)


def test_streamed_completion(client, expected):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=PROMPT, **GREEDY, **options))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected[1]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.total_tokens == 21 + 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("two words", [10]),
        (["two words", "x"], [10, 2]),
        (PROMPT, [21]),
        ([PROMPT, [3, 4]], [21, 2]),
    ],
    ids=["text", "texts", "ids", "lists"],
)
def test_kinds_of_prompts(client, prompt, lengths):
    answer = client.completions.create(prompt=prompt, **GREEDY | {"max_tokens": 2}, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(lengths)))
    assert answer.usage.prompt_tokens == sum(lengths)
    assert answer.usage.completion_tokens == 4 * len(lengths)


def test_chat(client, tiny):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    client.chat.completions.create(messages=messages, **GREEDY)  # from here on all are hits
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    text = "system: Be brief.\nuser: Hi\nassistant:"
    ids = tiny.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert tiny.post("/detokenize", {"tokens": ids[1:]}).json() == {"prompt": text}
    plain = client.completions.create(prompt=ids, **GREEDY)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", plain.choices[0].text)
    stream = client.chat.completions.create(messages=messages, **GREEDY, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_chat_fills_the_context_by_default(client):
    messages = [{"role": "user", "content": "x" * 80}]
    extra = {"ignore_eos": True}
    answer = client.chat.completions.create(model=NAME, messages=messages, extra_body=extra)
    assert answer.usage.total_tokens == 128
    limited = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=3, extra_body=extra
    )
    assert limited.usage.completion_tokens == 3


def test_seeds_and_choices(client):
    options = {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 1.5}
    three = client.completions.create(**options, n=3, seed=7).choices
    alone = [client.completions.create(**options, seed=7 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in three] == alone
    assert len(set(alone)) == 3


def test_completion_logprobs(client, tiny):
    answer = client.completions.create(prompt=PROMPT, **GREEDY, logprobs=3)
    report = answer.choices[0].logprobs
    assert len(report.tokens) == len(report.token_logprobs) == 12
    for token, value, top in zip(
        report.tokens, report.token_logprobs, report.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values()) and len(top) == 3
    assert report.text_offset[:2] == [0, len(report.tokens[0])]


def test_chat_logprobs(client):
    messages = [{"role": "user", "content": "Hi"}]
    options = {"messages": messages, **GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(whole) == 12
    for entry in whole:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].bytes == entry.bytes
        assert entry.top_logprobs[0].logprob == entry.logprob
    streamed = client.chat.completions.create(**options, stream=True)
    parts = [c.choices[0].logprobs for c in streamed]
    assert [e for part in parts if part for e in part.content] == whole


def test_prompt_logprobs(client):
    extra = {"prompt_logprobs": 2}
    choice = client.completions.create(prompt=PROMPT, **GREEDY, extra_body=extra).choices[0]
    first, *rest = choice.prompt_logprobs
    assert first is None and len(rest) == 20
    for token, entry in zip(PROMPT[1:], rest, strict=True):
        assert entry[str(token)]["logprob"] <= 0
        assert {value["rank"] for value in entry.values()} >= {1, 2}
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(messages=messages, **GREEDY, extra_body=extra)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


def test_stop_strings_and_ids(client, expected):
    result, text = expected
    stop = text[4:7]
    answer = client.completions.create(prompt=PROMPT, **GREEDY, stop=[stop, "never there"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.completions.create(prompt=PROMPT, **GREEDY, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]
    token = result.token_ids[3]
    answer = client.completions.create(
        prompt=PROMPT, **GREEDY, extra_body={"stop_token_ids": [token]}
    )
    assert answer.usage.completion_tokens == result.token_ids.index(token) + 1
    extra = {"stop_token_ids": [token], "min_tokens": 8}
    answer = client.completions.create(prompt=PROMPT, **GREEDY, extra_body=extra)
    assert answer.usage.completion_tokens >= 8


def test_biases_and_penalties(client, expected):
    first = expected[0].token_ids[0]
    extra = {"return_token_ids": True}
    options = {"prompt": PROMPT, **GREEDY, "extra_body": extra}
    banned = client.completions.create(**options, logit_bias={str(first): -100})
    assert first not in banned.choices[0].token_ids
    forced = client.completions.create(**options, logit_bias={"77": 100})
    assert forced.choices[0].token_ids == [77] * 12
    varied = client.completions.create(
        **options, logit_bias={"77": 5}, frequency_penalty=2, presence_penalty=2
    )
    assert varied.choices[0].token_ids != forced.choices[0].token_ids


def test_cached_tokens(client, tiny):
    prompt = [0, *range(100, 160)]
    cold = client.completions.create(prompt=prompt, **GREEDY)
    warm = client.completions.create(prompt=prompt, **GREEDY)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 48
    turn = tiny.metrics()
    assert turn["vllm:prefix_cache_hits_total"] >= 48
    assert turn["vllm:prefix_cache_queries_total"] >= 122


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME, "alias"]
    assert client.models.retrieve("alias").max_model_len == 128
    assert client.completions.create(**GREEDY | {"model": "alias"}, prompt="x").model == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_errors(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(**GREEDY | {"model": "gpt"}, prompt="x")
    assert error.value.param == "model"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**GREEDY, prompt="x", stream=True, extra_body={"foo": 1})
    assert error.value.param == "foo"


def test_closing_a_stream_frees_its_pages(client, tiny):
    stream = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: tiny.on_engine(lambda e: e.ranks[0].idle))
    wait_for(lambda: tiny.on_engine(idle_pages) == tiny.engine.options.pages)


def test_nothing_compiled_and_metrics(tiny):
    values = tiny.metrics()
    assert values["dsv41_compiles_after_warmup"] == 0
    assert values["vllm:num_requests_running"] == values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0
    ended = sum(values[f"vllm:request_success_total:{r}"] for r in ("stop", "length", "abort"))
    assert ended == values["vllm:e2e_request_latency_seconds_count"] > 0
    started = values["vllm:time_to_first_token_seconds_count"]
    gaps = values["vllm:inter_token_latency_seconds_count"]
    assert values["vllm:generation_tokens_total"] == started + gaps
    assert values["vllm:prompt_tokens_total"] > 0
