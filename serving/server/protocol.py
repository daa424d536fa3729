"""Request bodies: what a client may send, field by field, and the engine's requests made of it."""

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from serving.grammar import Grammar
from serving.request import Request
from serving.server.errors import ApiError

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 256
_PRIORITY = 2**31
# Fields of other servers that routers spell out; what they say is what happens anyway.
_SPELLED_OUT = {
    "no_stop_trim": False,
    "return_hidden_states": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
}

Body = TypeVar("Body", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """One of: a JSON schema, a regular expression, texts to choose from, a grammar in llguidance's
    Lark, any JSON object.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both generation endpoints take; null is the default. A seed that is not given is drawn.

    Beyond OpenAI's fields, as in vLLM: top_k, min_p, repetition_penalty, stop_token_ids,
    ignore_eos, min_tokens, prompt_logprobs, priority (smaller first), return_token_ids,
    structured_outputs, kv_transfer_params (of servers that share a request). Our own: speculative,
    false for an answer without drafts.
    """

    model: str | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    speculative: bool | None = None
    no_stop_trim: bool | None = None
    return_hidden_states: bool | None = None
    skip_special_tokens: bool | None = None


class CompletionBody(GenerationBody):
    """``/v1/completions``. prompt: a text, texts, token ids or lists of token ids."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A turn. The fields after ``prefix`` are what OpenAI's clients send back as null."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: list[None] | None = None
    function_call: None = None


class JsonSchema(Struct, forbid_unknown_fields=True):
    """The answer is valid JSON for ``schema`` in any case; ``strict`` and the texts change
    nothing.
    """

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(GenerationBody):
    """``/v1/chat/completions``. response_format and structured_outputs bind what comes after the
    reasoning; tools that may be called or a prefix cannot be combined with them.
    """

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    response_format: ResponseFormat | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """``/tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True)
class ModelFacts:
    """eos: the id that ends an answer. context: most prompt and new tokens of a request."""

    eos: int
    context: int


def decode(body: bytes, kind: type[Body]) -> Body:
    """The body as ``kind``; ApiError 400 naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise ApiError(400, "the JSON body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ApiError(400, _readable(str(error)), _field(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _check_numbers(body)
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}") from None


def check_fields(body: CompletionBody | ChatBody) -> None:
    """ApiError 400 for a field that is not supported or contradicts another one."""
    if isinstance(body, CompletionBody):
        _refuse(bool(body.echo), "echo", "is not supported, ask for prompt_logprobs")
        _refuse(bool(body.suffix), "suffix", "is not supported, the model only continues")
        _refuse(body.best_of not in (None, body.n or 1), "best_of", "must equal n")
    else:
        _check_chat(body)
    for name, only in _SPELLED_OUT.items():
        given = getattr(body, name, only)
        _refuse(given not in (None, only), name, f"{str(given).lower()} is not supported")
    choices = 1 if body.n is None else body.n
    _refuse(not 1 <= choices <= MAX_CHOICES, "n", f"is {choices}, must be 1 to {MAX_CHOICES}")
    _refuse(bool(body.stream_options) and not body.stream, "stream_options", "needs stream")
    scored = body.prompt_logprobs is not None
    _refuse(scored and bool(body.stream), "prompt_logprobs", "cannot be streamed")
    with_ids = bool(body.return_token_ids and body.stream)
    _refuse(with_ids, "return_token_ids", "cannot be streamed")
    stops = stop_strings(body)
    long = len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops)
    rule = f"must be at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters"
    _refuse(long, "stop", rule)
    urgent = body.priority or 0
    _refuse(not -_PRIORITY < urgent < _PRIORITY, "priority", "must be a 32-bit number")


def _check_chat(body: ChatBody) -> None:
    _refuse(body.parallel_tool_calls is False, "parallel_tool_calls", "false is not supported")
    alternatives = body.top_logprobs is not None
    _refuse(alternatives and not body.logprobs, "top_logprobs", "needs logprobs: true")
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    differ = both and body.max_tokens != body.max_completion_tokens
    _refuse(differ, "max_completion_tokens", "must equal max_tokens where both are given")


def _refuse(wrong: bool, field: str, rule: str) -> None:
    if wrong:
        raise ApiError(400, f"{field}: {rule}", field)


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a completion request; ApiError 400 for anything else."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(type(item) is int for item in prompt):
        return [prompt]
    if prompt and all(isinstance(item, str) for item in prompt):
        return prompt
    lists = all(isinstance(item, list) for item in prompt)
    if prompt and lists and all(type(token) is int for item in prompt for token in item):
        return prompt
    rule = "must be a text, texts, token ids or lists of token ids, and not empty"
    raise ApiError(400, f"prompt: {rule}", "prompt")


def engine_requests(
    body: CompletionBody | ChatBody,
    prompt: Sequence[int],
    facts: ModelFacts,
    *,
    max_tokens: int,
    logprobs: int | None,
    stop: tuple[str, ...],
    grammar: Grammar | None,
) -> list[Request]:
    """One request for each of the n choices of a prompt; choice i has the seed ``seed + i``."""
    choices, ids = body.n or 1, tuple(prompt)
    first_seed = secrets.randbelow(2**32 - choices) if body.seed is None else body.seed
    stop_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if not body.ignore_eos and facts.eos not in stop_ids:
        stop_ids = (facts.eos, *stop_ids)
    return [
        Request(
            prompt=ids,
            max_new_tokens=max_tokens,
            temperature=_or(body.temperature, 1.0),
            top_k=_or(body.top_k, 0),
            top_p=_or(body.top_p, 1.0),
            min_p=_or(body.min_p, 0.0),
            seed=first_seed + choice,
            stop_ids=stop_ids,
            stop=stop,
            min_tokens=_or(body.min_tokens, 0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            logit_bias=_biases(body.logit_bias or {}),
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            grammar=grammar,
            speculative=_or(body.speculative, True),
        )
        for choice in range(choices)
    ]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Token id and bias; an id may be spelled in one way only."""
    for token in biases:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", token, re.ASCII):
            raise ApiError(400, f"logit_bias: {token[:80]!r} must be a token id", "logit_bias")
    return tuple((int(token), bias) for token, bias in biases.items())


def _readable(message: str) -> str:
    return message.replace("Object contains unknown field", "unknown or unsupported field")


def _field(message: str) -> str | None:
    """The field that a validation error is about: its path, with an unknown key at the end."""
    path = re.search(r"at `\$\.?([^`]*)`", message)
    key = re.search(r"(?:unknown|missing required) field `([^`]*)`", message)
    parts = [match[1] for match in (path, key) if match and match[1]]
    return ".".join(parts) or None


def _check_numbers(body: bytes) -> None:
    """ApiError naming the field that holds NaN or Infinity, which are no JSON."""

    def finite(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, value in pairs:
            if isinstance(value, float) and not math.isfinite(value):
                raise ApiError(400, f"{name}: {value} must be a finite number", name)
        return dict(pairs)

    try:
        json.loads(body, object_pairs_hook=finite)
    except (ValueError, RecursionError):
        return
